"""Launch files of training programs: their settings become a job, and a job becomes their settings.

Each program is one module with a table of rows (a setting, the key of a job, the conversion), used in both directions.
Conversions need the same knowledge as the short form of a plan: the names of schemes, and their defaults.
"""

LAUNCH_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".args", ".toml")
"""Endings of launch files that are no YAML or JSON: scripts, lists of arguments, TOML."""

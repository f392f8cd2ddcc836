"""Settings of a resource manager in the comments of a script: Slurm's ``#SBATCH``, PBS's, LSF's."""

from __future__ import annotations

import re

from meshcast.simulator.formats.launch.bash.records import Word

SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "G": "gpus",
    "c": "cpus-per-task",
    "J": "job-name",
    "p": "partition",
    "t": "time",
    "o": "output",
    "e": "error",
    "A": "account",
    "q": "qos",
    "w": "nodelist",
    "C": "constraint",
}
"""Slurm's short options. Source: SchedMD/slurm, doc/man/man1/sbatch.1."""

_SLURM = re.compile(r"^#SBATCH[ \t]+(?:--([\w-]+)(?:[= \t]+([^\s#]\S*))?|-([A-Za-z])[= \t]?[ \t]*(\S*))")
_OTHER = re.compile(r"^#(PBS|BSUB)[ \t]+-(\w+)[ \t]+(\S+)")


def read_directives(text: str) -> dict[str, Word]:
    """Returns the settings: Slurm's by their long names, others with the manager's in front (``pbs-l``)."""
    directives = {}
    for number, line in enumerate(text.splitlines(), 1):
        if slurm := _SLURM.match(line):
            name = slurm[1] or SHORT.get(slurm[3], slurm[3])
            directives[name] = Word((slurm[2] or slurm[4] or "").strip("\"'"), number)
        elif other := _OTHER.match(line):
            directives[f"{other[1].lower()}-{other[2]}"] = Word(other[3], number)
    return directives

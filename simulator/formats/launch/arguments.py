"""The settings of a start beside the arguments of its program: of launchers, of the resource manager, in unused
variables."""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.simulator.formats.launch.bash.records import ScriptRun, Word
from meshcast.simulator.formats.launch.launches import Launch, read_words
from meshcast.simulator.formats.launch.table import Stated


def read_directives(directives: Mapping[str, Word], where: str) -> dict[str, Stated]:
    """Returns the settings of the resource manager, by their names behind ``sbatch_``."""
    return {
        f"sbatch_{name.replace('-', '_')}": Stated(word.text, f"#SBATCH --{name}", f"{where}:{word.line}")
        for name, word in directives.items()
        if word.text
    }


def merge_settings(launch: Launch) -> dict[str, Stated]:
    """Returns the options of all launchers and of the program; of two of a name that of the program counts."""
    settings = {name: stated for launcher in launch.launchers for name, stated in launcher.settings.items()}
    return {**settings, **launch.arguments}


def read_unused(run: ScriptRun, where: str) -> dict[str, Stated]:
    """Returns the options in the variables of a script that no command uses."""
    words = tuple(word for value in run.variables.values() for word in value)
    return read_words(words, where)

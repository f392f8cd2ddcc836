"""The arguments of the training program of a shell script, with those of its launchers, and single variables of it."""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.simulator.formats.launch.bash.records import ScriptRun, Word
from meshcast.simulator.formats.launch.bash.script import run_script
from meshcast.simulator.formats.launch.launches import Launch, choose_launch, find_launches, read_words
from meshcast.simulator.formats.launch.table import Stated


def read_variable(text: str, where: str, name: str) -> Stated | None:
    """Returns a variable that a script sets; None if it does not, or to what is not known."""
    words = run_script(text, where).variables.get(name, ())
    if len(words) != 1 or words[0].unknown:
        return None
    return Stated(words[0].text, name, f"{where}:{words[0].line}")


def read_arguments(text: str, where: str) -> dict[str, Stated]:
    """Returns the arguments of the training program in a script, by their names with ``_`` for ``-``.

    Of several commands the one with most arguments counts; a text without a command is a list of arguments. Options of
    launchers and settings of the resource manager (``#SBATCH --nodes``) are arguments, too.
    """
    run = run_script(text, where)
    launch = choose_launch(find_launches(run, where))
    settings = read_directives(run.directives, where)
    if launch is None or not launch.arguments:  # arguments in arrays that no command here uses
        return settings | read_unused(run, where)
    return settings | merge_settings(launch)


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

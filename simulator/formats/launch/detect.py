"""Which files are launch files, and of which program: by evidence, never by default."""

from __future__ import annotations

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.launch.launch_file import REMEDY, LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.refused import find_idle_start, find_refused
from meshcast.simulator.formats.launch.programs.registry import find_format, list_formats
from meshcast.simulator.formats.launch.verdicts import Question


def weigh_programs(file: LaunchFile) -> dict[Evidence, list[LaunchFormat]]:
    """Returns the programs that a file may be of, by how sure that is."""
    weighed: dict[Evidence, list[LaunchFormat]] = {}
    for program in list_formats().values():
        weighed.setdefault(program.recognise(file), []).append(program)
    weighed.pop(Evidence.NONE, None)
    return weighed


def detect_program(file: LaunchFile) -> LaunchFormat:
    """Returns the program of a file: that with the most evidence, or that which the user names.

    Raises PlanError for a file of no program that is read, OpenQuestions where several are as likely.
    """
    if file.options.program is not None:
        return find_format(file.options.program)
    weighed = weigh_programs(file)
    surest = max(weighed, default=Evidence.NONE)
    refused = find_refused(file)
    if refused is not None and surest < Evidence.CERTAIN:
        rule = f"it is a launch file of {refused.name}, which meshcast does not read"
        raise PlanError(file.where, rule, "Write the job in a few lines of YAML: see meshcast init")
    if surest != Evidence.NONE and (idle := find_idle_start(file)) is not None:
        raise PlanError(file.where, f"it starts {idle}, which trains nothing", "Name the script of the training")
    if surest == Evidence.NONE:
        known = ", ".join(program.program for program in list_formats().values())
        starts = file.launch.entry if file.launch is not None else ""
        what = f"it starts {starts}, which is none of the programs" if starts else "it is no launch file of a program"
        raise PlanError(file.where, f"{what} that meshcast reads: {known}", REMEDY)
    programs = weighed[surest]
    if len(programs) > 1:
        names = " or of ".join(program.program for program in programs)
        answers = tuple(f"--program {program.name}" for program in programs)
        raise OpenQuestions(file.where, (Question("", file.where, f"it may be a file of {names}", answers),))
    return programs[0]


def is_launch_file(file: LaunchFile) -> bool:
    """Returns whether a YAML or JSON file is of a training program, also of a program that is not read."""
    return file.launch is not None or bool(weigh_programs(file)) or find_refused(file) is not None

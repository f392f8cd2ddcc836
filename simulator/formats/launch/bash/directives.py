"""Settings of a resource manager in the comments of a script: Slurm's ``#SBATCH``, PBS's, LSF's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshcast.hardware.documents.input_file import split_lines
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

_SLURM = re.compile(r"[ \t]+(?:--([\w-]+)(?:[= \t]+([^\s#-]\S*))?|-([A-Za-z])[= \t]?[ \t]*([^\s#-]\S*|(?=\s|$)))")
_OTHER = re.compile(r"^#(PBS|BSUB)[ \t]+-(\w+)[ \t]+(\S+)")


def read_directives(text: str) -> dict[str, Word]:
    """Returns the settings: Slurm's by their long names, others with the manager's in front (``pbs-l``)."""
    directives = {}
    for number, line in enumerate(split_lines(text), 1):
        place = len("#SBATCH") if line.startswith("#SBATCH") else len(line)
        while slurm := _SLURM.match(line, place):
            name = slurm[1] or SHORT.get(slurm[3], slurm[3])
            directives[name] = Word((slurm[2] or slurm[4] or "").strip("\"'"), number)
            place = slurm.end()
        if other := _OTHER.match(line):
            directives[f"{other[1].lower()}-{other[2]}"] = Word(other[3], number)
    return directives


VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus": ("SLURM_GPUS",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""Variables that Slurm sets for a script by the options that it was submitted with.

Source: SchedMD/slurm, doc/man/man1/sbatch.1, OUTPUT ENVIRONMENT VARIABLES.
"""


def list_slurm_variables(options: Mapping[str, Word]) -> dict[str, Word]:
    """Returns the variables that Slurm sets. options: by their long names; of ``gpu:a100:8`` the number counts."""
    numbers = {
        name: Word(count[1], word.line)
        for name, word in options.items()
        if name in VARIABLES and (count := re.fullmatch(r"(?:[\w.-]+:)*(\d{1,9})", word.text))
    }
    if "gpu" not in (options["gres"].text if "gres" in options else ""):
        numbers.pop("gres", None)
    if {"nodes", "ntasks-per-node"} <= numbers.keys():  # which sbatch multiplies where --ntasks is not set
        tasks = int(numbers["nodes"].text) * int(numbers["ntasks-per-node"].text)
        numbers.setdefault("ntasks", Word(str(tasks), numbers["nodes"].line))
    return {variable: word for name, word in numbers.items() for variable in VARIABLES[name]}

"""All programs whose launch files are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.plugins import find_files, may_run, remember_names
from meshcast.hardware.python_file import import_file
from meshcast.simulator.formats.launch.program import LaunchFormat
from meshcast.simulator.formats.launch.programs.accelerate import ACCELERATE
from meshcast.simulator.formats.launch.programs.axolotl import AXOLOTL
from meshcast.simulator.formats.launch.programs.deepspeed import DEEPSPEED
from meshcast.simulator.formats.launch.programs.hf_trainer import TRAINER
from meshcast.simulator.formats.launch.programs.llamafactory import LLAMAFACTORY
from meshcast.simulator.formats.launch.programs.megatron import MEGATRON
from meshcast.simulator.formats.launch.programs.megatron_bridge import BRIDGE
from meshcast.simulator.formats.launch.programs.megatron_deepspeed import MEGATRON_DEEPSPEED
from meshcast.simulator.formats.launch.programs.nanotron import NANOTRON
from meshcast.simulator.formats.launch.programs.nemo import NEMO
from meshcast.simulator.formats.launch.programs.nemo_rl import NEMO_RL
from meshcast.simulator.formats.launch.programs.primus import PRIMUS
from meshcast.simulator.formats.launch.programs.swift import SWIFT
from meshcast.simulator.formats.launch.programs.swift_megatron import MEGATRON_SWIFT
from meshcast.simulator.formats.launch.programs.torchtitan import TORCHTITAN
from meshcast.simulator.formats.launch.programs.torchtune import TORCHTUNE
from meshcast.simulator.formats.launch.programs.trl import TRL
from meshcast.simulator.formats.launch.programs.verl import VERL
from meshcast.simulator.formats.launch.programs.xtuner import XTUNER

FORMATS: dict[str, LaunchFormat] = {
    program.name: program
    for program in (
        MEGATRON,
        MEGATRON_DEEPSPEED,
        TORCHTITAN,
        DEEPSPEED,
        NEMO,
        BRIDGE,
        PRIMUS,
        ACCELERATE,
        TRAINER,
        LLAMAFACTORY,
        AXOLOTL,
        TRL,
        TORCHTUNE,
        NANOTRON,
        VERL,
        NEMO_RL,
        SWIFT,
        MEGATRON_SWIFT,
        XTUNER,
    )
}
"""All formats by their names."""

EXPORTS = tuple(name for name, program in FORMATS.items() if program.write is not None)
"""Names of the formats that a job can be exported to."""


@remember_names
def list_formats() -> Mapping[str, LaunchFormat]:
    """Returns all formats by their names, those of plug-ins whose files may be run among them."""
    formats = dict(FORMATS)
    for name, path in find_files("programs", ".py", FORMATS).items():
        if may_run(path):
            formats[name] = _import_format(name, path)
    return formats


@cache
def _import_format(name: str, path: Path) -> LaunchFormat:
    """Returns the format that a file of a plug-in defines, which is called like its file."""
    module = import_file(path, f"meshcast.simulator.formats.launch.programs.{path.stem}")
    formats = [value for value in vars(module).values() if isinstance(value, LaunchFormat)]
    if [form.name for form in formats] != [name]:
        rule = f"it must define exactly one LaunchFormat, of the name {name}, and defines {len(formats)}"
        raise PlanError(str(path), rule, f"Write for example PROGRAM = LaunchFormat({name!r}, ...)")
    return formats[0]


def find_format(name: str) -> LaunchFormat:
    """Returns the format of this name."""
    formats = list_formats()
    if name not in formats:
        raise PlanError("FORM", "there is no format of this name", nearest(name, formats), name)
    return formats[name]

"""All programs whose launch files are read."""

from __future__ import annotations

from meshcast.hardware.errors import PlanError, nearest
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


def find_format(name: str) -> LaunchFormat:
    """Returns the format of this name."""
    if name not in FORMATS:
        raise PlanError("FORM", "there is no format of this name", nearest(name, FORMATS), name)
    return FORMATS[name]

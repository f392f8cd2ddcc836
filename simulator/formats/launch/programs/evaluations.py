"""Evaluations beside the steps of training, as the launch files of all programs state them.

An evaluation of the micro-batches of training holds less than a step, which keeps activations beside the same states:
it is forecast only where a program evaluates other micro-batches, or fuses the loss while it trains alone.
"""

from __future__ import annotations

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, is_null, read_number
from meshcast.simulator.formats.launch.verdicts import NoInfluence

SMALLER = NoInfluence("evaluations run the micro-batches of training, and hold less than its steps")
"""On settings of evaluations that no key of a job follows from."""

MICRO, SEQUENCE = "run.evaluation.micro", "run.evaluation.sequence"
"""Keys of a job for the micro-batches of evaluations."""


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of the micro-batches of a program's evaluations.

    micro: names of that of their sequences.
    silent: their number where the file does not say it; None: as in training.
    sequence: name of that of their length; empty: as in training.
    length: where the file does not say it.
    """

    micro: tuple[str, ...]
    silent: int | None = None
    sequence: str = ""
    length: int | None = None


def has_any(stated: Stated | None, silent: bool) -> bool:
    """Returns whether there are evaluations, by the number of their batches or samples. silent: where the file does not
    say it."""
    return silent if stated is None or is_null(stated.value) else read_number(stated) != 0


def read_evaluation(reading: Reading, settings: EvaluationSettings, runs: bool, *switches: str) -> None:
    """Reads the micro-batches of evaluations, after the batch and the loss of training.

    runs: whether there are evaluations. switches: the settings that say so.
    """
    keys, names = reading.keys, (*settings.micro, *([settings.sequence] if settings.sequence else []))
    micro = reading.take_count(*settings.micro, decisive=False)
    length = reading.take_count(settings.sequence, decisive=False) if settings.sequence else None
    if runs and micro is None:
        is_fused = keys.get("framework.set.loss.chunk_tokens") == "liger"  # while it trains alone
        micro = settings.silent or (keys.get("batch.micro") if is_fused else None)
    if runs and micro is not None:
        reading.set_key(MICRO, micro, *settings.micro, *switches)
        if (length := length or settings.length) is not None:
            reading.set_key(SEQUENCE, length, settings.sequence, *switches)
        return
    for name in (*names, *switches):
        why = SMALLER.why if runs else "there are no evaluations"
        reading.ignore(reading.take(name, decisive=False), why)

"""Reads training logs of Megatron-LM and torchtitan: the line that they print for an iteration.

Megatron-LM (``training_log`` of d98e8a64dd, and its forks)::

    iteration      122/  250000 | consumed samples: 124928 | elapsed time per iteration (ms): 86545.2 | ...

torchtitan (``torchtitan/components/metrics.py`` of b5bcd76c6)::

    step: 10  loss:  4.32018  grad_norm:  1.1230  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%

A line of torchtitan states no time but the throughput of a GPU (`Iteration.tokens_per_s`), from which the time of a
step follows with its tokens and the number of GPUs. Time and throughput are means since the previous line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import lines

REMEDY = "Remove the line, or name another log"


@dataclass(frozen=True)
class Iteration:
    """The log line of an iteration.

    Attributes:
        number: counted from 1.
        where: file and number of the line, for errors.
        seconds: duration of the iteration [s].
        tokens_per_s: throughput of a GPU [tokens/s].
        samples: global batch size [sequences].
        loss: loss of the iteration.
        tflops: TFLOP/s of a GPU, by the framework's count of FLOPs.
        mfu: model FLOPs utilisation [fraction], by the same count.
        reserved: peak memory that the allocator reserved [bytes].
    """

    number: int
    where: str
    seconds: float | None = None
    tokens_per_s: float | None = None
    samples: int | None = None
    loss: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    reserved: float | None = None


def megatron(path: Path) -> list[Iteration]:
    """Reads the iterations in a log of Megatron-LM. Raises PlanError if it has none, or incomplete lines."""
    return _read(path, _megatron, "iteration N/M | elapsed time per iteration (ms): ...")


def torchtitan(path: Path) -> list[Iteration]:
    """Reads the iterations in a log of torchtitan; where several ranks log a step, that of the slowest."""
    return _read(path, _torchtitan, "step: N  loss: ...  tps: ...")


def _read(path: Path, parse: Callable[[str, str], Iteration | None], form: str) -> list[Iteration]:
    iterations: list[Iteration] = []
    for where, line in lines(path, "Name the log of a training run"):
        iteration = parse(line, where)
        if iteration is None:
            continue
        if iterations and iterations[-1].number == iteration.number:
            iterations[-1] = max(iterations[-1], iteration, key=_slowness)
        else:
            iterations.append(iteration)
    if not iterations:
        raise PlanError(str(path), f"no line of it has the form `{form}`", "Name the log of a training run")
    return iterations


def _slowness(iteration: Iteration) -> tuple[float, float]:
    """Returns what is largest for the slowest of several ranks."""
    return iteration.seconds or 0.0, -(iteration.tokens_per_s or 0.0)


LARGEST = 1e30
"""Largest number that is read: what follows from it is finite."""

NUMBER = r"([-+]?(?:[\d,]++\.?\d*+(?:[eE][-+]?\d++)?|nan|inf))"
"""Repeats are possessive: digits that are not followed by what belongs there are not tried again in parts."""

ITERATION = re.compile(r"\biteration\s+(\d{1,15})/\s*\d+ \|")
ELAPSED = re.compile(rf"elapsed time per iteration \((ms|s)\): {NUMBER} \|")
MEGATRON = {
    "samples": re.compile(rf"global batch size:\s*{NUMBER} \|"),
    "loss": re.compile(rf"\blm loss: {NUMBER} \|"),
    # "throughput per GPU (TFLOP/s/GPU): 239.8" today, "TFLOPs: 33.65" in forks.
    "tflops": re.compile(rf"(?:\(TFLOP/s/GPU\)|TFLOPs): {NUMBER} \|"),
}


def _megatron(line: str, where: str) -> Iteration | None:
    begin = ITERATION.search(line)
    if not begin:
        return None
    elapsed = ELAPSED.search(line)
    if not elapsed:
        raise PlanError(
            where, "an iteration without `elapsed time per iteration (ms): ... |`, as if it was cut off", REMEDY
        )
    seconds = _positive(elapsed[2], where) * (1e-3 if elapsed[1] == "ms" else 1.0)
    fields = {name: _number(part[1]) for name, form in MEGATRON.items() if (part := form.search(line))}
    samples = fields.pop("samples", None)
    return Iteration(int(begin[1]), where, seconds, samples=round(samples) if samples else None, **fields)


STEP = re.compile(r"(?<!validate )\bstep:\s*(\d{1,15})\s+(?=loss:)")
TPS = re.compile(rf"\b(?:tps|wps): {NUMBER}(?=\s+\w+:)")
TORCHTITAN = {
    "loss": re.compile(rf"\bloss:\s*{NUMBER}\s"),
    "tflops": re.compile(rf"\btflops: {NUMBER}\s"),
    "mfu": re.compile(rf"\bmfu: {NUMBER}%"),
    "reserved": re.compile(rf"\bmemory:\s*{NUMBER}GiB"),
}


def _torchtitan(line: str, where: str) -> Iteration | None:
    begin = STEP.search(line)
    if not begin:
        return None
    rate = TPS.search(line)
    if not rate:
        raise PlanError(where, "a step without `tps: ...` and the fields after it, as if it was cut off", REMEDY)
    parts = {name: form.search(line) for name, form in TORCHTITAN.items()}
    fields: dict[str, Any] = {name: _number(part[1]) for name, part in parts.items() if part}
    if fields.get("mfu") is not None:
        fields["mfu"] /= 100
    if (gib := fields.pop("reserved", None)) is not None and gib > 0:
        fields["reserved"] = gib * 2**30
    return Iteration(int(begin[1]), where, tokens_per_s=_positive(rate[1], where), **fields)


def _number(word: str) -> float | None:
    """Parses a number with or without commas; None if it is not finite, as losses may be, or beyond `LARGEST`."""
    try:
        number = float(word.replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) <= LARGEST else None


def _positive(word: str, where: str) -> float:
    number = _number(word)
    if number is None or number <= 0:
        raise PlanError(where, "a number above 0 belongs here", REMEDY, word)
    return number

"""GPUs whose clock is lowered: by heat, by power, or on one of them alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.formats.gpu_samples import GPUSample
from meshcast.validation.measurements.gpu_state import REASONS

LEAST_DROP = 0.03
"""Share of the clock by which it is lower."""

BUSY = 0.5
"""Share of the time in which a GPU runs kernels, so that its clock is that of the training."""

FAULTS = 0x8 | 0x20 | 0x40 | 0x80
"""Reasons for a lower clock that are no part of ordinary work; a power cap is."""

LEAST_FAULTS = 0.05
"""Share of the samples with such a reason."""

CLOCKED = ("gemm", "attention")
"""Parts of the step whose time is that of the clock."""


class ClockDrop(Detector):
    """A clock that is lower than on other GPUs, than before, or than without a fault."""

    name = "clock drop"
    words = {
        ANY: "cooling and power of this node: nvidia-smi -q -d PERFORMANCE says why the clock is lowered, -pl sets the "
        "power limit"
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields the largest drop that the samples show, and a limit of the power below that of the board."""
        samples = [s for s in run.samples if s.clock and (s.busy is None or s.busy >= BUSY)]
        drops = [drop for drop in (compare_gpus(samples), compare_times(samples), compare_faults(samples)) if drop]
        if drops:
            share, words = max(drops)
            seconds = self._price(run, share)
            if seconds >= run.least:
                names = dict.fromkeys(
                    name for s in samples for bit, name in REASONS.items() if s.reasons & bit & FAULTS
                )
                yield self.make(run, seconds, words, *([f"nvidia-smi's reasons: {', '.join(names)}"] if names else []))
                return
        limits = [s.limit for s in samples if s.limit]
        if limits and run.report is not None:
            board, limit = run.report.job.cluster.gpu.power, statistics.median(limits)
            if limit < (1 - LEAST_DROP) * board:
                yield self.make(run, None, f"the power limit is {limit:.0f} W, the board's {board:.0f} W")

    def _price(self, run: RunEvidence, share: float) -> float:
        """Returns the seconds of a step that a lower clock takes. share: by which it is lower."""
        if run.report is None:
            return run.step * share
        clocked = sum(run.report.parts[part] for part in CLOCKED)
        return clocked * share / (1 - share)


def compare_gpus(samples: Sequence[GPUSample]) -> tuple[float, str] | None:
    """Returns by which share the clock of one GPU is below that of the others, and the words; None: it is not."""
    clocks = _by_gpu(samples)
    if len(clocks) < 2:
        return None
    slowest = min(clocks, key=lambda gpu: statistics.median(clocks[gpu]))
    lowest = statistics.median(clocks[slowest])
    others = statistics.median(clock for gpu, values in clocks.items() if gpu != slowest for clock in values)
    words = f"GPU {slowest} runs at {lowest:.0f} MHz, the others at {others:.0f} MHz"
    return _drop(lowest, others, words)


def compare_times(samples: Sequence[GPUSample]) -> tuple[float, str] | None:
    """Returns by which share the clock is lower at the end of the samples than at their begin."""
    fifth = len(samples) // 5
    if fifth < 3:
        return None
    first, last = (statistics.median(s.clock or 0.0 for s in part) for part in (samples[:fifth], samples[-fifth:]))
    return _drop(last, first, f"the clock falls from {first:.0f} to {last:.0f} MHz")


def compare_faults(samples: Sequence[GPUSample]) -> tuple[float, str] | None:
    """Returns by which share the clock is lower where nvidia-smi gives heat, a brake or a fault as the reason."""
    faulty = [s for s in samples if s.reasons & FAULTS]
    if len(faulty) < max(LEAST_FAULTS * len(samples), 3):
        return None
    sound = [s.clock or 0.0 for s in samples if not s.reasons & FAULTS]
    highest = [s.highest for s in samples if s.highest]
    usual = statistics.median(sound) if len(sound) >= 3 else max(highest, default=0.0)
    clock = statistics.median(s.clock or 0.0 for s in faulty)
    drop = _drop(clock, usual, f"the clock is {clock:.0f} MHz while it is lowered, {usual:.0f} MHz otherwise")
    return (drop[0] * len(faulty) / len(samples), drop[1]) if drop else None


def _by_gpu(samples: Sequence[GPUSample]) -> dict[str, list[float]]:
    clocks: dict[str, list[float]] = {}
    for sample in samples:
        clocks.setdefault(sample.gpu, []).append(sample.clock or 0.0)
    return {gpu: values for gpu, values in clocks.items() if len(values) >= 3}


def _drop(clock: float, usual: float, words: str) -> tuple[float, str] | None:
    share = 1 - clock / usual if usual else 0.0
    return (share, words) if share >= LEAST_DROP else None

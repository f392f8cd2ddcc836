"""Memory in the phases of a run: loading the model, the first step, the steps after it, evaluations, checkpoints.

What decides whether a run fits is the largest of them. Before the first update the optimizer has no moments, so a run
may pass its first step and fail in the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.capabilities import schemes_with
from meshcast.simulator.ir.ops import BYTES
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.program.categories import COMPUTING, KINDS
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme

SAVED = {
    "shards": "shard by shard",
    "modules": "shard by shard, and gathered weights module by module",
    "units": "and, gathered, unit by unit",
}
"""How checkpoints are saved, in words."""

BUCKETS_BEHIND = 3
"""Buckets of gradients that DeepSpeed's stage 3 reduces behind the host (`max_param_reduce_events`), with that which
fills."""

STEP, UPDATE = "step", "update"
"""Names of the phases of every step: forward and backward passes, and the optimizer's update."""


@dataclass(frozen=True)
class Phase:
    """A phase of a run on the pipeline device where it needs most memory.

    name: ``loading``, ``first step``, ``step``, ``reference``, ``update``, ``evaluation`` or ``checkpoint``.
    device: number of the device.
    total: memory of tensors at its peak [bytes].
    about: what it holds.
    """

    name: str
    device: int
    total: float
    about: str

    @property
    def is_step(self) -> bool:
        """Whether it is part of every step."""
        return self.name in (STEP, UPDATE)


def list_phases(play: Forecast) -> list[Phase]:
    """Returns the phases of a run in their order."""
    passes = [peak.passes for peak in play.peaks]
    updates = [peak.update for peak in play.peaks]
    if play.plan.job.forward_only:
        return [_find_fullest(STEP, passes, "forward passes")]
    outside, resting = play.outside_steps, [sum(by.values()) for by in play.resting]
    moments = [device.moments for device in outside]
    first = [total - later for total, later in zip(passes, moments, strict=True)]
    phases = [
        _find_fullest("loading", [device.loading for device in outside], "weights, while ranks divide them"),
        _find_fullest("first step", first, "forward and backward passes before the optimizer has moments"),
        _find_fullest(STEP, passes, "forward and backward passes"),
    ]
    if play.reference is not None:
        about = "forward passes of the reference, while activations wait for the backward pass"
        phases.append(_find_fullest("reference", _reference_totals(play, play.reference), about))
    if any(updates):
        phases.append(_find_fullest(UPDATE, updates, "weights, gradients and states in the optimizer's step"))
    if play.evaluation is not None:
        totals = _evaluation_totals(play, play.evaluation)
        phases.append(_find_fullest("evaluation", totals, "forward passes beside the states of training"))
    saving = [held + device.saved for held, device in zip(resting, outside, strict=True)]
    what = SAVED[play.plan.job.framework.memory.saves]
    return [*phases, _find_fullest("checkpoint", saving, f"states, which are copied to the host {what}")]


def find_deciding_phase(play: Forecast) -> Phase:
    """Returns the phase that needs most memory; of equal ones that of every step."""
    return max(list_phases(play), key=lambda phase: (phase.total, phase.is_step))


def heights_of_devices(play: Forecast) -> list[tuple[float, float]]:
    """Returns by device the largest memory of tensors over the phases, and what the allocator has cached beside it
    [bytes]."""
    heights = [(peak.total, peak.cached + _count_freed_behind(play, device)) for device, peak in enumerate(play.peaks)]
    if play.evaluation is not None:
        totals = _evaluation_totals(play, play.evaluation)
        heights = [max(pair, (total, 0.0)) for pair, total in zip(heights, totals, strict=True)]
    if play.reference is not None:
        totals = _reference_totals(play, play.reference)
        heights = [max(pair, (total, 0.0)) for pair, total in zip(heights, totals, strict=True)]
    if play.plan.job.framework.memory.loads != "shards" and not play.plan.job.forward_only:
        loads = (device.loading for device in play.outside_steps)
        heights = [max(pair, (load, 0.0)) for pair, load in zip(heights, loads, strict=True)]
    return heights


def _count_freed_behind(play: Forecast, device: int) -> float:
    """Returns the bytes that the host has freed at the peak and the GPU has still to use.

    Of weights it is all that a forward pass gathers, if its kernels take longer than its gathers, which the host waits
    for, and than the host itself. Gathers arrive in buffers beside them, out of which they are copied
    (`AllGatherCoalescedHandle.wait`). Gradients that are copied into a bucket take room where a backward pass frees
    fewer activations than it makes gradients.
    """
    framework, peak = play.plan.job.framework, play.peaks[device]
    if not (framework.memory.frees_behind and framework.overlap.gathers_ahead):
        return 0.0
    if not (gathered := play.outside_steps[device].gathered):
        return 0.0
    table = play.program.timetable
    slots = table.slot_array[table.starts[device] : table.starts[device + 1]].tolist()
    task = next(play.program.tasks[slot] for slot in slots if table.slots[slot].kind == "F")
    seconds = dict(zip(KINDS, task.sums[:, SUMS.index("seconds")].tolist(), strict=True))
    launches = sum(part.count * sum(op.issued for op in part.block.ops) for part in task.parts)
    if sum(seconds[kind] for kind in COMPUTING) <= max(seconds["dp"], launches * hidden_launch_s(framework)):
        return 0.0
    buckets = (scheme.bucket_elements for scheme in schemes_with(play.plan.schemes, DataScheme))
    copied = BUCKETS_BEHIND * BYTES[framework.weights] * sum(buckets)
    growing = max(0.0, 1 - peak.by.get("activations", 0.0) / gathered)
    return gathered + min(copied, gathered) * growing


def _evaluation_totals(play: Forecast, evaluation: Forecast) -> list[float]:
    """Returns by device what forward passes hold beside the states of training [bytes]."""
    beside = zip(evaluation.peaks, evaluation.resting, play.resting, strict=True)
    return [peak.total - sum(weights.values()) + sum(states.values()) for peak, weights, states in beside]


def _reference_totals(play: Forecast, reference: Forecast) -> list[float]:
    """Returns by device what the forward passes of a reference hold, beside the states of training and what waits for
    the backward pass [bytes]."""
    waiting = (peak.by.get("activations", 0.0) + peak.by.get("logits", 0.0) for peak in play.peaks)
    beside = zip(_evaluation_totals(play, reference), waiting, strict=True)
    return [total + kept for total, kept in beside]


def _find_fullest(name: str, totals: Sequence[float], about: str) -> Phase:
    device = max(range(len(totals)), key=lambda device: totals[device])
    return Phase(name, device, float(totals[device]), about)

"""Interleaved 1F1B (Megatron-LM): each device holds v chunks of the model, so the bubble is v times smaller.

Of p devices, chunk c of device i is stage c p + i. The m micro-batches run in groups of N: a device runs chunk 0 for
all of a group, then chunk 1, and so on; backward the same with the chunks in reverse order. Passes in warm-up and
cool-down are those of a chunk. A micro-batch crosses p v - 1 borders of stages each way, from the last device to the
first, too, where 1F1B has p - 1. N = p, the default, holds least; a larger N admits any m >= p and gives messages more
time (N = m: all of the batch at once).

    p = 2, v = 2, m = 4 (upper case: chunk 0, lower case: chunk 1)
    device 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3

Bubble (p-1)(t_f + t_B)/v [s] (t_f, t_B: forward and whole backward pass of a micro-batch through all chunks of a
device). Messages between the first forward pass and the first backward pass, p v - 1, and after the last, as many,
add their latency; all others are hidden, whatever m is, while 1F1B's are not. With N > p (behind: with more than p
micro-batches in the last group) only p - 1 are exposed, if p messages take no longer than N - p passes of a chunk. At
most 2 (p-1-i) + (v-1) N + 1 chunks in flight on device i, another with `overlap_passes`. Needs v >= 2; the last group,
of what is left of m, needs p micro-batches, too, or passes of its chunks would wait for each other.

Scatter and gather of messages over tensor-parallel ranks (section 4.1) is a switch of the framework,
`scatter_gather_tensors_in_pipeline`.

References: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; N: Llama Team 2024, arXiv 2407.21783, section 3.3.2,
and Megatron-LM's --microbatch-group-size-per-virtual-pipeline-stage; overlapped passes: NVIDIA/Megatron-LM,
megatron/core/pipeline_parallel/combined_1f1b.py.
"""

from collections.abc import Iterable, Sequence

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    ActionArray,
    PassOverlap,
    PipelineSetting,
    PipelineShape,
    Schedule,
    ScheduleItem,
    alternate_passes,
    nearest_multiple,
    overlapped_1f1b,
)
from meshcast.simulator.scheduling.sequence_slicing import (
    interleaved_passes,
    is_interleaved_group,
    smallest_interleaved_group,
)


class Interleaved1F1B(Schedule):
    paper = Paper(
        "arXiv:2104.04473", "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
    )

    least_chunks = 2

    class Options(Schedule.Options, PassOverlap):
        group: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches that run through a chunk in a row; by default p."""

    def check(self, shape: PipelineShape) -> None:
        p, m, group = shape.p, shape.m, self.options.group
        if shape.v < self.least_chunks:
            raise PlanError(
                "plan.chunks",
                f"{self.use} needs at least {self.least_chunks} chunks a device",
                "Set chunks: 2, or use pipeline/1f1b",
                shape.v,
            )
        if group is None and m % p:
            remedy = f"{nearest_multiple(m, p)} would work: change batch.global or plan.dp"
            remedy += f"; or plan.schedule: {{use: {self.name}, group: {smallest_interleaved_group(m, p)}}}"
            rule = f"{self.use} needs micro-batches in multiples of pp = {p}, unless group is set"
            raise PlanError("micro-batches per replica", rule, remedy, m)
        if group is not None and not is_interleaved_group(group, m, p):
            rule = f"a group of {self.use} has from pp = {p} to {m} micro-batches"
            if m < p:
                rule = f"{m} micro-batches, fewer than pp = {p}, are one group"
            elif p <= group < m:
                rule = f"{m} micro-batches in groups of {group} leave {m % group} for the last, which has pp = {p}, too"
            raise PlanError("group", rule, f"{smallest_interleaved_group(m, p)} would work", group)

    def order(self, shape: PipelineShape, device: int) -> Sequence[ScheduleItem]:
        forward, backward, warmup = interleaved_passes(shape, device, self.options.group or shape.p)
        if self.options.overlap_passes:
            return overlapped_1f1b(ActionArray(forward), ActionArray(backward), warmup)
        return alternate_passes(forward, backward, warmup)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        group, one_more = self.options.group or p, self.options.overlap_passes
        if p <= group and not one_more:
            yield ClosedForm("bubble", (p - 1) * setting.t_total / v, "section 2.2.2")
            if p == group > 1:
                yield ClosedForm("bubble_per_hop", 2 * p * v - 2, "replay of the order with a constant latency a hop")
        if m % group == 0:
            held = [min(m * v, 2 * (p - 1 - i) + (v - 1) * group + 1 + one_more) for i in range(p)]
            yield ClosedForm("in_flight_b", held, "replay of the order")

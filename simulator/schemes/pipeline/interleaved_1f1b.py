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

With `deferred_output_gradients` the last stage holds the gradient of the logits of every deferred micro-batch [tokens x
vocabulary / t elements, t tensor ranks] until its last backward pass, and computes their weight gradients then.

Scatter and gather of messages over tensor-parallel ranks (section 4.1) is a switch of the framework,
`scatter_gather_tensors_in_pipeline`.

References: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; N: Llama Team 2024, arXiv 2407.21783, section 3.3.2,
and Megatron-LM's --microbatch-group-size-per-virtual-pipeline-stage; overlapped passes: NVIDIA/Megatron-LM,
megatron/core/pipeline_parallel/combined_1f1b.py.
"""

from collections.abc import Iterable, Sequence

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    ActionArray,
    PipelineSetting,
    PipelineShape,
    ScheduleItem,
    alternate_passes,
    overlapped_1f1b,
)
from meshcast.simulator.scheduling.sequence_slicing import interleaved_passes
from meshcast.simulator.schemes.pipeline.shared.interleaved import Interleaved
from meshcast.simulator.schemes.pipeline.shared.weight_gradients import PutsOffWeightGradients


class Interleaved1F1B(Interleaved, PutsOffWeightGradients):
    paper = Paper(
        "arXiv:2104.04473", "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
    )

    class Options(Interleaved.Options, PutsOffWeightGradients.Options):
        pass

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        self.check_weight_gradients(shape)

    def order(self, shape: PipelineShape, device: int) -> Sequence[ScheduleItem]:
        forward, backward, warmup = interleaved_passes(shape, device, self.options.group or shape.p)
        if self.options.overlap_passes:
            return overlapped_1f1b(ActionArray(forward), ActionArray(backward), warmup)
        return self.defer_output(alternate_passes(forward, backward, warmup), shape)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        group, one_more = self.options.group or p, self.options.overlap_passes
        if self.defers_output:
            return
        if p <= group and not one_more:
            yield ClosedForm("bubble", (p - 1) * setting.t_total / v, "section 2.2.2")
            if p == group > 1:
                yield ClosedForm("bubble_per_hop", 2 * p * v - 2, "replay of the order with a constant latency a hop")
        if m % group == 0:
            held = [min(m * v, 2 * (p - 1 - i) + (v - 1) * group + 1 + one_more) for i in range(p)]
            yield ClosedForm("in_flight_b", held, "replay of the order")

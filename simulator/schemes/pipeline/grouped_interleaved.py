"""Grouped interleaved 1F1B (PipeOffload): a repeated block of interleaved 1F1B, in which F, B and W take turns.

Each device holds v chunks of the model, chunk c of device i as stage c p + i. Micro-batches run in groups of g <= p: a
device runs chunk 0 for all of a group, then chunk 1, and so on, backward with the chunks in reverse order. A backward
pass is split into B (gradients of inputs), which the previous stage gets at once, and W (gradients of weights) behind
it. F, B and W have a slot each in turn. Chunk c begins 3 k g slots behind chunk c - 1, k = ceil(G/g), the first B of
device i 3 (p-1-i) + 1 slots behind the first F of its last chunk. G is the fewest micro-batches between two chunks
whose messages are back in time: ceil(p/2), more where G max(t_f + t_b + t_w) < max(sum of t_f, sum of t_b) over the
devices (t_f, t_b, t_w: F, B and W of a micro-batch through all chunks of a device [s]).

    p = 2, v = 2, g = 1, m = 3 (upper case: chunk 0, lower case: chunk 1)
    device 0   F0 f0 F1 b0 w0 f1 B0 W0 F2 b1 w1 f2 B1 W1 b2 w2 B2 W2
    device 1   F0 f0 b0 w0 F1 B0 W0 f1 b1 w1 F2 B1 W1 f2 b2 w2 B2 W2

With g = p, the default, the bubble is (p-1)(t_f + t_b)/v [s] for equal devices, and device i holds v p - i chunks;
interleaved 1F1B has (p-1)(t_f + t_b + t_w)/v and (v+1) p - 1 - 2 i. A smaller g >= G holds (v-1) g + p - i, with a
longer bubble where B is longer than F and W.

The first chunks of a device live longest. With `offloaded` n the activations of the first n chunks rest in host memory:
they are copied there behind their forward pass, and back a backward pass before their own, as long as the order of the
passes has time for it (D: copy to the host, P: its memory is free, U: copy back). Half of the chunks find time if a
copy takes no longer than F, B and W of a chunk. Not modelled: two GPUs that share a PCIe switch take turns.

References: Wan et al. 2025, arXiv 2503.01328; sail-sg/zero-bubble @3fd87fd,
megatron/core/pipeline_parallel/zerobubble/scheduler/group_interleaved_1f1b.py and offloading.py
(--interleave-group-size, --cpu-offload with --offload-chunk-num).
"""

from collections.abc import Collection, Iterable
from math import ceil, gcd

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.host_copies import CopiesToHost, insert_host_copies
from meshcast.simulator.scheduling.schedule import (
    Action,
    Orders,
    PassDurations,
    PipelineSetting,
    PipelineShape,
)

ROUNDING = 1e-9
"""Of a ratio of sums of seconds: what is above a whole number by less is that number."""


class GroupedInterleaved(CopiesToHost):
    paper = Paper(
        "arXiv:2503.01328", "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", 2025
    )
    needs_durations = True
    least_chunks = 2
    backward_kinds = ("B", "W")

    class Options(CopiesToHost.Options):
        offloaded: int = Field(default=0, ge=0, strict=True)
        """First chunks of each device whose activations rest in host memory between their passes."""
        group: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches that run through a chunk in a row, at most p, which is the default."""

    def check(self, shape: PipelineShape) -> None:
        if shape.v < self.least_chunks:
            rule = f"{self.use} needs at least {self.least_chunks} chunks a device"
            raise PlanError("plan.chunks", rule, "Set chunks: 2, or use pipeline/1f1b", shape.v)
        if (group := self.options.group) is not None and group > shape.p:
            rule = f"a group of {self.use} has at most as many micro-batches as the pipeline has devices, {shape.p}"
            raise PlanError("group", rule, f"{shape.p} would work, or use pipeline/interleaved-1f1b", group)

    def copied_stages(self, shape: PipelineShape) -> Collection[int]:
        return range(min(self.options.offloaded, shape.v) * shape.p)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> Orders:
        least = ceil(shape.p / 2) if durations is None else _least_group(shape, durations)
        group = self.options.group or shape.p
        orders = [_order(shape, device, group, least) for device in range(shape.p)]
        return insert_host_copies(self, shape, orders, durations) if self.copied_stages(shape) else orders

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        group = self.options.group or p
        if group == p and m % p == 0:
            yield ClosedForm("bubble", (p - 1) * (setting.t_f + setting.t_b) / v, "replay of the order")
            yield ClosedForm("in_flight_w", [min(m * v, v * p - i) for i in range(p)], "replay of the order")


def _least_group(shape: PipelineShape, durations: PassDurations) -> int:
    """Returns the smallest group whose messages are back in time."""
    halves = durations.forward, durations.input_gradients, durations.weight_gradients
    forward, inputs, weights = ([sum(part[i :: shape.p]) / shape.v for i in range(shape.p)] for part in halves)
    turn = max(map(sum, zip(forward, inputs, weights, strict=True)))
    return max(ceil(shape.p / 2), ceil(max(sum(forward), sum(inputs)) / turn - ROUNDING))


def _order(shape: PipelineShape, device: int, group: int, least: int) -> list[Action]:
    """Returns the order of a device: its passes by the slots in which a repeated block places them."""
    p, v, times = shape.p, shape.v, ceil(least / group)
    round_length, between = 3 * group, v // gcd(v, times)
    # A chunk whose slots another chunk of the group would have goes a round later.
    begins = [times * round_length * chunk + round_length * (chunk // between) for chunk in range(v)]
    first_backward = begins[-1] + device + 3 * (p - 1 - device) + 1
    placed = []
    for k in shape.microbatches:
        slot = k // group * round_length * v + 3 * (k % group)
        for chunk in range(v):
            stage = chunk * p + device
            placed.append((slot + begins[chunk] + device, Action(stage, "F", k)))
            backward = slot + begins[v - 1 - chunk] + first_backward
            placed += [(backward, Action(stage, "B", k)), (backward + 1, Action(stage, "W", k))]
    return [action for _, action in sorted(placed)]

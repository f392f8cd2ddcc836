"""ZeRO++: ZeRO-3 with quantised all-gathers (qwZ), a copy of the weights per node (hpZ) and quantised reductions (qgZ).

`over: [across, within]` names the axes across and within nodes: N ranks in nodes of G. qwZ: weights are all-gathered in
int8 with a scale per block. hpZ: every node keeps a 16-bit copy of the weights gathered in the forward pass, sharded
over its ranks; the backward pass all-gathers it within the node. qgZ: gradients are exchanged in int4 within nodes,
summed, and exchanged across nodes: quantised twice, not at every hop.

    forward    quantise | all-gather int8 over all | dequantise, keep 1/G | compute
    backward   all-gather 16-bit within            | compute | int4 exchange within | sum | int4 exchange across | sum

Bytes that leave a node, in units of M bytes of 16-bit weights: ZeRO-3 3 M; ZeRO++ 0.5 M (forward) + 0 (backward) + 0.25
M (gradients) = 0.75 M for many nodes, plus the scales. State: 18/N + 2/G bytes per parameter with fp32 gradients (16/N
+ 2/G with 16-bit ones). Gradients are summed on a separate stream, during the rest of the backward pass.

Modules are gathered ahead as by ZeRO stage 3 (`parameter_coordinator`).

Not modelled: buffers of int4 gradients; exchanges within and across nodes in overlapping chunks.

References: Wang et al. 2023, arXiv 2306.10209, sections 3.1 to 3.3.
"""

from collections.abc import Iterable

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import KeepsSecondaryShards
from meshcast.simulator.ir.ops import BYTES, Collective, Memory, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting, split_axes
from meshcast.simulator.schemes.data.shared.fully_sharded import GatherOps
from meshcast.simulator.schemes.data.shared.parameter_coordinator import CoordinatedScheme, CoordinatorOptions

SCALE = BYTES["fp32"]
"""Bytes of the scale of a quantised block."""


class ZeroPlusPlus(CoordinatedScheme, KeepsSecondaryShards):
    paper = Paper(
        "arXiv:2306.10209", "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023
    )
    least_axes = most_axes = 2
    updates_weights = False
    divides_while_loading = True

    class Options(CoordinatorOptions):
        qwz: bool = True
        """Whether weights are all-gathered in int8."""
        hpz: bool = True
        """Whether nodes keep a copy of the weights for the backward pass."""
        qgz: bool = True
        """Whether gradients are exchanged in int4."""
        block: int = Field(default=2048, ge=1)
        """Elements that share a scale; the default is assumed."""

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        return [(ranks // near, near)]

    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        """Returns the axes within a node over which its copy of `param` is sharded; None without hpZ, and for experts
        without replicas within the node, which are all-gathered from other nodes again."""
        inner, _ = split_axes(self.shards_at_rest("parameters", param), self.node_axes)
        return inner if self.options.hpz and inner else None

    def gather_unit(self, axes: tuple[str, ...], elements: int, forward: bool) -> GatherOps:
        gathers = super().gather_unit(axes, elements, forward)
        (gather,) = gathers.ops
        inner, _ = split_axes(axes, self.node_axes)
        if not forward and self.options.hpz and inner == axes:
            gather.stream = "data-within"
            return gathers
        whole = elements * BYTES[self.framework.weights]
        keep = whole // self.mesh.size(inner) if forward and self.options.hpz and inner else 0
        unpack = [Op("keep params", work=Memory("concat", keep, keep), phase=gather.phase)] if keep else []
        if not self.options.qwz:
            return GatherOps(gathers.ops, unpack)
        wire, ranks = self.quantised_bytes("int8", elements), self.mesh.size(axes)
        quantise = Op("quantise params", work=Memory("cast", whole // ranks, wire // ranks), phase=gather.phase)
        gather.work = Collective("all_gather", wire, axes)
        dequantise = Op("dequantise params", work=Memory("cast", wire, whole), phase=gather.phase)
        return GatherOps([quantise, gather], [dequantise, *unpack], wire)

    def reduce_unit(self, axes: tuple[str, ...], elements: int) -> list[Op]:
        if not self.options.qgz:
            return super().reduce_unit(axes, elements)
        unreduced = elements * BYTES[self.framework.gradients]
        inner, outer = split_axes(axes, self.node_axes)
        ops, arrived = list[Op](), unreduced
        for place, stream in ((inner, "data-within"), (outer, "data")):
            if place:
                wire = self.quantised_bytes("int4", elements)
                ops.append(Op("quantise grads", "data-sums", Memory("cast", arrived, wire), [], "W"))
                ops.append(Op("exchange grads", stream, Collective("all_to_all", wire, place), [], "W"))
                elements, arrived = elements // self.mesh.size(place), wire
        ops.append(Op("sum grads", "data-sums", Memory("cast", arrived, unreduced // self.mesh.size(axes)), [], "W"))
        return ops

    def quantised_bytes(self, number: str, elements: int) -> int:
        """Counts the bytes of quantised elements with the scales of their blocks."""
        return round(elements * BYTES[number]) + -(-elements // self.options.block) * SCALE

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, across = setting.n, setting.across
        qwz, hpz, qgz = self.options.qwz, self.options.hpz, self.options.qgz
        ring, near = (n - 1) / n if across > 1 else 0, n // across
        quantised = sum(self.quantised_bytes("int8", module) for module in setting.module_elements)
        forward = quantised if qwz else setting.weight_bytes
        exchanged = (
            (across - 1)
            / across
            * near
            * sum(self.quantised_bytes("int4", unit // near) for unit in setting.unit_elements)
        )
        gathers = ring * forward * (1 if hpz else 2)
        summed = exchanged if qgz else ring * setting.grad_bytes
        yield ClosedForm("sent_across_nodes", setting.batches * (gathers + summed), "table 1, with the scales")
        if n > 1:
            kept = 2 / near if hpz and near > 1 else 0
            yield ClosedForm("state_bytes_per_parameter", 18 / n + kept, "section 3.2, with fp32 gradients")

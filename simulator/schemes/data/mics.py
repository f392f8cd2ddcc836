"""MiCS: all states are sharded over a partition group, as small as memory allows; groups are replicas.

In every micro-batch the weights of a unit are all-gathered within the group before both of its passes, and its
gradients are reduce-scattered there; no larger group takes part. The gradient shards are all-reduced among the R groups
once a step, after the last micro-batch. Where a group spans nodes, `hierarchical` all-gathers go `over: [across,
within]`: across nodes among ranks at the same place of their nodes, then within nodes.

    micro-batch 1 .. a    gather 1 | gather 2 ..    ..  reduce-scatter 2   reduce-scatter 1      (groups of p ranks)
    after the last        all-reduce of shards among R replicas

A rank sends 3 a (p-1)/p M + 2 (R-1)/R M/p bytes per step of a micro-batches, for M bytes of weights and of gradients.
An all-gather sends (p-k)/p M bytes out of a node of k ranks if hierarchical, (p-1)/p M in a ring over all. 16/p bytes
per parameter with 16-bit gradients, 18/p with fp32 ones. An all-gather within nodes overlaps with the next across
them.

References: Zhang et al. 2022, arXiv 2205.00119, sections 3.2 to 3.4.
"""

from collections.abc import Iterable
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import UpdatesMatrices
from meshcast.simulator.ir.ops import BYTES, Collective, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting, split_axes
from meshcast.simulator.schemes.data.shared.fully_sharded import GatherOps, ShardedScheme


class MiCS(ShardedScheme, UpdatesMatrices):
    paper = Paper("arXiv:2205.00119", "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022)
    names_axes = ("replicate",)
    most_axes = 3
    updates_weights = False

    class Options(SchemeOptions):
        replicate: str | None = None
        """The axis along which partition groups are replicas of each other."""
        hierarchical: bool = False
        """All-gathers go across nodes, then within: the group is `over` two axes, the second inside nodes."""

    def check_job(self, job: Any) -> None:
        if self.options.hierarchical and len(self.axes) - bool(self.options.replicate) < 2:
            rule = "a hierarchical all-gather goes across nodes, and then within them"
            remedy = "Say over: [across, within], or leave hierarchical out"
            raise PlanError(f"plan.schemes.{self.use}.over", rule, remedy, list(self.axes))

    def axes_reduced_once(self, param: Param) -> tuple[str, ...]:
        return split_axes(self.reduces(param), self.replica_axes)[0]

    def reduce_unit(self, axes: tuple[str, ...], elements: int) -> list[Op]:
        _, shard_axes = split_axes(axes, self.replica_axes)
        return super().reduce_unit(shard_axes, elements)

    def gather_unit(self, axes: tuple[str, ...], elements: int, forward: bool) -> GatherOps:
        inner, outer = split_axes(axes, self.node_axes)
        if not (self.options.hierarchical and inner and outer):
            return super().gather_unit(axes, elements, forward)
        parts = self.gather(outer, elements // self.mesh.size(inner), "F" if forward else "B", "every")
        work = Collective("all_gather", elements * BYTES[self.framework.weights], inner)
        return GatherOps([parts, Op("gather parts", "data-within", work, [], parts.phase)])

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        p, k, r, a = setting.n, setting.n // setting.across, setting.replicas, setting.batches
        weights, grads = setting.weight_bytes, setting.grad_bytes
        moved = a * (p - 1) / p * (2 * weights + grads) + 2 * (r - 1) / r * grads / p
        yield ClosedForm("sent_per_step", moved, "sections 3.2 and 3.4: 2-hop gradient synchronisation")
        share = (p - k) / p if self.options.hierarchical else (p - 1) / p
        if setting.across > 1:
            yield ClosedForm(
                "gathered_across_nodes", 2 * share * weights, "section 3.3: bytes that leave a node in both all-gathers"
            )
        if p > 1:
            yield ClosedForm("state_bytes_per_parameter", 18 / p, "section 3.2, with fp32 gradients")

"""ZeRO stage 3: weights are sharded, too; modules are gathered ahead of their passes, up to a limit of whole elements.

Before the forward pass of a module, and again before its backward pass, its weights are all-gathered; afterwards they
are freed. Gradients are reduce-scattered layer by layer in every micro-batch. Each module that starts asks for
`prefetch_bucket` elements more of those that follow, unless `max_live` elements are whole (`parameter_coordinator`).
Parameters of fewer than `persistence` elements stay whole: their updated shards are all-gathered once a step.

    forward    gather 1 | gather 2   gather 3   ...         backward   ... gather 2    gather 1
               ........ | compute 1  compute 2  ...                    ... compute 3   compute 2   compute 1
                                                                              reduce-scatter 3   reduce-scatter 2 ...

A rank sends 3 a (N-1)/N M bytes per step of a micro-batches, for M bytes of weights and of gradients. 16/N bytes per
parameter with 16-bit gradients, as shards of the weights are stored in the compute format and in that of the optimizer;
18/N with fp32 gradients.

Until October 2021 collectives took a list of tensors, each for a rank, which the host allocated and copied singly
(the framework's `bucket.shard_launches`), and every all-gather began with a `torch.cuda.synchronize()`: nothing was
gathered ahead (`overlap.sharded_weights: false`). The host then takes N times as long for N ranks, whatever their
shards. The profiles of DeepSpeed say so of such a `release`.

Not modelled: gradient buckets across layers.

References: Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.3 and 7.2.2; defaults: DeepSpeed zero/config.py.
Lists: `_allgather_param` and `_reduce_scatter_gradient` of runtime/zero/partition_parameters.py @c83e49f9e of
2021-04-14, gone with @c0eeb69df of 2021-10-31 and @4912e0ad7 of 2022-01-20.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import UpdatesMatrices
from meshcast.simulator.ir.ops import HostLaunch, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import GatherOps
from meshcast.simulator.schemes.data.shared.parameter_coordinator import CoordinatedScheme, CoordinatorOptions


class Zero3(CoordinatedScheme, UpdatesMatrices):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    updates_weights = False
    divides_while_loading = True

    class Options(CoordinatorOptions):
        persistence: int = Field(default=100_000, ge=0)
        """Parameters with fewer elements are not sharded."""

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        if state == "parameters" and param.size < self.options.persistence:
            return ()
        return super().shards_at_rest(state, param)

    def gather_unit(self, axes: tuple[str, ...], elements: int, forward: bool) -> GatherOps:
        gather = super().gather_unit(axes, elements, forward)
        return replace(gather, ops=self._list_shards(axes, gather.ops))

    def reduce_unit(self, axes: tuple[str, ...], elements: int) -> list[Op]:
        return self._list_shards(axes, super().reduce_unit(axes, elements))

    def _list_shards(self, axes: tuple[str, ...], ops: list[Op]) -> list[Op]:
        """Returns `ops` behind the host's list of a shard for each rank, if collectives take a list."""
        if not (ops and axes and self.framework.bucket.shard_launches):
            return ops
        launches = HostLaunch(self.framework.bucket.shard_launches * self.mesh.size(axes))
        return [Op("list shards", ops[0].stream, launches, [], ops[0].phase, ops[0].when), *ops]

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, a = setting.n, setting.batches
        small = setting.small(self.options.persistence)
        sharded_bytes = setting.weight_bytes - 2 * small
        moved = a * (2 * sharded_bytes + setting.grad_bytes) + 2 * small
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "section 7.2.2; small parameters once a step")
        if n > 1:
            whole = 2 * small / (setting.grad_bytes / 4)
            wanted = (18 - whole) / n + whole
            yield ClosedForm(
                "state_bytes_per_parameter", wanted, "section 5.3 with fp32 gradients; small weights are whole"
            )

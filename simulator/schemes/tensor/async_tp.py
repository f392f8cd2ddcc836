"""Async-TP: collectives of tensor parallelism are split into shards, which move while GEMMs on other shards run.

All-gather and GEMM: a rank begins with its own rows and pulls the shards of the other ranks from their memory one by
one, each during the GEMM on the shard before. GEMM and reduce-scatter: a rank first computes the shards that other
ranks own, each of which its owner pulls during the next GEMM, then its own shard, and adds up what it has pulled. Copy
engines move the shards, so the GEMMs keep all multiprocessors; but a GEMM on 1/p of the rows fills a GPU less well.

    own rows | GEMM 0 | GEMM 1 | GEMM 2 | GEMM 3           GEMM 1 | GEMM 2 | GEMM 3 | GEMM 0 | sum
             | pull 1 | pull 2 | pull 3 |                         | pull 1 | pull 2 | pull 3 |

The scheme accompanies any tensor scheme that shards activations, and replaces all its pairs of all-gather and GEMM and
of GEMM and reduce-scatter, forward and backward. Gradients of weights stay as they are: they read the gathered rows, or
run during the all-gather. With p ranks, e seconds of a GEMM on 1/p of the rows and c seconds of a shard's transfer, a
pair takes (p-1) max(c, e) + e seconds. The bytes sent are those of the collective. Each pair needs a buffer that other
ranks pull from: one shard for an all-gather, two for a reduce-scatter.

References: PyTorch 2024, https://discuss.pytorch.org/t/209487 (async tensor parallelism in PyTorch); the loop: Wang et
al. 2023, doi 10.1145/3567955.3567959, section 5.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hardware.errors import PlanError
from simulator.ir.ops import Memory, Op, TensorUse
from simulator.ir.registry import find_scheme
from simulator.ir.scheme import ClosedForm, Paper
from simulator.lowering.rewrite import Rewrite, replace_dependencies
from simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    TensorOverlap,
    shift_shards,
    sum_shards,
)


class AsyncTP(TensorOverlap):
    paper = Paper("https://discuss.pytorch.org/t/209487", "Introducing Async Tensor Parallelism in PyTorch", 2024)

    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, shard, ranks = pair.collective, pair.shard, pair.ranks
        own = Op(f"own {op.name}", work=Memory("concat", shard, shard), after=list(op.after), phase=op.phase)
        pulls = shift_shards(pair, [[own]] * (ranks - 1))
        rewrite.swap(op, [own, *pulls])
        products = [
            [
                replace(one, name=f"{one.name} {i}", work=work, after=replace_dependencies(one.after, {op: [came]}))
                for i, (work, came) in enumerate(zip(pair.rows(one), [own, *pulls], strict=True))
            ]
            for one in pair.products
        ]
        turns = [one for turn in zip(*products, strict=True) for one in turn]
        for one, made in zip(pair.products, products, strict=True):
            rewrite.swap(one, turns if one is pair.products[0] else [], made[-1:])
        self._add_buffer(rewrite, pair, shard, own, pulls[-1])

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        (product,), ranks = pair.products, pair.ranks
        made = [
            replace(product, name=f"{product.name} {i}", work=work, after=list(product.after))
            for i, work in zip([*range(1, ranks), 0], pair.rows(product), strict=True)
        ]
        pulls = shift_shards(pair, [[one] for one in made[:-1]])
        turns = [one for turn in zip(made[:-1], pulls, strict=True) for one in turn]
        rewrite.swap(product, [*turns, made[-1]])
        rewrite.swap(pair.collective, [sum_shards(pair, [*pulls, made[-1]])])
        self._add_buffer(rewrite, pair, min(2, ranks - 1) * pair.shard, made[0], pulls[-1])

    def _add_buffer(self, rewrite: Rewrite, pair: GemmCollective, nbytes: int, first: Op, last: Op) -> None:
        key = f"{pair.collective.phase} {pair.collective.name} pulled"
        rewrite.fragment.tensor_uses += [
            TensorUse(key, nbytes, first, made=True, category="buffers"),
            TensorUse(key, nbytes, last, category="buffers"),
        ]

    def check_job(self, job: Any) -> None:
        domain, entries = job.cluster.domain, [e for e in job.plan.schemes if e.use.startswith(f"{self.family}/")]
        for axis in (axis for e in entries for axis in find_scheme(e.use).all_axes(e.over, e.model_extra or {})):
            size, span = self.mesh.size(axis), self.mesh.size(axis) * self.mesh.stride(axis)
            if size > 1 and self.mesh.world > domain and domain % span:
                rule = (
                    f"GPUs pull from each other's memory in a scale-up domain of {domain}; groups over {axis} leave it"
                )
                raise PlanError(f"plan.mesh.{axis}", rule, f"Make {axis} the innermost axis, or smaller", size)

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, e, gathered, scattered = setting.p, setting.gemm_s / setting.p, setting.input_s, setting.output_s
        yield ClosedForm(
            "gather_seconds", (p - 1) * max(gathered / p, e) + e, "the loop of Wang et al. 2023, one direction"
        )
        yield ClosedForm(
            "scatter_seconds", (p - 1) * max(scattered / p, e) + e, "the loop of Wang et al. 2023, one direction"
        )
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")

"""Async-TP: collectives of tensor parallelism are split into shards, which move while GEMMs on other shards run.

All-gather and GEMM: a rank begins with its own rows and pulls the shards of the other ranks from their memory one by
one, each during the GEMM on the shard before. GEMM and reduce-scatter: a rank first computes the shards that other
ranks own, each of which its owner pulls during the next GEMM, then its own shard, and adds up what it has pulled. Copy
engines move the shards, so the GEMMs keep all multiprocessors; but a GEMM on 1/p of the rows fills a GPU less well.

    own rows | GEMM 0 | GEMM 1 | GEMM 2 | GEMM 3           GEMM 1 | GEMM 2 | GEMM 3 | GEMM 0 | sum
             | pull 1 | pull 2 | pull 3 |                         | pull 1 | pull 2 | pull 3 |

With `directions: 2` a rank pulls from the ranks i positions before and behind it at a time, and one GEMM computes both
shards. That is half as many steps and, where links join GPUs directly, the links of two GPUs instead of one; behind a
switch both shards share the port.

The scheme accompanies any tensor scheme that shards activations, and replaces all its pairs of all-gather and GEMM and
of GEMM and reduce-scatter, forward and backward. Gradients of weights stay as they are: they read the gathered rows, or
run during the all-gather. With p ranks, e seconds of a GEMM on 1/p of the rows and c seconds of a shard's transfer, a
pair takes (p-1) max(c, e) + e seconds in one direction; in two, p e or, whichever is longest, the pulls and GEMMs of
one step, all pulls before it and all GEMMs behind it. The bytes sent are those of the collective. Each pair needs a
buffer that other ranks pull from: one shard for an all-gather, those of two steps for a reduce-scatter.

References: PyTorch 2024, https://discuss.pytorch.org/t/209487 (async tensor parallelism in PyTorch); the loop: Wang et
al. 2023, doi 10.1145/3567955.3567959, section 5.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal

from hardware.errors import PlanError
from simulator.ir.ops import Memory, Op, TensorUse
from simulator.ir.registry import find_scheme
from simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from simulator.lowering.rewrite import Rewrite, replace_dependencies
from simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    TensorOverlap,
    make_part,
    shift_shards,
    sum_shards,
)


class AsyncTP(TensorOverlap):
    paper = Paper("https://discuss.pytorch.org/t/209487", "Introducing Async Tensor Parallelism in PyTorch", 2024)

    class Options(SchemeOptions):
        directions: Literal[1, 2] = 1
        """Directions in which shards move at the same time."""

    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, shard, steps = pair.collective, pair.shard, self._steps(pair.ranks)
        own = Op(
            f"own {op.name}", work=Memory("concat", shard, shard), after=list(op.after), phase=op.phase, launches=0.0
        )
        pulls = shift_shards(pair, [[own]] * len(steps), [pulled == 2 for pulled in steps])
        rewrite.swap(op, [own, *pulls])
        products = [
            [
                make_part(one, i, len(steps) + 1, work, replace_dependencies(one.after, {op: [came]}))
                for i, (work, came) in enumerate(zip(pair.rows(one, [1, *steps]), [own, *pulls], strict=True))
            ]
            for one in pair.products
        ]
        turns = [one for turn in zip(*products, strict=True) for one in turn]
        for one, made in zip(pair.products, products, strict=True):
            rewrite.swap(one, turns if one is pair.products[0] else [], made[-1:])
        self._add_buffer(rewrite, pair, shard, own, pulls[-1])

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        (product,), steps = pair.products, self._steps(pair.ranks)
        made = [
            make_part(product, i, len(steps) + 1, work, product.after)
            for i, work in zip([*range(1, len(steps) + 1), 0], pair.rows(product, [*steps, 1]), strict=True)
        ]
        pulls = shift_shards(pair, [[one] for one in made[:-1]], [pulled == 2 for pulled in steps])
        turns = [one for turn in zip(made[:-1], pulls, strict=True) for one in turn]
        rewrite.swap(product, [*turns, made[-1]])
        rewrite.swap(pair.collective, [sum_shards(pair, [*pulls, made[-1]])])
        self._add_buffer(rewrite, pair, sum(steps[:2]) * pair.shard, made[0], pulls[-1])

    def _steps(self, ranks: int) -> list[int]:
        """Shards that a rank pulls in each step; in two directions one in the last step if the number is odd."""
        number, at_once = ranks - 1, self.options.directions
        return [min(at_once, number - pulled) for pulled in range(0, number, at_once)]

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
        steps = self._steps(p)
        yield ClosedForm("gather_seconds", loop_seconds(e, gathered / p, steps), "the loop of Wang et al. 2023")
        yield ClosedForm("scatter_seconds", loop_seconds(e, scattered / p, steps[::-1]), "the loop of Wang et al. 2023")
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")


def loop_seconds(e: float, c: float, steps: Sequence[int]) -> float:
    """Seconds in which a rank pulls shards, some in each step, while GEMMs run on its own shard and on those pulled.

    e, c: seconds of the GEMM on a shard, and of its transfer. The loop of a reduce-scatter is this one backwards.
    """
    others = sum(steps)
    pulled = zip(accumulate(steps), steps, strict=True)
    return max([(others + 1) * e, *(c * done + e * (others - done + step) for done, step in pulled)])

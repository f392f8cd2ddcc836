"""All-gathers whose shards are pulled singly, each during the GEMM on those before: Async-TP and userbuffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import Memory, Op, TensorUse
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    ShardedRowsOverlap,
    make_part,
    shift_shards,
)


class PulledShards(ShardedRowsOverlap):
    """Base of the schemes in which a rank begins with the GEMM on its rows and pulls those of the other ranks."""

    def pull_steps(self, ranks: int) -> list[int]:
        """Shards that a rank pulls in each step."""
        return [1] * (ranks - 1)

    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, shard, steps = pair.collective, pair.shard, self.pull_steps(pair.ranks)
        local = Op(
            f"own {op.name}", work=Memory("concat", shard, shard), after=list(op.after), phase=op.phase, launches=0.0
        )
        pulls = shift_shards(pair, [[local]] * len(steps), [pulled == 2 for pulled in steps])
        rewrite.swap(op, [local, *pulls])
        products = [
            [
                make_part(product, i, len(steps) + 1, work, replace_dependencies(product.after, {op: [came]}))
                for i, (work, came) in enumerate(zip(pair.rows(product, [1, *steps]), [local, *pulls], strict=True))
            ]
            for product in pair.products
        ]
        turns = [op for turn in zip(*products, strict=True) for op in turn]
        for product, parts in zip(pair.products, products, strict=True):
            rewrite.swap(product, turns if product is pair.products[0] else [], parts[-1:])
        self.add_buffer(rewrite, pair, shard, local, pulls[-1])

    def add_buffer(self, rewrite: Rewrite, pair: GemmCollective, nbytes: int, first: Op, last: Op) -> None:
        """Adds the buffer from which other ranks pull, or into which they write, from the first to the last op."""
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


def loop_seconds(e: float, c: float, steps: Sequence[int]) -> float:
    """Computes the seconds in which a rank pulls shards, some in each step, while GEMMs run on its shard and on those
    pulled.

    e, c: seconds of the GEMM on a shard, and of its transfer. The loop of a reduce-scatter is this loop backwards.
    """
    others = sum(steps)
    pulled = zip(accumulate(steps), steps, strict=True)
    return max([(others + 1) * e, *(c * done + e * (others - done + step) for done, step in pulled)])

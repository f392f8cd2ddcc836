"""Async-TP: collectives of tensor parallelism are split into shards, which move while GEMMs on other shards run.

All-gather and GEMM: a rank begins with its rows and pulls the shards of the other ranks from their memory singly,
each during the GEMM on the shard before. GEMM and reduce-scatter: a rank first computes the shards that other
ranks own, each of which its owner pulls during the next GEMM, then its shard, and adds up what it has pulled. Copy
engines move the shards, so the GEMMs keep all multiprocessors; but a GEMM on 1/p of the rows fills a GPU less well.

    own rows | GEMM 0 | GEMM 1 | GEMM 2 | GEMM 3           GEMM 1 | GEMM 2 | GEMM 3 | GEMM 0 | sum
             | pull 1 | pull 2 | pull 3 |                         | pull 1 | pull 2 | pull 3 |

With `directions: 2` a rank pulls from the ranks i positions before and behind it at a time, and a GEMM computes both
shards. That is half as many steps and, where links join GPUs directly, the links of two GPUs instead of a single link;
behind a switch both shards share the port.

The scheme accompanies any tensor scheme that shards activations, and replaces all its pairs of all-gather and GEMM and
of GEMM and reduce-scatter, forward and backward. Gradients of weights stay as they are: they read the gathered rows, or
run during the all-gather. With p ranks, e seconds of a GEMM on 1/p of the rows and c seconds of a shard's transfer, a
pair takes (p-1) max(c, e) + e seconds in one direction; in two, p e or, whichever is longest, the pulls and GEMMs of
a step, all pulls before it and all GEMMs behind it. The bytes sent are those of the collective. Each pair needs a
buffer that other ranks pull from: a shard for an all-gather, those of two steps for a reduce-scatter.

Not modelled: GEMMs of neighbouring shards are issued on two streams in turn, so that the next one fills what the last
wave of the one before leaves idle (`_pipelined_multi_all_gather_and_consume` of torch/distributed/_symmetric_memory);
the barriers of the group before and behind each pair; PyTorch's kernels that need no split (`_fused_all_gather_matmul_
native`).

References: PyTorch 2024, https://discuss.pytorch.org/t/209487 (async tensor parallelism in PyTorch); the loop: Wang et
al. 2023, doi 10.1145/3567955.3567959, section 5.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.tensor.shared.pulled_shards import PulledShards, loop_seconds
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    make_part,
    shift_shards,
    sum_shards,
)


class AsyncTP(PulledShards):
    paper = Paper("https://discuss.pytorch.org/t/209487", "Introducing Async Tensor Parallelism in PyTorch", 2024)

    class Options(SchemeOptions):
        directions: Literal[1, 2] = 1
        """Directions in which shards move at the same time."""

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        (product,), steps = pair.products, self.pull_steps(pair.ranks)
        parts = [
            make_part(product, i, len(steps) + 1, work, product.after)
            for i, work in zip([*range(1, len(steps) + 1), 0], pair.rows(product, [*steps, 1]), strict=True)
        ]
        pulls = shift_shards(pair, [[part] for part in parts[:-1]], [pulled == 2 for pulled in steps])
        turns = [op for turn in zip(parts[:-1], pulls, strict=True) for op in turn]
        rewrite.swap(product, [*turns, parts[-1]])
        rewrite.swap(pair.collective, [sum_shards(pair, [*pulls, parts[-1]])])
        self.add_buffer(rewrite, pair, sum(steps[:2]) * pair.shard, parts[0], pulls[-1])

    def pull_steps(self, ranks: int) -> list[int]:
        """Returns the shards that a rank pulls in each step; in two directions 1 in the last step if the number is
        odd."""
        number, at_once = ranks - 1, self.options.directions
        return [min(at_once, number - pulled) for pulled in range(0, number, at_once)]

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, e, gathered, scattered = setting.p, setting.gemm_s / setting.p, setting.input_s, setting.output_s
        steps = self.pull_steps(p)
        yield ClosedForm("gather_seconds", loop_seconds(e, gathered / p, steps), "the loop of Wang et al. 2023")
        yield ClosedForm("scatter_seconds", loop_seconds(e, scattered / p, steps[::-1]), "the loop of Wang et al. 2023")
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")

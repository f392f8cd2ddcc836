"""Domino: a layer computes two halves of a micro-batch in turn, so that the all-reduce of either hides behind the
other.

The samples of a micro-batch are independent, so every kernel and every all-reduce of a layer is split into two, with
half of the samples each. A layer is a row of segments that end where kernels wait for an all-reduce: attention, MLP,
and the residual sum. A segment runs for a half and then for the other.

    kernels       attn 0 | attn 1 | mlp 0 | mlp 1 | ..       (the same backward; weight gradients follow
    all-reduces          | AR 0   | AR 1  | AR 0  | AR 1      the all-reduce of their segment's input gradient)

A product of e seconds with an all-reduce of c seconds takes e/2 + max(e/2, c/2) + c/2. All halves together compute and
send what Megatron-LM does, in smaller kernels and messages. What remains is the last all-reduce of a layer, for which
the next layer waits.

It accompanies tensor/megatron. Not modelled: columns of the second product of the MLP that are split as well, overlap
across layers, and temporary tensors of half the size.

References: Wang et al. 2024, arXiv 2409.15241, section 3; deepspeed/runtime/domino/transformer.py of DeepSpeed.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Module, Unit
from meshcast.simulator.ir.operators import Embedding, Loss
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Fragment, Gemm, Memory, Op, Work
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, TensorScheme
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies, split_work, working_predecessors
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import OVERLAP_ROLE, OverlapSetting


class Domino(TensorScheme):
    paper = Paper(
        "arXiv:2409.15241",
        "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping",
        2024,
    )
    role = OVERLAP_ROLE
    most_axes = 0

    def check_job(self, job: Any) -> None:
        odd = [length.samples for length in job.batch.lengths if length.samples % 2] or [job.batch.micro] * (
            job.batch.micro % 2
        )
        if odd and prod(job.plan.mesh.values()) > 1:
            rule = f"{self.use} splits the sequences of a micro-batch into two halves"
            raise PlanError("batch.micro", rule, f"{odd[0] + 1} would work", odd[0])

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        every = fragment.forward + fragment.backward
        ends = isinstance(module, Unit) and any(
            isinstance(operator, Embedding | Loss) for operator in module.operators()
        )
        if not isinstance(module, Unit) or ends or not any(map(self._is_reduction, every)):
            return fragment
        rewrite, halves = Rewrite(fragment), {}
        for op in every:
            if op.stream in (COMPUTE, self.family) and isinstance(op.work, Gemm | Memory | Attention | Collective):
                works = enumerate(_halve(op.work))
                halves[op] = [replace(op, name=f"{op.name} {i}", work=work) for i, work in works]
        for op, parts in halves.items():
            for i, part in enumerate(parts):
                part.after = replace_dependencies(
                    op.after, {other: [its_parts[i]] for other, its_parts in halves.items()}
                )
            rewrite.swap(op, parts, parts)
        place = {**self._places(fragment.forward, halves), **self._places(fragment.backward, halves)}
        halved = rewrite.apply()
        halved.forward.sort(key=place.__getitem__)
        halved.backward.sort(key=place.__getitem__)
        return halved

    def _is_reduction(self, op: Op) -> bool:
        return op.stream == self.family and isinstance(op.work, Collective) and op.work.operation == "all_reduce"

    def _places(self, issued: list[Op], halves: dict[Op, list[Op]]) -> dict[Op, tuple[int, int, int]]:
        """Returns segment, half and number of every new op: a segment ends before the first kernel that waits for a
        sum, or for a message of both halves."""
        places, segment, sums, whole = dict[Op, tuple[int, int, int]](), 0, set[Op](), set[Op]()
        for number, op in enumerate(issued):
            before = working_predecessors(op)
            if (op.stream == COMPUTE and before & sums) or (op in halves and before & whole):
                segment, sums, whole = segment + 1, set(), set()
            sums |= {op} if self._is_reduction(op) else set()
            # What is not split follows both halves, or goes before them.
            whole |= {op} if op not in halves and before & (halves.keys() | whole) else set()
            places |= {part: (segment, i + (op in whole), number) for i, part in enumerate(halves.get(op, [op]))}
        return places

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        product, reduced = setting.gemm_s / 2, (setting.p - 1) / setting.p * setting.output_s
        seconds = product + max(product, reduced) + reduced if setting.p > 1 else 2 * product
        yield ClosedForm("reduce_seconds", seconds, "section 3.2: an all-reduce hides behind the other half")
        yield ClosedForm("sent_per_reduced_layer", setting.sent_reduced, "halves send what the whole does")


def _halve(work: Work) -> list[Work]:
    if isinstance(work, Attention):
        return [replace(work, batch=work.batch / 2)] * 2
    if isinstance(work, Gemm) and work.batch > 1:
        return [replace(work, batch=work.batch // 2), replace(work, batch=work.batch - work.batch // 2)]
    return split_work(work, 2)

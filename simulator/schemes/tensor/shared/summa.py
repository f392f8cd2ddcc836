"""SUMMA: products of matrices on a q x q grid of ranks, each of which holds a block of every matrix, in q steps.

Each row of ranks holds some of the samples of an activation, each column a part of its width; of a weight [K, N] each
row holds a part of K, each column a part of N. C = A B takes q steps: in step l the l-th block of A is broadcast along
each row and the l-th block of B along each column, and every rank adds the product of the received blocks to its block
of C. Gradients have the layouts of their tensors: for A' = C' B^T blocks of B are broadcast and products reduced along
rows to the l-th rank; for B' = A^T C' blocks of A are broadcast and products reduced along columns. A tied output layer
multiplies by the transposed embedding table, B^T.

The blocks of the next step are broadcast during the GEMM of the current step, into the second of two buffers per
operand. Rows and columns have communicators, and so streams, each (Colossal-AI, parallel_2d/_operation.py):
blocks go along both at the same time. With `overlap` off each broadcast, GEMM and reduction of a product waits for the
one before, and a block has a single buffer, as in the authors' own program (xuqifan897/Optimus, summa/mpu/layers.py).
A rank accumulates its block of a weight gradient after the last step.

References: van de Geijn and Watts 1997, doi:10.1002/(SICI)1096-9128(199704)9:4<255::AID-CPE250>3.0.CO;2-2; the three
products as in Xu et al. 2021, arXiv 2104.05343, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import required_layout
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.operators import Embedding, Head, Linear
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Gemm, Memory, Op, TensorUse, Work
from meshcast.simulator.ir.scheme import LowerModule, Rule, SchemeOptions
from meshcast.simulator.lowering.rewrite import Rewrite, split_work
from meshcast.simulator.schemes.tensor.shared.tensor_grid import TensorGrid, contracted_and_produced, width_dims


@dataclass(frozen=True)
class OperandBlock:
    """A rank's block of an operand that is broadcast, or of a result that is reduced.

    name: for the names of ops.
    axes: axes of the broadcast or reduction.
    nbytes: bytes of the block.
    """

    name: str
    axes: tuple[str, ...]
    nbytes: int


class Summa(TensorGrid):
    """Base of the schemes that multiply on a square of ranks with axes ``row`` and ``col``.

    A rank's place along `row` is the number of its row: ranks that differ only in `row` form a column.
    """

    square = ("row", "col")

    class Options(SchemeOptions):
        overlap: bool = True
        """Blocks of the next step move during the GEMM of a step; otherwise nothing overlaps, as in Optimus' code."""

    def layouts(self, operator: Operator) -> Rule:
        if self.follows_view(operator):
            return Rule(self.along(row="b"))
        if isinstance(operator, Embedding):
            return Rule(self.along(row="b|v", col="h"))
        if isinstance(operator, Linear):
            contracted, produced = contracted_and_produced(operator)
            if _reads_transposed(operator):
                return Rule(self.along(row=f"b|{produced}", col=f"{contracted}|{produced}"))
            return Rule(self.along(row=f"b|{contracted}", col=f"{produced}|{contracted}"))
        across = width_dims(operator)
        return Rule(self.along(row="b", col=across) if across else self.along(row="b"))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if (
            not isinstance(module, Linear | Embedding)
            or self.follows_view(module)
            or self.mesh.size(self.axis("row")) == 1
        ):
            return fragment
        rewrite, buffers = Rewrite(fragment), list[TensorUse]()
        for op in (*fragment.forward, *fragment.backward):
            if isinstance(op.work, Gemm):
                broadcast, reduced = self._operands(module, op.work, op.phase)
            elif isinstance(op.work, Memory) and op.work.what == "embedding":
                (weight,) = module.weights or module.shared_weights
                shard = weight.nbytes(required_layout(weight, self.layouts(module).divide), self.mesh)
                table = OperandBlock("weight", self.axis("row"), shard)
                broadcast, reduced = ([table], None) if op.phase != "W" else ([], table)
            else:
                continue
            ops = self._multiply_in_steps(op, module.outs[0].dtype, broadcast, reduced)
            if reduced and op.phase == "W" and not any(op in other.after for other in fragment.backward):
                ops += _accumulate(op, ops[-1], reduced, module.outs[0].dtype)
            rewrite.swap(op, ops)
            # Two buffers per block: one is read, the other received. Both gradients share them.
            nbytes = (1 + self.options.overlap) * sum(
                block.nbytes for block in (*broadcast, *([reduced] if reduced else []))
            )
            key = f"{'d:' if op.phase in 'BW' else ''}blocks of {module.name}"
            buffers += [TensorUse(key, nbytes, step, step is ops[0], "buffers") for step in ops]
        rewrite.apply()
        fragment.tensor_uses += buffers
        return fragment

    def _operands(self, module: Operator, work: Gemm, phase: str) -> tuple[list[OperandBlock], OperandBlock | None]:
        """Returns the blocks that a GEMM broadcasts, and the block of its result that is reduced, if any is."""
        row, col = self.axis("row"), self.axis("col")
        operand_width = BYTES[work.dtype] * work.batch
        result_width = BYTES[module.outs[0].dtype] * work.batch
        first, second, result = work.m * work.k, work.k * work.n, work.m * work.n
        if phase == "W":
            # Of A^T C' a single operand is broadcast: A, or C' where the weight is stored transposed.
            moving = first if _reads_transposed(module) else second
            return [OperandBlock("rows", col, round(moving * operand_width))], OperandBlock(
                "weight", row, round(result * result_width)
            )
        weight = OperandBlock("weight", row, round(second * operand_width))
        if (phase == "B") == _reads_transposed(module):
            return [OperandBlock("rows", col, round(first * operand_width)), weight], None
        return [weight], OperandBlock("rows", col, round(result * result_width))

    def _multiply_in_steps(
        self, op: Op, dtype: str, broadcast: Sequence[OperandBlock], reduced: OperandBlock | None
    ) -> list[Op]:
        """Makes the ops of a product: in each step broadcasts, a GEMM, and a reduction where there is `reduced`.

        dtype: format of partial results that are reduced.
        """
        if not self.options.overlap:
            return self._multiply_in_turn(op, dtype, broadcast, reduced)
        ops: list[Op] = []
        kernels: list[Op] = []
        sums: list[Op] = []
        works = self._step_works(op.work, dtype, reduced)
        arrived: list[list[Op]] = []

        def issue_broadcasts(step: int) -> None:
            """Broadcasts the blocks of a step into the buffers that the GEMM two steps earlier has read."""
            free = [*op.after, *(kernels[step - 2 : step - 1] if step > 1 else [])]
            arrived.append([])
            for block in broadcast:
                work = Collective("broadcast", block.nbytes, block.axes)
                name = f"broadcast {block.name} {op.name} {step}"
                arrived[step].append(replace(op, name=name, stream=self._stream(block), work=work, after=list(free)))
            ops.extend(arrived[step])

        issue_broadcasts(0)
        for step, work in enumerate(works):
            if step + 1 < len(works):
                issue_broadcasts(step + 1)
            after = [*op.after, *arrived[step], *(sums[step - 2 : step - 1] if step > 1 else [])]
            kernels.append(replace(op, name=f"{op.name} {step}", work=work, after=after))
            ops.append(kernels[step])
            if reduced:
                to = Collective("reduce", reduced.nbytes, reduced.axes)
                name = f"reduce {reduced.name} {op.name} {step}"
                behind, stream = [kernels[step], *sums[-1:]], self._stream(reduced)
                sums.append(replace(op, name=name, stream=stream, work=to, after=behind))
                ops.append(sums[step])
        return ops

    def _multiply_in_turn(
        self, op: Op, dtype: str, broadcast: Sequence[OperandBlock], reduced: OperandBlock | None
    ) -> list[Op]:
        """Makes the ops of a product as `_multiply_in_steps`, each of which waits for the one before."""
        ops: list[Op] = []

        def issue(name: str, stream: str, work: Work) -> None:
            ops.append(replace(op, name=name, stream=stream, work=work, after=[*op.after, *ops[-1:]]))

        for step, work in enumerate(self._step_works(op.work, dtype, reduced)):
            for block in broadcast:
                moved = Collective("broadcast", block.nbytes, block.axes)
                issue(f"broadcast {block.name} {op.name} {step}", self._stream(block), moved)
            issue(f"{op.name} {step}", op.stream, work)
            if reduced:
                to = Collective("reduce", reduced.nbytes, reduced.axes)
                issue(f"reduce {reduced.name} {op.name} {step}", self._stream(reduced), to)
        return ops

    def _stream(self, block: OperandBlock) -> str:
        """Returns the stream of the communicator along which a block moves; other collectives of the scheme run among
        the ranks of a row."""
        return f"{self.family}-row" if block.axes == self.axis("row") else self.family

    def _step_works(self, work: Work | None, dtype: str, reduced: OperandBlock | None) -> list[Work]:
        """Returns the GEMM of each step, which accumulates in place or writes a partial result to be reduced."""
        q = self.mesh.size(self.axis("row"))
        if isinstance(work, Gemm):
            alone = replace(work, accumulate=False, out_dtype=dtype)
            return [alone] * q if reduced else [alone, *[replace(alone, accumulate=True)] * (q - 1)]
        assert isinstance(work, Memory)
        # Rows are added to a zeroed block.
        zeros = reduced.nbytes if reduced else 0
        return [replace(part, write=part.write + zeros) for part in split_work(work, q) if isinstance(part, Memory)]


def _accumulate(op: Op, after: Op, block: OperandBlock, dtype: str) -> list[Op]:
    """Makes the kernel that accumulates a rank's block of a weight gradient, unless the GEMM itself does so."""
    if isinstance(op.work, Gemm) and not op.work.accumulate:
        return []
    kept = block.nbytes // BYTES[dtype] * BYTES[op.work.out_dtype if isinstance(op.work, Gemm) else "fp32"]
    work = Memory("add", block.nbytes + kept, kept)
    return [replace(op, name=f"add {op.name}", work=work, after=[after])]


def _reads_transposed(operator: Operator) -> bool:
    """Returns whether a GEMM reads its weight transposed: a tied output layer with the embedding's table."""
    return isinstance(operator, Head) and operator.tied

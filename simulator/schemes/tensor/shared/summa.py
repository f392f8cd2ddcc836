"""Products of matrices that lie in blocks on a square of ranks, step by step (SUMMA).

On q x q ranks the samples of an activation are cut along the rows of ranks and its width along the columns, a weight
[K, N] is cut K along the rows and N along the columns. So C = A B takes q steps: in step l the l-th block of A is
broadcast along each row and the l-th of B along each column, and all ranks add the product of what arrived. Gradients
lie in the same way: A' = C' B^T broadcasts blocks of B and sums products along rows to the l-th rank, B' = A^T C'
broadcasts blocks of A and sums products along columns. A tied output layer reads its table as B^T.

Blocks of the next step are on their way while one is multiplied: two buffers for each operand. A rank adds its own
block of a weight gradient to what was there when all steps are done.

References: van de Geijn and Watts 1997, doi:10.1002/(SICI)1096-9128(199704)9:4<255::AID-CPE250>3.0.CO;2-2; the three
forms as in Xu et al. 2021, arXiv 2104.05343, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.ir.layout import required_layout
from simulator.ir.modules import Module, Operator
from simulator.ir.operators import Embedding, Head, Linear
from simulator.ir.ops import BYTES, Collective, Fragment, Gemm, Memory, Op, TensorUse, Work
from simulator.ir.scheme import LowerModule, Rule
from simulator.lowering.rewrite import Rewrite, split_work
from simulator.schemes.tensor.shared.tensor_grid import TensorGrid, contracted_and_produced, width_dims


@dataclass(frozen=True)
class OperandBlock:
    """A block of an operand or of a result, as it is broadcast or summed along `axes`."""

    name: str
    axes: tuple[str, ...]
    nbytes: int


class Summa(TensorGrid):
    """Base of the schemes whose products run on a square of ranks, of axes ``row`` and ``col``.

    A rank's place along `row` is the number of its row: ranks that differ in `row` alone stand in one column.
    """

    square = ("row", "col")

    def layouts(self, operator: Operator) -> Rule:
        if self.follows_view(operator):
            return Rule(self.along(row="b"))
        if isinstance(operator, Embedding):
            return Rule(self.along(row="b|v", col="h"))
        if isinstance(operator, Linear):
            contracted, made = contracted_and_produced(operator)
            if _reads_transposed(operator):
                return Rule(self.along(row=f"b|{made}", col=f"{contracted}|{made}"))
            return Rule(self.along(row=f"b|{contracted}", col=f"{made}|{contracted}"))
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
                table = self._table_block(module)
                broadcast, reduced = ([table], None) if op.phase != "W" else ([], table)
            else:
                continue
            ops = self._multiply_in_steps(op, module.outs[0].dtype, broadcast, reduced)
            if reduced and op.phase == "W" and not any(op in other.after for other in fragment.backward):
                ops += _accumulate(op, ops[-1], reduced, module.outs[0].dtype)
            rewrite.swap(op, ops)
            # Two of each: one is multiplied, one is on its way. Both gradients have the same ones.
            nbytes = 2 * sum(block.nbytes for block in (*broadcast, *([reduced] if reduced else [])))
            key = f"{'d:' if op.phase in 'BW' else ''}blocks of {module.name}"
            buffers += [
                TensorUse(key, nbytes, ops[0], True, "buffers"),
                TensorUse(key, nbytes, ops[-1], False, "buffers"),
            ]
        rewrite.apply()
        fragment.tensor_uses += buffers
        return fragment

    def _operands(self, module: Operator, work: Gemm, phase: str) -> tuple[list[OperandBlock], OperandBlock | None]:
        """What is broadcast for a product, and what is summed: of a rank's blocks of [m, k], [k, n] and [m, n]."""
        row, col = self.axis("row"), self.axis("col")
        given = BYTES[work.dtype] * work.batch
        made = BYTES[module.outs[0].dtype] * work.batch
        first, second, result = work.m * work.k, work.k * work.n, work.m * work.n
        if phase == "W":
            # Of A^T C' the operand that does not come out of the sum travels: C' where the weight lies transposed.
            moving = first if _reads_transposed(module) else second
            return [OperandBlock("rows", col, round(moving * given))], OperandBlock("weight", row, round(result * made))
        weight = OperandBlock("weight", row, round(second * given))
        if (phase == "B") == _reads_transposed(module):
            return [OperandBlock("rows", col, round(first * given)), weight], None
        return [weight], OperandBlock("rows", col, round(result * made))

    def _table_block(self, module: Operator) -> OperandBlock:
        """A rank's block of the table that an embedding looks rows up in."""
        (table,) = module.weights or module.shared_weights
        return OperandBlock(
            "weight", self.axis("row"), table.nbytes(required_layout(table, self.layouts(module).divide), self.mesh)
        )

    def _multiply_in_steps(
        self, op: Op, dtype: str, broadcast: Sequence[OperandBlock], reduced: OperandBlock | None
    ) -> list[Op]:
        """The steps of one product, each broadcast ahead of the product before its own. dtype: of sums."""
        ops: list[Op] = []
        kernels: list[Op] = []
        sums: list[Op] = []
        works = self._step_works(op.work, dtype, reduced)
        arrived: list[list[Op]] = []

        def issue_broadcasts(step: int) -> None:
            """Into buffers that the product before the last has read."""
            free = [*op.after, *(kernels[step - 2 : step - 1] if step > 1 else [])]
            arrived.append([])
            for block in broadcast:
                work = Collective("broadcast", block.nbytes, block.axes)
                name = f"broadcast {block.name} {op.name} {step}"
                arrived[step].append(replace(op, name=name, stream=self.family, work=work, after=list(free)))
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
                sums.append(replace(op, name=name, stream=self.family, work=to, after=[kernels[step]]))
                ops.append(sums[step])
        return ops

    def _step_works(self, work: Work | None, dtype: str, reduced: OperandBlock | None) -> list[Work]:
        """The parts of a product: added up where they are made, or written to be summed."""
        q = self.mesh.size(self.axis("row"))
        if isinstance(work, Gemm):
            alone = replace(work, accumulate=False, out_dtype=dtype)
            return [alone] * q if reduced else [alone, *[replace(alone, accumulate=True)] * (q - 1)]
        assert isinstance(work, Memory)
        # Rows are added to a block of zeros.
        zeros = reduced.nbytes if reduced else 0
        return [replace(part, write=part.write + zeros) for part in split_work(work, q) if isinstance(part, Memory)]


def _accumulate(op: Op, after: Op, block: OperandBlock, dtype: str) -> list[Op]:
    """The kernel that adds a rank's own block of a weight gradient to what persists, where no other does."""
    if isinstance(op.work, Gemm) and not op.work.accumulate:
        return []
    kept = block.nbytes // BYTES[dtype] * BYTES[op.work.out_dtype if isinstance(op.work, Gemm) else "fp32"]
    work = Memory("add", block.nbytes + kept, kept)
    return [replace(op, name=f"add {op.name}", work=work, after=[after])]


def _reads_transposed(operator: Operator) -> bool:
    """Whether a product reads its weight transposed: a tied output layer, whose table lies as the embedding's."""
    return isinstance(operator, Head) and operator.tied

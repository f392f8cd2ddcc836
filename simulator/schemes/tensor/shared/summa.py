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
from simulator.lowering.rewrite import Rewrite, parts
from simulator.schemes.tensor.shared.tensor_grid import Grid, product, width


@dataclass(frozen=True)
class Block:
    """A block of an operand or of a result, as it is broadcast or summed along `axes`."""

    name: str
    axes: tuple[str, ...]
    nbytes: int


class Summa(Grid):
    """Base of the schemes whose products run on a square of ranks, of axes ``row`` and ``col``.

    A rank's place along `row` is the number of its row: ranks that differ in `row` alone stand in one column.
    """

    square = ("row", "col")

    def layouts(self, operator: Operator) -> Rule:
        if self.spread(operator):
            return Rule(self.along(row="b"))
        if isinstance(operator, Embedding):
            return Rule(self.along(row="b|v", col="h"))
        if isinstance(operator, Linear):
            contracted, made = product(operator)
            if _transposed(operator):
                return Rule(self.along(row=f"b|{made}", col=f"{contracted}|{made}"))
            return Rule(self.along(row=f"b|{contracted}", col=f"{made}|{contracted}"))
        across = width(operator)
        return Rule(self.along(row="b", col=across) if across else self.along(row="b"))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if not isinstance(module, Linear | Embedding) or self.spread(module) or self.mesh.size(self.axis("row")) == 1:
            return fragment
        rewrite, buffers = Rewrite(fragment), list[TensorUse]()
        for op in (*fragment.forward, *fragment.backward):
            if isinstance(op.work, Gemm):
                brought, summed = self._operands(module, op.work, op.phase)
            elif isinstance(op.work, Memory) and op.work.what == "embedding":
                table = self._table(module)
                brought, summed = ([table], None) if op.phase != "W" else ([], table)
            else:
                continue
            ops = self._steps(op, module.outs[0].dtype, brought, summed)
            if summed and op.phase == "W" and not any(op in other.after for other in fragment.backward):
                ops += _added(op, ops[-1], summed, module.outs[0].dtype)
            rewrite.swap(op, ops)
            # Two of each: one is multiplied, one is on its way. Both gradients have the same ones.
            nbytes = 2 * sum(block.nbytes for block in (*brought, *([summed] if summed else [])))
            key = f"{'d:' if op.phase in 'BW' else ''}blocks of {module.name}"
            buffers += [
                TensorUse(key, nbytes, ops[0], True, "buffers"),
                TensorUse(key, nbytes, ops[-1], False, "buffers"),
            ]
        rewrite.done()
        fragment.tensor_uses += buffers
        return fragment

    def _operands(self, module: Operator, work: Gemm, phase: str) -> tuple[list[Block], Block | None]:
        """What is broadcast for a product, and what is summed: of a rank's blocks of [m, k], [k, n] and [m, n]."""
        row, col = self.axis("row"), self.axis("col")
        given = BYTES[work.dtype] * work.batch
        made = BYTES[module.outs[0].dtype] * work.batch
        first, second, result = work.m * work.k, work.k * work.n, work.m * work.n
        if phase == "W":
            # Of A^T C' the operand that does not come out of the sum travels: C' where the weight lies transposed.
            moving = first if _transposed(module) else second
            return [Block("rows", col, round(moving * given))], Block("weight", row, round(result * made))
        weight = Block("weight", row, round(second * given))
        if (phase == "B") == _transposed(module):
            return [Block("rows", col, round(first * given)), weight], None
        return [weight], Block("rows", col, round(result * made))

    def _table(self, module: Operator) -> Block:
        """A rank's block of the table that an embedding looks rows up in."""
        (table,) = module.weights or module.shared_weights
        return Block(
            "weight", self.axis("row"), table.nbytes(required_layout(table, self.layouts(module).divide), self.mesh)
        )

    def _steps(self, op: Op, dtype: str, brought: Sequence[Block], summed: Block | None) -> list[Op]:
        """The steps of one product, each broadcast ahead of the product before its own. dtype: of sums."""
        ops: list[Op] = []
        kernels: list[Op] = []
        sums: list[Op] = []
        works = self._works(op.work, dtype, summed)
        arrived: list[list[Op]] = []

        def bring(step: int) -> None:
            """Into buffers that the product before the last has read."""
            free = [*op.after, *(kernels[step - 2 : step - 1] if step > 1 else [])]
            arrived.append([])
            for block in brought:
                work = Collective("broadcast", block.nbytes, block.axes)
                name = f"broadcast {block.name} {op.name} {step}"
                arrived[step].append(replace(op, name=name, stream=self.family, work=work, after=list(free)))
            ops.extend(arrived[step])

        bring(0)
        for step, work in enumerate(works):
            if step + 1 < len(works):
                bring(step + 1)
            after = [*op.after, *arrived[step], *(sums[step - 2 : step - 1] if step > 1 else [])]
            kernels.append(replace(op, name=f"{op.name} {step}", work=work, after=after))
            ops.append(kernels[step])
            if summed:
                to = Collective("reduce", summed.nbytes, summed.axes)
                name = f"reduce {summed.name} {op.name} {step}"
                sums.append(replace(op, name=name, stream=self.family, work=to, after=[kernels[step]]))
                ops.append(sums[step])
        return ops

    def _works(self, work: Work | None, dtype: str, summed: Block | None) -> list[Work]:
        """The parts of a product: added up where they are made, or written to be summed."""
        q = self.mesh.size(self.axis("row"))
        if isinstance(work, Gemm):
            alone = replace(work, accumulate=False, out_dtype=dtype)
            return [alone] * q if summed else [alone, *[replace(alone, accumulate=True)] * (q - 1)]
        assert isinstance(work, Memory)
        # Rows are added to a block of zeros.
        zeros = summed.nbytes if summed else 0
        return [replace(part, write=part.write + zeros) for part in parts(work, q) if isinstance(part, Memory)]


def _added(op: Op, after: Op, block: Block, dtype: str) -> list[Op]:
    """The kernel that adds a rank's own block of a weight gradient to what persists, where no other does."""
    if isinstance(op.work, Gemm) and not op.work.accumulate:
        return []
    kept = block.nbytes // BYTES[dtype] * BYTES[op.work.out_dtype if isinstance(op.work, Gemm) else "fp32"]
    work = Memory("add", block.nbytes + kept, kept)
    return [replace(op, name=f"add {op.name}", work=work, after=[after])]


def _transposed(operator: Operator) -> bool:
    """Whether a product reads its weight transposed: a tied output layer, whose table lies as the embedding's."""
    return isinstance(operator, Head) and operator.tied

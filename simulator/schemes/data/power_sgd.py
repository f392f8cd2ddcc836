"""PowerSGD: the gradient of every matrix is reduced as two thin factors of rank r, by one step of power iteration.

To the gradient M (n x m) of a matrix the error of the last step is added. P = M Q, with the Q (m x r) of the last step,
is all-reduced and its columns made orthogonal; Q = M^T P is all-reduced; P Q^T stands for the mean gradient, and
M - P Q^T is the next step's error. Vectors, and matrices that would not shrink, are all-reduced as they are. In buckets
during the backward pass (as PyTorch's communication hook) where the framework overlaps, else at once after it (as the
paper).

    bucket   add error, P = M Q | all-reduce rest | all-reduce P | orthogonalise, Q = M^T P | all-reduce Q | P Q^T

A rank sends 2 (N-1)/N g (sum of r (n + m) + rest) bytes for g bytes of an element of gradients, N ranks: nm/(r (n + m))
times less for a matrix. It keeps g (nm + r (n + m)) bytes for every matrix that it holds: the error and both factors.
The products read matrices and are bound by memory up to ranks of some 16; Gram-Schmidt reads a column once for each
later column.

Not modelled: launches of a kernel for each matrix; the kernels' slow-down of the backward pass that they run beside;
first steps without compression.

References: Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithms 1 and 2; PyTorch's powerSGD_hook.py.
"""

from collections.abc import Iterable, Mapping, Sequence

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import KeepsOwnStates
from meshcast.simulator.ir.ops import BYTES, Collective, Memory, Op, Param, Work
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, Sizes


class PowerSGD(DataScheme, KeepsOwnStates):
    paper = Paper(
        "arXiv:1905.13727", "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
    )

    class Options(SchemeOptions):
        rank: int = Field(default=4, ge=1, strict=True)
        """Columns of the two factors."""

    def gradient_sizes(self, param: Param) -> Sizes:
        """Returns the elements; elements, rows and columns of the matrices that shrink."""
        rows, columns = param.shape or (0, 0)
        if self.options.rank * (rows + columns) >= rows * columns:
            return param.size, 0, 0, 0
        matrices = param.size // (rows * columns)
        return param.size, param.size, matrices * rows, matrices * columns

    def own_states(self, param: Param) -> Mapping[str, float]:
        _, elements, rows, columns = self.gradient_sizes(param)
        kept = elements + self.options.rank * (rows + columns)
        alone = self.mesh.size(self.axes_reduced_once(param)) == 1
        return {} if alone else {"gpu": kept * BYTES[self.framework.gradients]}

    def reduce_bucket(self, axes: tuple[str, ...], sizes: Sizes, phase: str, when: str) -> Sequence[Op]:
        every, elements, rows, columns = sizes
        r, g, ops = self.options.rank, BYTES[self.framework.gradients], list[Op]()
        p, q, matrix = g * r * rows, g * r * columns, g * elements

        def add(name: str, work: Work) -> None:
            ops.append(Op(name, "data", work, ops[-1:], phase, when))

        if elements:
            add("add error", Memory("add", 2 * matrix, matrix))
            add("compress grads", Memory("low-rank", matrix + q, p))
        if every > elements:
            add("reduce rest", Collective("all_reduce", g * (every - elements), axes))
        if elements:
            add("reduce P", Collective("all_reduce", p, axes))
            # Each column is normalised, and its projection is taken off all later columns.
            add("orthogonalise", Memory("low-rank", p * (r + 2), p * (r + 1) // 2))
            add("compress grads", Memory("low-rank", matrix + p, q))
            add("reduce Q", Collective("all_reduce", q, axes))
            add("decompress grads", Memory("low-rank", p + q + matrix, 2 * matrix))
        return ops

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, r = setting.n, self.options.rank
        factors = shrunk = 0
        for rows, columns in setting.matrices:
            if r * (rows + columns) < rows * columns:
                factors, shrunk = factors + r * (rows + columns), shrunk + rows * columns
        elements = sum(setting.unit_elements)
        sent = 2 * (n - 1) / n * 4 * (elements - shrunk + factors)
        yield ClosedForm("sent_per_step", sent, "algorithm 2: both factors of every matrix, and the vectors")
        kept = 4 * (shrunk + factors) / elements if n > 1 else 0
        yield ClosedForm(
            "state_bytes_per_parameter", 18 + kept, "algorithm 2: errors, and the factors of the last step"
        )

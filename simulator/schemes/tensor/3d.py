"""3D tensor parallelism: every matrix of a product is sharded over a cube of ranks, which sends the fewest bytes.

The rows of activations are sharded along two axes of the cube and their width along the third; weights are sharded
along all three. Before a product its input is all-gathered along an axis and its weight along another; its result is
reduce-scattered along the third. In the result two axes have changed places, so the next product swaps them back.

    x [T/ij, K/l] --all-gather j--> [T/i, K/l]
    W [K/li, N/j] --all-gather i--> [K/l, N/j]   GEMM, reduce-scatter l --> y [T/il, N/j]   ... --> [T/ij, K/l]

`over: [i, j, l]`, q ranks each. T tokens, K and N the widths of input and output. Elements that a rank sends per linear
and micro-batch: (q-1)/q^3 (TK + KN + TN) forward and as many backward. The gathered operands are kept for the gradients
(1/q^2 of the activations), or all-gathered again where the framework does so. A weight is stored sharded along its
hidden dim, whether that is its input or its output, so a tied table has the same layout at both ends of the model.
Biases and norm weights are replicated along the axes that shard no dim of theirs.

References: Bian et al. 2021, arXiv 2105.14450, section 3; Agarwal et al. 1995, doi:10.1147/rd.395.0575.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import Embedding, Linear
from meshcast.simulator.ir.scheme import ClosedForm, Paper, Rule
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.schemes.tensor.shared.tensor_grid import TensorGrid, contracted_and_produced, width_dims

INNER = ("a", "f", "v")
"""Dims inside a block, between its two linears; the other dims are those of the residual stream."""


class ThreeD(TensorGrid):
    paper = Paper("arXiv:2105.14450", "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021)
    least_axes = most_axes = 3
    names = square = ("i", "j", "l")

    def layouts(self, operator: Operator) -> Rule:
        if self.follows_view(operator):
            return Rule(self.along(i="b", j="b"))
        if isinstance(operator, Embedding | Linear):
            taken, produced = contracted_and_produced(operator) if isinstance(operator, Linear) else ("v", "h")
            inner, outer = (taken, produced) if taken in INNER and produced not in INNER else (produced, taken)
            return Rule(self.along(i="b", j=inner, l=outer), at_rest=self.along(i=outer))
        across = width_dims(operator)
        if not across:
            return Rule(self.along(i="b", j="b"))
        return Rule(self.along(i="b", l="b", j=across) if across in INNER else self.along(i="b", j="b", l=across))

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        q, b, s, h, a = setting.q, setting.b, setting.s, setting.h, setting.a
        operands, results = 7 * b * s * h + 12 * h * h, 9 * b * s * h
        once = (q - 1) / q**3 * (operands + results) * 2
        again = (q - 1) / q**3 * operands * 2 if setting.regather else 0
        sums = 4 * 2 * (q - 1) / q * 2 * b * s / q**2 * 4
        kept = 1 if setting.regather else q
        yield ClosedForm("sent_by_products_forward", once, "section 3: all-gathers of X and W, reduce-scatter of Y")
        yield ClosedForm("sent_by_products_backward", once + again, "section 3: the same for the gradients")
        yield ClosedForm(
            "sent_per_layer",
            2 * once + again + sums,
            "section 3, with two sums per token and norm, forward and backward",
        )
        yield ClosedForm("parameters_per_layer", 12 * h * h / q**3 + 13 * h / q, "section 3: 1/q^3 of every matrix")
        activations = s * b * h * (20 + 14 * kept + 5 * a * s / h) / q**3
        yield ClosedForm(
            "activations_per_layer", activations, "arXiv 2205.05198, equation 1; inputs of linears all-gathered"
        )
        yield ClosedForm("activations_per_layer_full", 2 * s * b * h / q**3, "arXiv 2205.05198, table 2")

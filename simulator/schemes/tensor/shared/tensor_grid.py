"""Grids of tensor ranks: what schemes have in common that divide every product along several axes.

The ranks of such a scheme are a square or a cube; each of its axes divides samples, what a product contracts, or what
it makes. So samples are divided, too: a micro-batch must have a multiple of as many as there are ranks along the axes
that divide them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hardware.errors import PlanError
from simulator.ir.modules import Operator
from simulator.ir.moe_operators import TopK
from simulator.ir.operators import Concat, Linear
from simulator.ir.scheme import TensorScheme

WIDTHS = ("a", "f", "v", "h", "c", "r", "rank")
"""What activations are wide along: heads, feed-forward, vocabulary, hidden, two streams side by side, latents and the
logits of routers, adapters. Of several at one leaf the first is the one whose parts have nothing to do with each other.
"""


class TensorGrid(TensorScheme):
    """Base of the schemes on grids."""

    names: ClassVar[tuple[str, ...]]
    """Its axes, in the order in which a plan names them."""
    square: ClassVar[tuple[str, ...]]
    """Those of one size."""

    def axis(self, name: str) -> tuple[str, ...]:
        """The parts of one of its axes."""
        return next(
            (self.mesh.parts(axis) for own, axis in zip(self.names, self.axes, strict=False) if own == name), ()
        )

    def along(self, **dims: str) -> Mapping[str, str]:
        """Which dim each of its axes divides, as a rule of parts of the mesh."""
        return {part: dim for name, dim in dims.items() for part in self.axis(name)}

    def follows_view(self, operator: Operator) -> bool:
        """Whether a view of the mesh says where the ranks of a leaf lie."""
        return operator.view in self.mesh.views

    def check_job(self, job: Any) -> None:
        sizes = {
            axis: self.mesh.size(axis) for name, axis in zip(self.names, self.axes, strict=True) if name in self.square
        }
        if len({*sizes.values()}) > 1:
            rule = f"{self.use} multiplies on as many ranks along each of the axes {', '.join(sizes)}"
            fits = " or ".join(str(size) for size in sorted({*sizes.values()}))
            raise PlanError("plan.mesh", rule, f"{' = '.join(sizes)} = {fits} would work", sizes)


def contracted_and_produced(linear: Linear) -> tuple[str, str]:
    """The dim that a linear contracts, and the one that it makes."""
    given, made = linear.ins[0], linear.outs[0]
    contracted = next(dim for dim in given.dims if not made.has(dim))
    return contracted, next(dim for dim in made.dims if not given.has(dim))


def width_dims(operator: Operator) -> str:
    """The dim along which a leaf that is no product can be divided, but for tokens; empty where its work needs all.

    Streams side by side are wider than each of them: their parts lie side by side on every rank.
    """
    if isinstance(operator, TopK):
        return ""
    found = [dim for dim in WIDTHS if operator.has(dim)]
    return "|".join(found) if isinstance(operator, Concat) else found[0]

"""What the readers of blocks have in common: the steps of a layer, and what a block is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.models.trace.record import Step, TracedPart

Fields = dict[str, Any]
"""Fields of `Transformer`."""


class PlacedStep(NamedTuple):
    """A step with its number in the layer."""

    place: int
    step: Step


class LayerBlock(NamedTuple):
    """A part of a layer.

    Attributes:
        letter: its letter in patterns of hybrid models (`StateSpace.pattern`); D is a gated delta rule.
        fields: the fields that describe it.
        products: its products with parameters.
        place: number of its first step.
        module: the module that mixes the tokens of a sequence; empty: it mixes none.
    """

    letter: str
    fields: Fields
    products: Sequence[Step]
    place: int
    module: str = ""


@dataclass(frozen=True)
class LayerSteps:
    """The steps of a layer.

    part: the layer.
    tokens: tokens of the trace.
    hidden: width of the residual stream.
    """

    part: TracedPart
    tokens: int
    hidden: int

    @property
    def parameters(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the parameters of the layer by name."""
        return self.part.parameters

    def of_kind(self, *kinds: str) -> list[PlacedStep]:
        """Returns the steps of these kinds."""
        return [PlacedStep(i, step) for i, step in enumerate(self.part.steps) if step.step in kinds]

    def products(self, taken: Collection[Step] = (), module: str = "") -> list[PlacedStep]:
        """Returns the products with parameters inside of a module, without those that blocks have. taken: these."""
        names = {step.parameter for step in taken}
        return [
            placed
            for placed in self.of_kind("product")
            if placed.step.parameter not in names and placed.step.module.startswith(module)
        ]

    def have_bias(self, products: Sequence[Step]) -> bool:
        """Returns whether all of these linear layers have a bias."""
        return all(step.parameter.removesuffix("weight") + "bias" in self.parameters for step in products)

    def has_shape(self, scope: str, *shape: int) -> bool:
        """Returns whether a module has a parameter of this shape."""
        return any(tuple(other) == shape and name.startswith(scope) for name, other in self.parameters.items())

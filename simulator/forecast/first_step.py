"""The step of the first of many jobs, which is that of all others whose step is made of the same ops at the same
prices: most jobs that explain a forecast differ from it in what has no effect."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from meshcast.hardware.remembered import remember
from meshcast.simulator.costs.estimate import Uses
from meshcast.simulator.engine.play import Engine, PlayedStep, play
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.program.block import Price
from meshcast.simulator.program.program import Program

Prices = Mapping[Work, tuple[float, float, float]]
"""The prices of all work of a program."""


class FirstStep:
    """The first program whose devices have equal prices, and how it was played."""

    def __init__(self) -> None:
        self._made_of: Hashable = None
        self._prices: Prices = {}
        self._program: Program | None = None
        self._played: dict[bool, PlayedStep] = {}

    def build(self, made_of: Hashable, prices: Sequence[Price], make: Callable[[], Program]) -> Program:
        """Returns the first program if it is made of the same at the same prices, else that which is made.

        made_of: all that a program depends on besides prices. prices: of every device.
        """
        price, *others = prices
        if any(other != price for other in others):
            return make()
        if self._program is None:
            self._program, self._made_of = make(), made_of
            self._prices = {work: price(work) for work in self._program.list_works()}
            return self._program
        if made_of != self._made_of or any(price(work) != known for work, known in self._prices.items()):
            return make()
        return self._program

    def play(self, program: Program, engine: Engine, skip: bool, uses: Sequence[Uses]) -> PlayedStep:
        """Plays a program (see `simulator.engine.play.play`), the first one by matrices only once."""
        if program is not self._program or engine != "matrices":
            return play(program, engine, skip, uses)
        return remember(self._played, skip, lambda: play(program, engine, skip, uses))

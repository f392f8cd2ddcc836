"""Ranks that take optimizer steps of their own: gradients are not reduced, and all ranks meet once in a period.

A scheme says how many steps a period has (`period`) and what happens at its end (`meet`); the forecast step is the mean
over a period.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from simulator.ir.modules import Module, Update
from simulator.ir.ops import Fragment, Op, Param
from simulator.ir.scheme import LowerModule
from simulator.schemes.data.shared.data_parallel import DataScheme, sum_by_axes


class UnsynchronisedScheme(DataScheme):
    """Base of the data schemes whose ranks update copies of the weights that differ until they meet.

    Customise by: `meet`. Options need a `period`.
    """

    last_step: ClassVar[str]
    """What the last step of a period does, in words for users: ``averages the weights of all ranks``."""

    @property
    def period(self) -> int:
        return int(self.options.period)

    @property
    def unsynchronised_axes(self) -> tuple[str, ...]:
        return self.over

    def assumptions(self, model: Any) -> Iterable[str]:
        if self.period > 1:
            yield f"the mean of {self.period} steps, one of which {self.last_step}"

    @abstractmethod
    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        """The ops at the end of a period, one after another, for so many weights that the ranks of `axes` hold."""

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Only the sequence axes: ranks along them see other parts of the same samples."""
        return tuple(axis for axis in super().reduces(param) if axis not in self.over)

    def meets(self, param: Param) -> bool:
        """Whether other ranks have copies of `param` that differ from its own."""
        return self.mesh.size(self._meeting_group(param)[0]) > 1

    def _meeting_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        return tuple(axis for axis in param.partial if axis in self.over), param.size

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, Update):
            for axes, elements in sum_by_axes(module.params, self._meeting_group):
                for op in self.meet(axes, elements):
                    op.after = fragment.forward[-1:]
                    fragment.forward.append(op)
        return fragment

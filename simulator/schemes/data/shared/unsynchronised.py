"""Workers that take optimizer steps alone: gradients are not reduced among them, and they meet once in a period.

A worker is a rank or, with an axis in the option `within`, several that reduce gradients in every step as DDP does;
each of these meets the others with its share of the weights. A scheme says how many steps a period has (`period`) and
what happens at its end (`meet`); the forecast step is the mean over a period.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from meshcast.simulator.ir.capabilities import MeetsPeriodically
from meshcast.simulator.ir.modules import Module, Update
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Op, Param
from meshcast.simulator.ir.scheme import LowerModule, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, sum_by_axes


class WorkerOptions(SchemeOptions):
    """Options of all schemes whose workers meet once in a period."""

    within: str | None = None
    """The axis that joins the ranks of a worker; default: a worker is a rank."""


class UnsynchronisedScheme(DataScheme, MeetsPeriodically):
    """Base of the data schemes whose workers update copies of the weights that differ until they meet.

    Customise by: `meet`. Options derive from `WorkerOptions` and need a `period`.
    """

    names_axes = ("within",)
    last_step: ClassVar[str]
    """What the last step of a period does, in words for users: ``averages the weights of all workers``."""

    @property
    def period(self) -> int:
        return int(self.options.period)

    @property
    def unsynchronised_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.over if axis not in self.replica_axes)

    @property
    def worker_ranks(self) -> int:
        """Ranks of a worker that hold the same weights, each of which meets the others with its share."""
        return self.mesh.size(self.replica_axes)

    def assumptions(self, model: Any) -> Iterable[str]:
        if self.period > 1:
            yield f"the mean of {self.period} steps, one of which {self.last_step}"

    @property
    def averaged_bytes(self) -> int:
        """Bytes per weight that are equal in all ranks after a meeting: by default the weights that are updated."""
        return int(BYTES[self.framework.main_weights])

    @abstractmethod
    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        """Returns the ops at the end of a period, in order, for a rank's share of so many weights, which the ranks of
        `axes` hold, too.
        """

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Returns those of a worker, and the sequence axes, along which ranks see other parts of the same samples."""
        return tuple(axis for axis in super().reduces(param) if axis not in self.unsynchronised_axes)

    def meets(self, param: Param) -> bool:
        """Returns whether other ranks have copies of `param` that differ from this rank's."""
        return self.mesh.size(self._meeting_group(param)[0]) > 1

    def _meeting_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        axes = tuple(axis for axis in param.partial if axis in self.unsynchronised_axes)
        return axes, param.size

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, Update):
            for axes, elements in sum_by_axes(module.params, self._meeting_group):
                ops = list(self.meet(axes, elements // self.worker_ranks))
                if self.worker_ranks > 1:
                    whole = Collective("all_gather", elements * self.averaged_bytes, self.replica_axes)
                    ops.append(Op("gather weights", "data-replicas", whole, [], "U", "period"))
                for op in ops:
                    op.after = fragment.forward[-1:]
                    fragment.forward.append(op)
        return fragment

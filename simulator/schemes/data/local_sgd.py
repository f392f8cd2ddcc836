"""Local SGD: every rank takes optimizer steps of its own, and every few steps the weights of all ranks are averaged.

A rank computes gradients of its own samples and updates its own copy of the weights without communication. After
`period` steps all copies are replaced by their mean: one all-reduce of the weights in the optimizer's format and, if
chosen, of its moments. The forecast step is the mean over a period.

    step 1         step 2         step H                         step H+1
    fwd bwd upd | fwd bwd upd | ... fwd bwd upd | all-reduce | fwd bwd upd | ...

A rank sends 2 (N-1)/N w / H bytes per step for w bytes of averaged states: 4 per parameter for fp32 weights, 12 with
the moments. A step takes t_comp + t_AR / H; states are not sharded. How the loss depends on H is not forecast.

References: Stich 2018, arXiv 1805.09767, algorithm 1; Zhang et al. 2016, arXiv 1606.07365.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from simulator.ir.modules import Module, Update
from simulator.ir.ops import BYTES, Collective, Fragment, Op, Param
from simulator.ir.scheme import ClosedForm, LowerModule, Paper, SchemeOptions
from simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, sum_by_axes


class LocalSGD(DataScheme):
    paper = Paper("arXiv:1805.09767", "Local SGD Converges Fast and Communicates Little", 2018)

    class Options(SchemeOptions):
        period: int = Field(default=8, ge=1, strict=True)
        """Steps from one average to the next."""
        average: Literal["weights", "weights and moments"] = "weights"
        """What is averaged."""

    def assumptions(self, model: Any) -> Iterable[str]:
        if self.period > 1:
            yield f"the mean of {self.period} steps, one of which averages the weights of all ranks"

    @property
    def period(self) -> int:
        return int(self.options.period)

    @property
    def unsynchronised_axes(self) -> tuple[str, ...]:
        return self.over

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Only the sequence axes: ranks along them see other parts of the same samples."""
        return tuple(axis for axis in super().reduces(param) if axis not in self.over)

    def _averaging_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        return tuple(axis for axis in param.partial if axis in self.over), param.size

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, Update):
            moments = 2 * BYTES[self.framework.moments] if self.options.average == "weights and moments" else 0
            for axes, elements in sum_by_axes(module.params, self._averaging_group):
                work = Collective("all_reduce", elements * (BYTES[self.framework.main_weights] + moments), axes)
                fragment.forward.append(Op("average", "data", work, fragment.forward[-1:], "U", "period"))
        return fragment

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, h = setting.n, self.period
        averaged = setting.weight_bytes / 2 * (12 if self.options.average != "weights" else 4)
        yield ClosedForm("sent_per_step", 2 * (n - 1) / n * averaged / h, "algorithm 1: one average in H steps")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + 12, "every worker has a model and an optimizer of its own"
        )

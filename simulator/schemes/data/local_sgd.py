"""Local SGD: every rank takes optimizer steps alone, and every few steps the weights of all ranks are averaged.

A rank computes gradients of its samples and updates its copy of the weights without communication. After
`period` steps all copies are replaced by their mean: an all-reduce of the weights in the optimizer's format and, if
chosen, of its moments. The forecast step is the mean over a period.

    step 1         step 2         step H                         step H+1
    fwd bwd upd | fwd bwd upd | ... fwd bwd upd | all-reduce | fwd bwd upd | ...

With an axis in `within` a worker is several ranks, which reduce gradients in every step and average a share each.

A rank sends 2 (N-1)/N w / H bytes per step for w bytes of averaged states: 4 per parameter for fp32 weights, 12 with
the moments. A step takes t_comp + t_AR / H; states are not sharded. How the loss depends on H is not forecast.

References: Stich 2018, arXiv 1805.09767, algorithm 1; Zhang et al. 2016, arXiv 1606.07365.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import BYTES, Collective, Op
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.unsynchronised import UnsynchronisedScheme, WorkerOptions


class LocalSGD(UnsynchronisedScheme):
    paper = Paper("arXiv:1805.09767", "Local SGD Converges Fast and Communicates Little", 2018)
    last_step = "averages the weights of all ranks"

    class Options(WorkerOptions):
        period: int = Field(default=8, ge=1, strict=True)
        """Steps from an average to the next."""
        average: Literal["weights", "weights and moments"] = "weights"
        """What is averaged."""

    @property
    def averaged_bytes(self) -> int:
        moments = (
            self.framework.states.element_bytes(self.framework.moments)
            if self.options.average == "weights and moments"
            else 0
        )
        return int(BYTES[self.framework.main_weights] + moments)

    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        work = Collective("all_reduce", elements * self.averaged_bytes, axes)
        return [Op("average", "data", work, [], "U", "period")]

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, h = setting.n, self.period
        averaged = setting.weight_bytes / 2 * (12 if self.options.average != "weights" else 4)
        yield ClosedForm("sent_per_step", 2 * (n - 1) / n * averaged / h, "algorithm 1: one average in H steps")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + 12, "every worker has a model and an optimizer of its own"
        )

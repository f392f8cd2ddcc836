"""Parallel SGD: every rank trains alone on its part of the data, and one average at the end of training is the model.

A rank draws its samples, computes gradients and updates its copy of the weights, from the first step to the
last, without communication. After `period` steps, which are all steps of the run, a rank receives the weights of all
and averages them. The forecast step is the mean over the run.

    step 1         step 2         ...   step T
    fwd bwd upd | fwd bwd upd | ... | fwd bwd upd | reduce to one rank

The average is a reduction by a tree: ceil(log2 N) messages of w bytes along its longest path for N ranks, w = 4 bytes
per parameter, thus ceil(log2 N) w / T per step. Ranks wait for each other once. States are not sharded: 18 bytes per
parameter with bf16 weights and fp32 gradients.

Not modelled: how good the average is, which the paper proves for convex losses only. The updates are those of the
framework's optimizer, not plain SGD.

References: Zinkevich, Weimer, Smola and Li, Parallelized Stochastic Gradient Descent, NIPS 2010,
https://papers.nips.cc/paper/4006-parallelized-stochastic-gradient-descent, algorithm 3 (SimuParallelSGD).
"""

from collections.abc import Iterable, Sequence
from math import ceil, log2

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import BYTES, Collective, Op
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.unsynchronised import UnsynchronisedScheme, WorkerOptions


class ParallelSGD(UnsynchronisedScheme):
    paper = Paper(
        "https://papers.nips.cc/paper/4006-parallelized-stochastic-gradient-descent",
        "Parallelized Stochastic Gradient Descent",
        2010,
    )
    last_step = "sends the weights of all ranks to one"

    class Options(WorkerOptions):
        period: int = Field(default=10_000, ge=1, strict=True)
        """Steps of the run; the default is assumed."""

    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        work = Collective("reduce", elements * BYTES[self.framework.main_weights], axes)
        return [Op("average", "data", work, [], "U", "period")]

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        averaged = 2 * setting.weight_bytes
        yield ClosedForm(
            "sent_per_step", ceil(log2(setting.n)) * averaged / self.period, "algorithm 3: one average at the end"
        )
        yield ClosedForm("state_bytes_per_parameter", 2 + 4 + 12, "algorithm 3: every rank has a model of its own")

"""DiLoCo: workers train alone for hundreds of steps; then an outer optimizer steps by the mean change of their weights.

Every worker takes `period` inner steps (AdamW) on its copy of the weights without communication. The change of its
weights since the last meeting is its outer gradient. Outer gradients are all-reduced, and an outer optimizer with
Nesterov momentum makes from their mean the weights with which all workers go on. A worker is a rank or, with an axis in
`within`, several that reduce gradients among them. The forecast step is the mean over a period.

    step 1 ... step H   | outer gradient | all-reduce | outer step | step H+1 ...
    fwd bwd AdamW       | theta - theta_i|  mean      | momentum   |

A worker sends 2 (N-1)/N g / H bytes per step for g bytes of outer gradients, 4 per parameter or 2 in 16 bits; each of
its ranks sends its share, makes the outer step for that, and all-gathers the new weights from the others. The outer
optimizer has further states: the weights of the last meeting and a momentum, 4 + 4 bytes per parameter on top of
the 18 of the inner optimizer; they lie on the GPU or, with `outer: cpu`, in host memory, where the outer step then
runs. The outer gradient takes the room of the gradient, which is done with.

Not modelled: what H costs in loss; ranks that drop out; fragments that are sent singly beside the inner steps
(Streaming DiLoCo).

References: Douillard et al. 2023, arXiv 2311.08105, algorithm 1 and section 2; outer gradients in fp16 and the outer
optimizer on the host: Jaghouar et al. 2024 (OpenDiLoCo), arXiv 2407.07852.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import KeepsOwnStates
from meshcast.simulator.ir.ops import BYTES, Collective, HostCopy, HostUpdate, Memory, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.lowering.offload import HOST, IN, OUT
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.unsynchronised import UnsynchronisedScheme, WorkerOptions

STATE = BYTES["fp32"]
"""Bytes of an element of each state of the outer optimizer: the weights of the last meeting, and the momentum."""


class DiLoCo(UnsynchronisedScheme, KeepsOwnStates):
    paper = Paper("arXiv:2311.08105", "DiLoCo: Distributed Low-Communication Training of Language Models", 2023)
    last_step = "exchanges outer gradients"

    class Options(WorkerOptions):
        period: int = Field(default=500, ge=1, strict=True)
        """Inner steps from an outer step to the next; the default is the paper's."""
        outer_gradients: Literal["fp32", "fp16", "bf16"] = "fp32"
        """Format in which outer gradients are all-reduced."""
        outer: Literal["gpu", "cpu"] = "gpu"
        """Where the states of the outer optimizer lie."""

    def own_states(self, param: Param) -> Mapping[str, float]:
        return {self.options.outer: 2 * STATE * param.size / self.worker_ranks} if self.meets(param) else {}

    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        away, full = self.options.outer == "cpu", elements * STATE
        weights = elements * BYTES[self.framework.weights]
        sent = elements * BYTES[self.options.outer_gradients]
        reduce = Op("reduce outer gradients", "data", Collective("all_reduce", sent, axes), [], "U", "period")
        # The mean, the momentum and the weights of the last meeting are read; the latter two and both copies written.
        read, write = sent + 2 * full, 3 * full + weights
        if away:
            step = [
                Op("outer gradient", HOST, HostUpdate(2 * full, sent), [], "U", "period"),
                Op("copy outer gradients", IN, HostCopy(sent, True), [], "U", "period"),
                reduce,
                Op("copy mean", OUT, HostCopy(sent), [], "U", "period"),
                Op("outer step", HOST, HostUpdate(sent + 2 * full, 2 * full), [], "U", "period"),
                Op("copy weights", IN, HostCopy(full, True), [], "U", "period"),
            ]
            return [Op("copy weights out", OUT, HostCopy(full), [], "U", "period"), *step]
        change = Op("outer gradient", work=Memory("add", 2 * full, sent), phase="U", when="period")
        return [change, reduce, Op("outer step", work=Memory("add", read, write), phase="U", when="period")]

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, width = setting.n, BYTES[self.options.outer_gradients]
        sent = 2 * (n - 1) / n * setting.weight_bytes / 2 * width / self.period
        yield ClosedForm("sent_per_step", sent, "algorithm 1: one all-reduce of outer gradients in H steps")
        outer = 8 if self.options.outer == "gpu" and n > 1 else 0
        yield ClosedForm("state_bytes_per_parameter", 18 + outer, "algorithm 1: weights of the last meeting, momentum")

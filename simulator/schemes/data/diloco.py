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

Streaming DiLoCo divides the weights into P `fragments`, each of which meets once in H steps, at a time of its own, so
that 1/P of the weights is sent at once; with a `delay` of tau steps its all-reduce runs beside these, and its outer
step follows. A step beside which fragments are sent takes the longer of its passes and of the all-reduce of tau-th
parts of them; the paper sends outer gradients in 4 bits. Fragments are forecast as equal; they are whole layers.

    step                1      2      ..     H/P + 1   H/P + 2   ..           P = 3, tau = 1
    all-reduce          fragment 1           fragment 2

Not modelled: what H, tau and formats cost in loss; ranks that drop out.

References: Douillard et al. 2023, arXiv 2311.08105, algorithm 1 and section 2; outer gradients in fp16 and the outer
optimizer on the host: Jaghouar et al. 2024 (OpenDiLoCo), arXiv 2407.07852; fragments: Douillard et al. 2025 (Streaming
DiLoCo), arXiv 2501.18512, sections 2.2 to 2.4.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from meshcast.hardware.schemas import Field, model_validator
from meshcast.simulator.ir.capabilities import KeepsOwnStates
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import BYTES, Collective, HostCopy, HostUpdate, Memory, Op, Param, SideOps, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper
from meshcast.simulator.lowering.offload import HOST, IN, OUT
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting, sum_by_axes
from meshcast.simulator.schemes.data.shared.unsynchronised import UnsynchronisedScheme, WorkerOptions

WIDTHS = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp4": 0.5}
"""Bytes of an element of an outer gradient on its way."""

STATE = BYTES["fp32"]
"""Bytes of an element of each state of the outer optimizer: the weights of the last meeting, and the momentum."""


class DiLoCo(UnsynchronisedScheme, KeepsOwnStates):
    paper = Paper("arXiv:2311.08105", "DiLoCo: Distributed Low-Communication Training of Language Models", 2023)
    last_step = "exchanges outer gradients"

    class Options(WorkerOptions):
        period: int = Field(default=500, ge=1, strict=True)
        """Inner steps from an outer step to the next; the default is the paper's."""
        fragments: int = Field(default=1, ge=1, strict=True)
        """Parts of the weights that meet at times of their own."""
        delay: int = Field(default=0, ge=0, strict=True)
        """Inner steps beside which a fragment is all-reduced; 0: the ranks wait for it."""
        outer_gradients: Literal["fp32", "fp16", "bf16", "fp4"] = "fp32"
        """Format in which outer gradients are all-reduced."""
        outer: Literal["gpu", "cpu"] = "gpu"
        """Where the states of the outer optimizer lie."""

        @model_validator(mode="after")
        def _check_fragments(self) -> "DiLoCo.Options":
            if self.fragments > self.period:
                raise ValueError(f"each of {self.fragments} fragments meets in a step of its own: set a longer period")
            if self.delay and self.outer == "cpu":
                raise ValueError("outer steps of the host are forecast without delay: set outer: gpu")
            return self

    @property
    def period(self) -> int:
        """Steps from a step with a meeting, or beside which fragments are sent, to the next."""
        return max(1, int(self.options.period // (self.options.fragments * max(1, self.options.delay))))

    @property
    def _share(self) -> float:
        """The share of the weights that is sent in such a step: all of them in the steps that the options state."""
        return self.period / int(self.options.period) if self.options.fragments > 1 or self.options.delay else 1.0

    def own_states(self, param: Param) -> Mapping[str, float]:
        if not self.meets(param):
            return {}
        size = param.size / self.worker_ranks
        states = {self.options.outer: 2 * STATE * size}
        if self.options.delay:  # what is on its way, while gradients of inner steps take their room
            states["gpu"] += WIDTHS[self.options.outer_gradients] * size / self.options.fragments
        return states

    def _reduce(self, axes: tuple[str, ...], elements: float, stream: str) -> Op:
        """Returns the all-reduce of outer gradients of so many weights of a rank."""
        work = Collective("all_reduce", round(elements * WIDTHS[self.options.outer_gradients]), axes)
        return Op("reduce outer gradients", stream, work, [], "U", "period")

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """Adds the all-reduces that run beside a step."""
        stage_ops = super().lower_stage(stage, inner)
        if self.options.delay:
            groups = sum_by_axes(stage_ops.params(), self._meeting_group)
            share = self._share / self.worker_ranks
            ops = [self._reduce(axes, share * elements, "data-outer") for axes, elements in groups]
            more = [SideOps([op], np.zeros(0, int), np.zeros(1, int)) for op in ops]
            stage_ops.ahead = [*stage_ops.ahead, *more]
        return stage_ops

    def meet(self, axes: tuple[str, ...], elements: int) -> Sequence[Op]:
        elements = round(elements * self._share)
        away, full = self.options.outer == "cpu", elements * STATE
        weights = elements * BYTES[self.framework.weights]
        reduce = self._reduce(axes, elements, "data")
        sent = round(elements * WIDTHS[self.options.outer_gradients])
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
        waited = [] if self.options.delay else [reduce]
        return [change, *waited, Op("outer step", work=Memory("add", read, write), phase="U", when="period")]

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, width = setting.n, WIDTHS[self.options.outer_gradients]
        sent = 2 * (n - 1) / n * setting.weight_bytes / 2 * width / self.options.period
        yield ClosedForm("sent_per_step", sent, "algorithm 1: one all-reduce of outer gradients in H steps")
        moving = width / self.options.fragments if self.options.delay else 0
        outer = 8 + moving if self.options.outer == "gpu" and n > 1 else 0
        yield ClosedForm("state_bytes_per_parameter", 18 + outer, "algorithm 1: weights of the last meeting, momentum")

"""DualPipe (DeepSeek-V3): forward passes of one direction through the devices overlap backward passes of the other.

Every device holds a stage of each direction, as in Chimera. A forward and a backward pass that do not depend on each
other run as a pair, in which the token dispatch and combine of either are hidden by the computation of the other, on
separate multiprocessors (section 3.5.1). Gradients of weights, split off in warm-up and cool-down, fill part of the
bubble.

    p = 4, m = 8 (upper case: first direction, lower case: second; D, d: whole backward pass; {..}: a pair)
    device 0   F0 F1 F2 f0 b0 w0 f1 {F3+d1} {f2+D0} d2 {f3+D1} d3 B2 W2 B3 W3
    device 1   F0 f0 F1 f1 F2 d0 {f2+D0} {F3+d1} {f3+D1} d2 D2 b3 B3 w3 W3

idle at most (p/2 - 1)(t_pair + t_b - 2 t_w) [s] on a device for t_f = t_b = t_w; t_pair, the time of a pair, lies
between t_b + t_w and t_f + t_b + t_w. p + 1 micro-batches in flight. Needs p and m even, m >= 2 p.

Orders are those of the public code. The report does not say when the gradients of a stage are summed with those of its
copy: by default as soon as both have run their last backward pass (`gradient_sync`). A message to the next stage leaves
when its pass is done, beside other passes, as the report has it; the public code waits for its messages between passes.
Kernels of a pair run in the order in which they can begin, not in the manual order of figure 4: faster kernels may
begin in another order, which takes up to 1 % longer (docs/method.md).

References: DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, figure 5 and table 2; deepseek-ai/DualPipe @3da1bbe,
dualpipe/dualpipe.py.
"""

from collections.abc import Iterable

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.bidirectional import eight_step_order
from meshcast.simulator.scheduling.schedule import Bidirectional, PipelineSetting, PipelineShape, ScheduleItem


class DualPipe(Bidirectional):
    paper = Paper("arXiv:2412.19437", "DeepSeek-V3 Technical Report", 2024)
    separates_multiprocessors = True
    backward_kinds = ("BW", "B", "W")
    pairs_passes = True

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m % 2 or shape.m < 2 * shape.p:
            near = max(shape.m + shape.m % 2, 2 * shape.p)
            rule = f"{self.use} needs an even number of micro-batches, at least 2 pp = {2 * shape.p}"
            raise PlanError(
                "micro-batches per replica", rule, f"{near} would work: change batch.global or plan.dp", shape.m
            )

    def order(self, shape: PipelineShape, device: int) -> list[ScheduleItem]:
        down, up = ((stage, self.microbatches(shape, stage)) for stage in (device, 2 * shape.p - 1 - device))
        half = shape.p // 2
        if device < half:
            return eight_step_order(down, up, device, half)
        return eight_step_order(up, down, shape.p - 1 - device, half)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p = setting.shape.p
        yield ClosedForm("in_flight_b", [p + 1] * p, "table 2")
        yield ClosedForm("in_flight_w", [p + 1] * p, "table 2")
        if setting.t_f == setting.t_b == setting.t_w:
            # Under ideal costs a pair takes the sum of its passes.
            yield ClosedForm("max_idle", (p // 2 - 1) * (setting.t_total + setting.t_b - 2 * setting.t_w), "table 2")

"""DualPipe-V: DualPipe on half of the devices, with its two directions joined to a V, so that weights are held once.

The model has 2 p stages: the first p go down the devices, the others up again. A device's stage on the way down takes
the role of DualPipe's first direction, its stage on the way up that of the second: forward passes of either overlap
with backward passes of the other.

    p = 2, m = 4 (upper case: down, lower case: up; D, d: whole backward pass; {..}: a pair)
    device 0   F0 F1 F2 f0 b0 w0 f1 {F3+d1} {f2+D0} d2 {f3+D1} d3 B2 W2 B3 W3
    device 1   F0 f0 F1 f1 F2 d0 {f2+D0} {F3+d1} {f3+D1} d2 D2 b3 B3 w3 W3

idle at most (p-1)(t_pair + t_b - 2 t_w) [s] on a device for t_f = t_b = t_w, times of a chunk; 2 p + 1 chunks in
flight. Needs m >= 2 p.

References: DeepSeek-AI, https://github.com/deepseek-ai/DualPipe, "Cut-in-half" by Sea AI Lab; arXiv 2412.19437.
"""

from collections.abc import Iterable

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.bidirectional import eight_step_order
from meshcast.simulator.scheduling.schedule import PipelineSetting, PipelineShape, ScheduleItem, VShape


class DualPipeV(VShape):
    paper = Paper("https://github.com/deepseek-ai/DualPipe", "DualPipe, with DualPipeV by Sea AI Lab", 2025)
    separates_multiprocessors = True
    backward_kinds = ("BW", "B", "W")
    pairs_passes = True

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m < 2 * shape.p:
            rule = f"{self.use} needs at least 2 pp = {2 * shape.p} micro-batches"
            remedy = f"{2 * shape.p} would work: change batch.global or plan.dp"
            raise PlanError("micro-batches per replica", rule, remedy, shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[ScheduleItem]:
        down, up = ((stage, shape.microbatches) for stage in (device, 2 * shape.p - 1 - device))
        return eight_step_order(down, up, device, shape.p)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p = setting.shape.p
        yield ClosedForm("in_flight_b", [2 * p + 1] * p, "README, table of bubbles and memory")
        yield ClosedForm("in_flight_w", [2 * p + 1] * p, "README, table of bubbles and memory")
        if setting.t_f == setting.t_b == setting.t_w:
            idle = (p - 1) * (setting.t_total + setting.t_b - 2 * setting.t_w) / 2
            yield ClosedForm("max_idle", idle, "README, table of bubbles and memory")

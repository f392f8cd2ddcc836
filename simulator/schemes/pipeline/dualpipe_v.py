"""DualPipe-V: DualPipe cut in half, one way along a V, so that no weights are held twice.

The model is cut into 2 p stages, the first p on devices 0 to p-1 and the others back from p-1 to 0. A device's chunk on
the way out takes the place of DualPipe's first way, that on the way back of its second: forward passes of one are
played together with backward passes of the other.

    p = 2, m = 4 (upper case: way out, lower case: way back; D, d: both gradients at once)
    device 0   F0 F1 F2 f0 b0 w0 f1 {F3+d1} {f2+D0} d2 {f3+D1} d3 B2 W2 B3 W3
    device 1   F0 f0 F1 f1 F2 d0 {f2+D0} {F3+d1} {f3+D1} d2 D2 b3 B3 w3 W3

A device idles for at most (p-1)(t_pair + t_b - 2 t_w) [s] where t_f = t_b = t_w, all of one chunk; 2 p + 1 chunks in
flight. Needs m >= 2 p.

References: DeepSeek-AI, https://github.com/deepseek-ai/DualPipe, "Cut-in-half" by Sea AI Lab; arXiv 2412.19437.
"""

from collections.abc import Iterable

from hardware.errors import PlanError
from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.bidirectional import eight_step_order
from simulator.scheduling.schedule import PipelineSetting, PipelineShape, ScheduleItem, VShape


class DualPipeV(VShape):
    paper = Paper("https://github.com/deepseek-ai/DualPipe", "DualPipe, with DualPipeV by Sea AI Lab", 2025)

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m < 2 * shape.p:
            rule = f"{self.use} needs at least 2 pp = {2 * shape.p} micro-batches"
            remedy = f"{2 * shape.p} would work: change batch.global or dp"
            raise PlanError("micro-batches per replica", rule, remedy, shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[ScheduleItem]:
        out, back = ((stage, shape.microbatches) for stage in (device, 2 * shape.p - 1 - device))
        return eight_step_order(out, back, device, shape.p)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p = setting.shape.p
        yield ClosedForm("in_flight_b", [2 * p + 1] * p, "README, table of bubbles and memory")
        yield ClosedForm("in_flight_w", [2 * p + 1] * p, "README, table of bubbles and memory")
        if setting.t_f == setting.t_b == setting.t_w:
            idle = (p - 1) * (setting.t_total + setting.t_b - 2 * setting.t_w) / 2
            yield ClosedForm("max_idle", idle, "README, table of bubbles and memory")

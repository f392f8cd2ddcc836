"""V-Min: a third of 1F1B's activation memory and two thirds of its bubble, from a building block along a V of stages.

Memory is the time that chunks live. The building block fixes the slots of a micro-batch's passes, and every
micro-batch repeats it. Here passes take every slot, down the V, up, and back, so no chunk can live shorter. W's fill
free slots; then later passes fill the idle slots of warm-up and cool-down at no higher peak. If passes do not last
equally long, each micro-batch waits for that before, and the bubble grows with their number.

    p = 4, slots of the first micro-batch (upper case: down, lower case: up)
    device 0   F . . . . . . f b . . . . . . B
    device 3   . . . F f . . . . . . b B

bubble for t_f = t_b = t_w, in passes of a chunk: 4 p - 5, or 4 p - 7 for a multiple of 3; 2 ceil((p + 2)/3) chunks in
flight.

References: Qi et al. 2024, arXiv 2405.15362, section 3.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.building_block import reorder_warmup_and_cooldown, repeat_block
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    PostValidation,
    VShape,
)


class VMin(VShape):
    paper = Paper("arXiv:2405.15362", "Pipeline Parallelism with Controllable Memory", 2024)

    class Options(VShape.Options, PostValidation):
        pass

    def block(self, shape: PipelineShape) -> list[tuple[int, int]]:
        """Returns for each stage, the slots of F and B of the first micro-batch."""
        # For a multiple of 3 two passes would fall on the same slot: backward passes begin two slots later.
        late = 0 if shape.p % 3 else 2
        return [(stage, 2 * shape.stages - 1 - stage + late) for stage in range(shape.stages)]

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[Action]]:
        return reorder_warmup_and_cooldown(self, shape, repeat_block(self, shape, self.block(shape)))

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        if p > 1 and m >= 2 * p and setting.t_f == setting.t_b == setting.t_w:
            bubble = (4 * p - 5 if p % 3 else 4 * p - 7) * setting.t_f / 2
            yield ClosedForm("bubble", bubble, "section 4; replay of the order")
            yield ClosedForm("bubble_span", bubble, "section 4; replay of the order")
        if m >= 2 * p:
            yield ClosedForm("most_in_flight_w", 2 * -(-(p + 2) // 3), "section 4; replay of the order")

"""V-Half: half of 1F1B's activation memory and half of its bubble, from a building block repeated along a V of stages.

Memory is the time that chunks live. The building block fixes the slots of a micro-batch's passes, and every
micro-batch repeats it. Forward passes take every second slot on the way down and every slot on the way up, backward
passes the other way round: a device that holds either of its chunks for long holds the other briefly. W's fill free
slots; then other passes fill the idle time of warm-up and cool-down at no higher peak, as long as passes take.

    p = 4, slots of the first micro-batch (upper case: down, lower case: up)
    device 0   F . . . . . . . . . f . . . b . . . . . . . . . . B
    device 3   . . . . . . F f . . . . . . . . . . . . b . B

bubble for t_f = t_b = t_w, in passes of a chunk: 3 p - 7 for an even p, else 3 p - 4; p + 2 or p + 1 chunks in flight.

References: Qi et al. 2024, arXiv 2405.15362, section 3.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.building_block import reorder_both_ends, repeat_block
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    PostValidation,
    VShape,
)


class VHalf(VShape):
    paper = Paper("arXiv:2405.15362", "Pipeline Parallelism with Controllable Memory", 2024)
    needs_durations = True

    class Options(VShape.Options, PostValidation):
        pass

    def block(self, shape: PipelineShape) -> list[tuple[int, int]]:
        """Returns for each stage, the slots of F and B of the first micro-batch."""
        p = shape.p
        # With an even p two passes would fall on the same slot: backward passes begin three slots later.
        late = 0 if p % 2 else 3
        down = [(2 * i, 6 * p - 2 - i + late) for i in range(p)]
        up = [(3 * p - 2 - i, 3 * p - 1 + 2 * i + late) for i in reversed(range(p))]
        return down + up

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[Action]]:
        return reorder_both_ends(self, shape, repeat_block(self, shape, self.block(shape)), durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        if p >= 3 and m >= 2 * p and setting.t_f == setting.t_b == setting.t_w:
            bubble = (3 * p - 4 if p % 2 else 3 * p - 7) * setting.t_f / 2
            yield ClosedForm("bubble", bubble, "section 4; replay of the order")
            yield ClosedForm("bubble_span", bubble, "section 4; replay of the order")
        if m >= 2 * p:
            yield ClosedForm("most_in_flight_w", p + 1 if p % 2 else p + 2, "section 4; replay of the order")

"""Seq1F1B: 1F1B over slices of sequences instead of whole micro-batches.

Device i runs p-1-i+s-1 forward passes of slices, then alternates one forward and one backward, then drains. Backward,
the slices of a micro-batch come in reverse, for a slice needs what the later ones add to the gradients of its keys and
values. Bubble and memory shrink, for what fills the pipe is a slice.

    p = 2, m = 2, s = 2: slices a b
    device 0   F0a F0b F1a ... B0b F1b B0a ... B1b ... B1a
    device 1   ... F0a F0b B0b F1a B0a F1b B1b B1a

bubble (p-1)(t_f + t_B)/s [s], min(m s, p - i + s - 1) slices in flight, where slices last equally long.

With equal lengths late slices take longer, for attention grows with what lies before; balanced ones last equally long,
as forecast.

References: Sun et al. 2024, arXiv 2406.03488, sections 3.2 and 3.3.
"""

from collections.abc import Iterable

from hardware.errors import PlanError
from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    SliceDuration,
    one_forward_one_backward,
)
from simulator.scheduling.sequence_slicing import (
    SliceCount,
    SlicedSchedule,
    SliceLengths,
    choose_balanced_slices,
    forward_slices,
)


class Seq1F1B(SlicedSchedule):
    paper = Paper(
        "arXiv:2406.03488",
        "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
        2024,
    )

    class Options(SlicedSchedule.Options):
        slices: SliceCount | SliceLengths = 4
        """How many, of equal lengths, or their lengths."""
        balanced: bool = False
        """Of so many slices the lengths that last equally long."""

    @property
    def slices(self) -> tuple[float, ...]:
        return () if self.options.balanced else super().slices

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if self.options.balanced and not isinstance(self.options.slices, int):
            rule = f"{self.use} finds the lengths of balanced slices itself"
            raise PlanError("slices", rule, "Say how many, or leave out balanced", list(self.options.slices))

    def choose_slices(self, shape: PipelineShape, sequence: int, step: int, lasts: SliceDuration) -> tuple[int, ...]:
        return choose_balanced_slices(sequence, step, lasts, min(self.options.slices, sequence // step))

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward, s = forward_slices(shape, device), shape.slices
        backward = [action._replace(kind="BW", slice=s - 1 - action.slice) for action in forward]
        return one_forward_one_backward(forward, backward, shape.p - 2 - device + s)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, s = setting.shape.p, setting.shape.m, len(self.slices)
        yield ClosedForm("bubble", (p - 1) * setting.t_total / s, "section 3.2")
        yield ClosedForm("in_flight_b", [min(m * s, p - i + s - 1) for i in range(p)], "section 3.2")

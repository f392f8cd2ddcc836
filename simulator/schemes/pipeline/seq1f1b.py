"""Seq1F1B: 1F1B over slices of sequences instead of whole micro-batches.

With s slices per sequence, device i runs p-1-i+s-1 forward passes of slices, then alternates forward and backward
passes, then runs the remaining backward passes. The backward passes of a micro-batch go from its last slice to its
first, since later slices contribute to the gradients of a slice's keys and values. Bubble and memory shrink, because
warm-up and cool-down consist of passes of slices.

    p = 2, m = 2, s = 2: slices a b
    device 0   F0a F0b F1a ... B0b F1b B0a ... B1b ... B1a
    device 1   ... F0a F0b B0b F1a B0a F1b B1b B1a

For slices of equal duration: bubble (p-1)(t_f + t_B)/s [s], min(m s, p - i + s - 1) slices in flight on device i (t_f,
t_B: forward and whole backward pass of a micro-batch on a device).

Of slices of equal length the later ones take longer, since their tokens attend to more preceding tokens; `balanced`
chooses lengths of equal forecast duration.

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
        """Number of slices of equal length, or their lengths."""
        balanced: bool = False
        """Whether the lengths of the slices are chosen so that all slices take equally long."""

    @property
    def slices(self) -> tuple[float, ...]:
        return () if self.options.balanced else super().slices

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if self.options.balanced and not isinstance(self.options.slices, int):
            rule = f"{self.use} chooses the lengths of balanced slices itself"
            raise PlanError("slices", rule, "Give their number, or leave out balanced", list(self.options.slices))

    def choose_slices(self, shape: PipelineShape, sequence: int, step: int, seconds: SliceDuration) -> tuple[int, ...]:
        return choose_balanced_slices(sequence, step, seconds, min(self.options.slices, sequence // step))

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward, s = forward_slices(shape, device), shape.slices
        backward = [action._replace(kind="BW", slice=s - 1 - action.slice) for action in forward]
        return one_forward_one_backward(forward, backward, shape.p - 2 - device + s)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, s = setting.shape.p, setting.shape.m, len(self.slices)
        yield ClosedForm("bubble", (p - 1) * setting.t_total / s, "section 3.2")
        yield ClosedForm("in_flight_b", [min(m * s, p - i + s - 1) for i in range(p)], "section 3.2")

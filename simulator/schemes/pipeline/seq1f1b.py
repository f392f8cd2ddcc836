"""Seq1F1B: 1F1B over slices of sequences instead of whole micro-batches.

With s slices per sequence, device i runs p-1-i+s-1 forward passes of slices, then alternates forward and backward
passes, then runs the remaining backward passes. The backward passes of a micro-batch go from its last slice to its
first, since later slices contribute to the gradients of a slice's keys and values. Bubble and memory shrink, because
warm-up and cool-down consist of passes of slices.

    p = 2, m = 2, s = 2: slices a b
    device 0   F0a F0b F1a ... B0b F1b B0a ... B1b ... B1a
    device 1   ... F0a F0b B0b F1a B0a F1b B1b B1a

For slices of equal duration: bubble (p-1)(t_f + t_B)/s [s], min(m s, p - i + s - 1) slices in flight on device i (t_f,
t_B: forward and whole backward pass of a micro-batch on a device). With v chunks a device (Seq1F1B-I) micro-batches
run chunk by chunk as in interleaved 1F1B, in groups of at least p slices and as few micro-batches (N) as divide m:
bubble (p-1)(t_f + t_B)/(v s) [s], 2 (p-1-i) + (v-1) N s + s chunks of slices in flight.

Of slices of equal length the later ones take longer, since their tokens attend to more preceding tokens; `balanced`
chooses lengths of equal forecast duration.

References: Sun et al. 2024, arXiv 2406.03488, sections 3.2 and 3.3; https://github.com/thunlp/Seq1F1B (with chunks in
groups of p slices: the same where s divides p).
"""

from collections.abc import Iterable, Sequence

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, SliceDuration
from meshcast.simulator.scheduling.sequence_slicing import (
    SliceCount,
    SlicedSchedule,
    SliceLengths,
    choose_balanced_slices,
    sliced_1f1b,
    sliced_1f1b_forms,
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
        if self.options.balanced and not isinstance(self.options.slices, int):
            rule = f"{self.use} chooses the lengths of balanced slices itself"
            raise PlanError("slices", rule, "Give their number, or leave out balanced", list(self.options.slices))

    def propose_slices(
        self, shape: PipelineShape, sequence: int, step: int, granule: int, seconds: SliceDuration
    ) -> list[tuple[int, ...]]:
        return [choose_balanced_slices(sequence, step, seconds, min(self.options.slices, sequence // step))]

    def order(self, shape: PipelineShape, device: int) -> Sequence[Action]:
        return sliced_1f1b(shape, device)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        return sliced_1f1b_forms(setting, len(self.slices))

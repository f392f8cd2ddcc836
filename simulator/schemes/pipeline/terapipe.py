"""TeraPipe: GPipe over slices of sequences, which follow each other through the stages.

A sequence of one micro-batch keeps several stages busy at once: a slice goes on as soon as it is through, and the
next one, which attends to it, follows. All forward passes come first, then the backward passes of the slices, the last
one first. It is made for long sequences in few micro-batches through many stages.

    p = 3, m = 1, slices a b c
    device 0   Fa Fb Fc .. .. .. .. Bc Bb Ba
    device 1   .. Fa Fb Fc .. .. Bc Bb Ba
    device 2   .. .. Fa Fb Fc Bc Bb Ba

m sum(t) + (p-1) max(t) [s] a step for slices of t = t_f + t_B; m s slices in flight.

Attention makes equal slices slower towards the end: ``auto`` cuts sequences so that the step is shortest, by the
paper's dynamic programme over forecast times of slices.

References: Li et al. 2021, arXiv 2102.07988, sections 3.2 and 3.3.
"""

from collections.abc import Iterable
from typing import Literal

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, SliceDuration
from simulator.scheduling.sequence_slicing import (
    SliceCount,
    SlicedSchedule,
    SliceLengths,
    choose_fastest_slices,
    forward_slices,
)


class TeraPipe(SlicedSchedule):
    paper = Paper(
        "arXiv:2102.07988",
        "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models",
        2021,
    )

    class Options(SlicedSchedule.Options):
        slices: SliceCount | SliceLengths | Literal["auto"] = 4
        """How many, of equal lengths, their lengths, or auto: as many as are best."""

    @property
    def slices(self) -> tuple[float, ...]:
        return () if self.options.slices == "auto" else super().slices

    def choose_slices(self, shape: PipelineShape, sequence: int, step: int, lasts: SliceDuration) -> tuple[int, ...]:
        return choose_fastest_slices(sequence, step, lasts, shape.m, shape.p - 1)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = forward_slices(shape, device)
        return forward + [action._replace(kind="BW") for action in reversed(forward)]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * max(self.slices) * setting.t_total, "section 3.3, equation 5")
        yield ClosedForm("in_flight_b", [m * len(self.slices)] * p, "all forward passes come first")
        yield ClosedForm("bubble_per_hop", 2 * (p - 1), "one hop per stage and direction, in fill and drain")

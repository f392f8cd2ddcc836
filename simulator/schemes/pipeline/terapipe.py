"""TeraPipe: GPipe over slices of sequences, which follow each other through the stages.

One micro-batch keeps several stages busy: a slice moves to the next stage when it is done, and the next slice, which
attends to it, follows. All forward passes come first, then the backward passes from the last slice to the first. It is
for long sequences, few micro-batches and many stages.

    p = 3, m = 1, slices a b c
    device 0   Fa Fb Fc .. .. .. .. Bc Bb Ba
    device 1   .. Fa Fb Fc .. .. Bc Bb Ba
    device 2   .. .. Fa Fb Fc Bc Bb Ba

m sum(t) + (p-1) max(t) [s] a step for slices of t = t_f + t_B; m s slices in flight.

Attention makes late slices of equal length slower: ``auto`` chooses their lengths by the paper's dynamic programme over
forecast times of slices on a stage in the middle, first roughly and then to 8 tokens, as the paper. First and last
stages take longer than those in the middle, so the result and slices of equal lengths are forecast, and the shortest
step wins. Where the host takes longer to launch slices than they run, that choice may lose to equal slices (4 % in two
cases).

References: Li et al. 2021, arXiv 2102.07988, sections 3.2 and 3.3.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, SliceDuration
from meshcast.simulator.scheduling.sequence_slicing import (
    SliceCount,
    SlicedSchedule,
    SliceLengths,
    choose_fastest_slices,
    forward_slices,
    promising_even_slices,
    refine_slices,
)


class TeraPipe(SlicedSchedule):
    paper = Paper(
        "arXiv:2102.07988", "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models", 2021
    )

    class Options(SlicedSchedule.Options):
        slices: SliceCount | SliceLengths | Literal["auto"] = 4
        """Number of slices of equal length, their lengths, or auto: the number and lengths of the shortest step."""

    @property
    def slices(self) -> tuple[float, ...]:
        return () if self.options.slices == "auto" else super().slices

    def propose_slices(
        self, shape: PipelineShape, sequence: int, step: int, granule: int, seconds: SliceDuration
    ) -> list[tuple[int, ...]]:
        m, hops = shape.m, shape.p - 1
        coarse = choose_fastest_slices(sequence, step, seconds, m, hops)
        fine = refine_slices(coarse, step, granule, seconds, m, hops)
        return list(dict.fromkeys([fine, coarse, *promising_even_slices(fine, granule, seconds, m, hops)]))

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = forward_slices(shape, device)
        return forward + [action._replace(kind="BW") for action in reversed(forward)]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * max(self.slices) * setting.t_total, "section 3.3, equation 5")
        yield ClosedForm("in_flight_b", [m * len(self.slices)] * p, "all forward passes come first")
        yield ClosedForm("bubble_per_hop", 2 * (p - 1), "one hop a stage, in warm-up and in cool-down")

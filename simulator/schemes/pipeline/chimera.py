"""Chimera: two pipelines in opposite directions through the same devices; each fills bubbles of the other.

Every device holds a stage of each direction, so there are two copies of the weights, whose gradients are all-reduced:
those of a stage as soon as all copies have run their last backward pass, if a bubble follows. Half of the micro-batches
go down, from device 0 to the last, half go up. Orders are read off a grid of unit slots in which the two directions
never collide; groups of p micro-batches follow one another.

    p = 4, m = 4 (upper case: down, lower case: up)
    device 0   F0 .. F1 f0 b0 f1 b1 B0 .. B1
    device 1   .. F0 f0 F1 f1 b0 B0 b1 B1
    device 2   .. f0 F0 f1 F1 B0 b0 B1 b1
    device 3   f0 .. f1 F0 B0 F1 B1 b0 .. b1

With f pairs of pipelines (`pairs`) every device holds 2 f stages: pair i enters i p/f devices further on, around the
ring, and takes 1/f of the micro-batches. f divides p/2.

bubble (q-2) t_B + (m/p - 1)(q-2)(t_B - t_f) [s] for q = p/f and t_B = t_b + t_w >= t_f; from p - q/2 + 1 to p
micro-batches in flight. Needs an even p and m a multiple of p.

Forward doubling and backward halving (`concatenation`) give a forward pass the samples of two backward passes, which
makes them about equally long. With n groups of p forward passes, bubble (p-2)(max(T_f, T_b) + (n-1)|T_f - T_b|) for
T_f = 2 t_f, T_b = t_B, m = 2 n p (doubling) or T_f = t_f, T_b = t_B/2, m = n p (halving); from 3p/2 + 1 to 2 p backward
passes' activations in flight, for doubling twice those of direct concatenation, which may ask for recomputation.

References: Li and Hoefler 2021, arXiv 2107.06925, section 3 with tables 2 and 3; figure 4 for gradient_sync; figure 7
for concatenation, of which (d), half of the bubbles at the beginning removed, is not modelled.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    Bidirectional,
    PipelineSetting,
    PipelineShape,
    nearest_multiple,
)


class Chimera(Bidirectional):
    paper = Paper(
        "arXiv:2107.06925",
        "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
        2021,
    )

    class Options(Bidirectional.Options):
        pairs: int = Field(default=1, ge=1, strict=True)
        """Pairs of pipelines, each pair down and up (f)."""
        concatenation: Literal["direct", "forward-doubling", "backward-halving"] = "direct"
        """How more micro-batches than stages follow one another: `direct`; `forward-doubling`, with forward passes of
        two at once; `backward-halving`, with backward passes of half of a micro-batch."""
        gradient_sync: Literal["end", "eager", "eager-opt"] = "eager-opt"  # type: ignore[assignment]
        """When the gradients of the copies of a stage are summed: `end`, after all passes; `eager`, as soon as the last
        backward pass of that stage has run on all devices that hold it, while other passes go on; `eager-opt`, eager
        for the stages whose last backward pass is followed by a bubble before the last pass of the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.directions = 2 * self.options.pairs
        self.microbatches_per_forward = 2 if self.options.concatenation == "forward-doubling" else 1
        self.backwards_per_forward = 1 if self.options.concatenation == "direct" else 2

    def device(self, shape: PipelineShape, stage: int) -> int:
        pipeline, position = divmod(stage, shape.p)
        pairs = self.options.pairs
        on_ring = (position + pipeline % pairs * shape.p // pairs) % shape.p
        return on_ring if pipeline < pairs else shape.p - 1 - on_ring

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.p // 2 % self.options.pairs:
            rule = f"the pairs of {self.use} divide half of its devices, {shape.p // 2}"
            raise PlanError("pairs", rule, "1 would work", self.options.pairs)
        if self.backwards_per_forward > 1 and self.options.pairs > 1:
            rule = f"passes of several pairs collide with concatenation: {self.options.concatenation}"
            raise PlanError("pairs", rule, "1 would work", self.options.pairs)
        if shape.m % shape.p:
            joint, near = self.microbatches_per_forward, nearest_multiple(shape.m, shape.p)
            rule = f"{self.use} needs micro-batches in multiples of {'2 ' * (joint - 1)}pp = {joint * shape.p}"
            remedy = f"{joint * near} would work: change batch.global or plan.dp"
            raise PlanError("micro-batches per replica", rule, remedy, joint * shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return [action for _, action in sorted(self._slots(shape, device).items())]

    def _slots(self, shape: PipelineShape, device: int) -> dict[int, Action]:
        """Returns the actions of a device by slot."""
        p, share, parts = shape.p, shape.p // self.directions, self.backwards_per_forward
        slots = {}
        for stage in (stage for stage in range(shape.stages) if self.device(shape, stage) == device):
            position = self.model_part(shape, stage)
            for index, k in enumerate(self.microbatches(shape, stage)):
                group, number = divmod(index, share)
                begin = (1 + parts) * p * group
                slots[begin + position + 2 * number] = Action(stage, "F", k)
                for part in range(parts):
                    slot = begin + 2 * p - 1 - position + 2 * (parts * number + part)
                    slots[slot] = Action(stage, "BW", k, part)
        return slots

    def sums_early(self, shape: PipelineShape, stage: int) -> bool:
        if self.options.gradient_sync != "eager-opt":
            return super().sums_early(shape, stage)
        return all(self._bubble_follows(shape, copy) for copy in range(stage % shape.p, shape.stages, shape.p))

    def _bubble_follows(self, shape: PipelineShape, stage: int) -> bool:
        """Returns whether the device idles between the last backward pass of a stage and the device's last."""
        slots = self._slots(replace(shape, m=shape.p), self.device(shape, stage))
        last = max(slot for slot, action in slots.items() if action.stage == stage)
        return len(slots) < 1 + max(slots) - last + sum(slot < last for slot in slots)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, groups = setting.shape.p, setting.shape.m // setting.shape.p
        backward, apart = setting.t_b + setting.t_w, p // self.options.pairs
        if backward >= setting.t_f:
            bubble = (apart - 2) * (backward + (groups - 1) * (backward - setting.t_f))
            yield ClosedForm("bubble", bubble, "sections 3 and 3.6; between groups, replay of the order")
        held = [p + 1 - apart // 2 + min(i % apart, apart - 1 - i % apart) for i in range(p)]
        yield ClosedForm("in_flight_b", held, "section 3, table 2; replay of the order")

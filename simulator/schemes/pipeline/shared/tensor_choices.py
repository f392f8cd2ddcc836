"""Schedules whose stages swap, offload or recompute some of the tensors that their layers save: choices of
`simulator.plan.by_tensor`, or those that a plan states.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf

from pydantic import Field

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import ChoosesTensors
from meshcast.simulator.ir.modules import Layer, Module, Stage
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.ir.scheme import LowerModule, LowerStage
from meshcast.simulator.lowering.offload import offload_activations
from meshcast.simulator.scheduling.activation_transfer import TensorChoice
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, Stripe
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers, recompute


class TensorSchedule(Schedule, ChoosesTensors):
    """Base of schedules that choose for every saved tensor. Customise by: `orders`, with the transfers of
    `options.tensors`.

    stage: the stage whose layers it lowers.
    """

    stage = 0

    class Options(Schedule.Options):
        memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
        """Memory of a device that the choice of tensors keeps to; null: that of the GPU."""
        tensors: tuple[TensorChoice, ...] = ()
        """What becomes of the saved tensors of every stage, by name: {swap, host, recompute, stripes: [[keeper, bytes,
        own links]]}; empty: chosen."""

    @property
    def chooses_tensors(self) -> bool:
        return True

    @property
    def tensor_choices(self) -> Sequence[TensorChoice]:
        return tuple(self.options.tensors)

    @property
    def memory_limit(self) -> float | None:
        return None if self.options.memory_gib is None else self.options.memory_gib * 2**30

    def with_tensors(self, choices: Sequence[TensorChoice], stage: int) -> TensorSchedule:
        schedule = self.with_options(tensors=tuple(choices))
        schedule.stage = stage
        return schedule

    @property
    def _own(self) -> TensorChoice:
        return self.options.tensors[self.stage] if self.options.tensors else TensorChoice()

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self._own.host, self._own.recompute

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = inner(mark_layers(stage, inf, self.role))
        return offload_activations(stage_ops, self.role, "cpu", self._own.host) if self._own.host else stage_ops

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        again = self._own.recompute
        if not (again and isinstance(module, Layer)):
            return inner(module)
        return recompute(module, inner, lambda key: key.partition("@")[0] not in again)

    def stripes(self, shape: PipelineShape) -> Mapping[tuple[int, int], Stripe]:
        return {(i, one.keeper): one for i, choice in enumerate(self.options.tensors) for one in choice.stripes}

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        stated = self.options.tensors
        if stated and len(stated) != shape.p:
            rule = f"it lists {len(stated)} choice{'s' * (len(stated) != 1)}, and there are {shape.p} stages"
            raise PlanError(f"{self.use}.tensors", rule, "Give one for each, {} for a stage that keeps all")
        for stage, choice in enumerate(stated):
            keepers = [one.keeper for one in choice.stripes]
            others = {*range(shape.p)} - {stage}
            if not others >= {*keepers} or len({*keepers}) < len(keepers):
                where, rule = f"{self.use}.tensors[{stage}].stripes", "other devices keep them, one stripe on each"
                raise PlanError(where, f"{rule}; these are the keepers", f"Valid: {sorted(others)}", keepers)
            if (least := min((one.nbytes for one in choice.stripes), default=1)) < 1:
                where = f"{self.use}.tensors[{stage}].stripes"
                raise PlanError(where, "a stripe has at least one byte", "Give [keeper, bytes, own links]", least)
            if bool(choice.swap) != bool(keepers):
                given, missing = ("swap", "stripes") if choice.swap else ("stripes", "swap")
                rule = f"it has `{given}` without `{missing}`: tensors are swapped in stripes to other devices"
                raise PlanError(f"{self.use}.tensors[{stage}]", rule, f"Give `{missing}` too, or leave both out")

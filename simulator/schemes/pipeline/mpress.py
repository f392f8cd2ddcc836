"""MPress: 1F1B that chooses for every saved tensor of a stage: kept, swapped to other devices or the host, recomputed.

In 1F1B device i holds activations of p - i micro-batches, so that the first devices are full while the last have room.
For every stage that exceeds the memory of its device it is chosen what becomes of every tensor that its layers save:

1. D2D swap: it rests on several devices with room, a stripe on each, sent over the links to them at once during a later
   forward pass and back during the backward pass before that of its layers. Tensors that take longest to recompute come
   first, as long as the keepers have room and the transfer takes no longer than a pass.
2. Host: it is copied over PCIe while layers compute, as long as the copies take no longer than a pass.
3. Recompute: those with fewest seconds a byte are freed and computed again. What is swapped stays in more micro-batches
   than what is recomputed, so tensors are swapped only as far as the stage then still fits.

    p = 4 (E: swapped tensors leave, L: they come back; on devices 2 and 3 K: a stripe is kept, G: given back)
    device 0   F0 F1 E1 F2 E2 F3 L1 B0 E3 F4 L2 B1 E4 F5 L3 B2 ..

Of swapped tensors a device holds 3 micro-batches: min(m, p - i) - 3 fewer. Their keepers hold, of stripes of S bytes,
at most (min(m, p - i) - 2) S. Of A bytes in L layers recomputation frees (min(m, p - i) - 1/L) A, the host less by A/L.

With a `memory_limit` of K micro-batches all tensors of a micro-batch are swapped instead, in turn to several devices:
device i with p - i > K has p - i - K + 1 micro-batches away, device j has room for K - p + j. All find room if K is at
least ceil((p+2)/2), which it is where memory is not known (a schedule without a job). The bubble is 1F1B's,
(p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a device), where a transfer is shorter than a pass.

Simplified: a choice is of the tensors that an op makes in all layers of a stage; transfers hide behind a pass, not
the whole interval between the passes of a tensor; a choice is corrected by forecasts of memory, not of time. Not
modelled: several stages that share the links of a keeper; the search of a GPU for every stage among directly linked
GPUs.

References: Zhou et al. 2023 (HPCA), doi 10.1109/HPCA56546.2023.10071077 (from its abstract); the passes during which
activations move: Kim et al. 2023, https://proceedings.mlr.press/v202/kim23l.html.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import ChoosesTensors
from meshcast.simulator.ir.modules import Layer, Module, Stage
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper
from meshcast.simulator.lowering.offload import offload_activations
from meshcast.simulator.scheduling.activation_transfer import (
    TensorChoice,
    insert_transfers,
    spread_transfers,
    striped_transfers,
)
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    ScheduleItem,
    Stripe,
    one_forward_one_backward,
)
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers, recompute


class MPress(Schedule, ChoosesTensors):
    paper = Paper(
        "doi:10.1109/HPCA56546.2023.10071077",
        "MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers via Memory-Saving Inter-Operator "
        "Parallelism",
        2023,
    )
    needs_durations = True
    stage = 0
    """The stage whose layers it lowers."""

    class Options(Schedule.Options):
        memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
        """Memory of a device that the choice of tensors keeps to; null: that of the GPU."""
        tensors: tuple[TensorChoice, ...] = ()
        """What becomes of the saved tensors of every stage, by name: {swap, host, recompute, stripes: [[keeper, bytes,
        own links]]}; empty: chosen."""
        memory_limit: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches whose activations a device may hold (K), of which whole ones are swapped; null: tensors are."""

    @property
    def chooses_tensors(self) -> bool:
        return self.options.memory_limit is None

    @property
    def tensor_choices(self) -> Sequence[TensorChoice]:
        return tuple(self.options.tensors)

    @property
    def memory_limit(self) -> float | None:
        return None if self.options.memory_gib is None else self.options.memory_gib * 2**30

    def with_tensors(self, choices: Sequence[TensorChoice], stage: int) -> "MPress":
        schedule = self.with_options(tensors=tuple(choices))
        schedule.stage = stage
        return schedule

    @property
    def _choice(self) -> TensorChoice:
        return self.options.tensors[self.stage] if self.options.tensors else TensorChoice()

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self._choice.host, self._choice.recompute

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = inner(mark_layers(stage, inf, self.role))
        return offload_activations(stage_ops, self.role, "cpu", self._choice.host) if self._choice.host else stage_ops

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        again = self._choice.recompute
        if not (again and isinstance(module, Layer)):
            return inner(module)
        return recompute(
            module,
            inner,
            lambda fragment: {use.key for use in fragment.tensor_uses if use.key.partition("@")[0] not in again},
        )

    def stripes(self, shape: PipelineShape) -> Mapping[tuple[int, int], Stripe]:
        return {
            (stage, stripe.keeper): stripe
            for stage, choice in enumerate(self.options.tensors)
            for stripe in choice.stripes
        }

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        self._check_choices(shape)
        limit, least = self.options.memory_limit, min(_least(shape.p), shape.m)
        if limit is not None and limit < least:
            rule = f"{self.use} has no device with room below {least} micro-batches a device"
            raise PlanError("memory_limit", rule, "Raise it, or leave it out to choose for every tensor", limit)

    def _check_choices(self, shape: PipelineShape) -> None:
        """Raises PlanError if the stated choices do not fit the stages."""
        stated = self.options.tensors
        if stated and len(stated) != shape.p:
            rule = f"it lists {len(stated)} choice{'s' * (len(stated) != 1)}, and there are {shape.p} stages"
            raise PlanError(f"{self.use}.tensors", rule, "Give one for each, {} for a stage that keeps all")
        for stage, choice in enumerate(stated):
            keepers = [stripe.keeper for stripe in choice.stripes]
            others = {*range(shape.p)} - {stage}
            if not others >= {*keepers} or len({*keepers}) < len(keepers):
                where, rule = f"{self.use}.tensors[{stage}].stripes", "other devices keep them, one stripe on each"
                raise PlanError(where, f"{rule}; these are the keepers", f"Valid: {sorted(others)}", keepers)
            if (least := min((stripe.nbytes for stripe in choice.stripes), default=1)) < 1:
                where = f"{self.use}.tensors[{stage}].stripes"
                raise PlanError(where, "a stripe has at least one byte", "Give [keeper, bytes, own links]", least)
            if bool(choice.swap) != bool(keepers):
                key, missing = ("swap", "stripes") if choice.swap else ("stripes", "swap")
                rule = f"it has `{key}` without `{missing}`: tensors are swapped in stripes to other devices"
                raise PlanError(f"{self.use}.tensors[{stage}]", rule, f"Give `{missing}` too, or leave both out")

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        passes = []
        for i in range(shape.p):
            forward, backward = ([Action(i, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
            passes.append(one_forward_one_backward(forward, backward, shape.p - 1 - i))
        if self.options.tensors:
            choices = enumerate(self.options.tensors)
            transfers = [move for stage, choice in choices for move in striped_transfers(shape, stage, choice.stripes)]
        else:
            transfers = spread_transfers(shape, self.options.memory_limit or _least(shape.p))
        return insert_transfers(self, shape, passes, transfers, durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm("most_in_flight_b", min(m, p, _least(p)), "all activations, and those in transfer, find room")


def _least(p: int) -> int:
    """Returns the fewest micro-batches a device at which the last devices have room for what the first ones swap."""
    return p // 2 + 1 + p % 2

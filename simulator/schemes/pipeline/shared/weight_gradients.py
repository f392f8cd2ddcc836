"""When 1F1B and interleaved 1F1B compute weight gradients, as Megatron-Core may put them off.

`delay_weight_gradients` changes the order inside of the backward pass of a layer: gradients of inputs run first, so
that the exchange of tokens begins earlier and runs beside gradients of weights.

    at once    dW of experts between their dX | dispatch | dX and dW of attention in turn
    delayed    dX of experts | dispatch, beside it dW of experts | dX of attention | dW of attention and shared experts

`deferred_output_gradients` takes the output layer's weight gradients out of the backward passes of the last stage,
which has more to compute than the others. They run after its last backward pass, while the pipeline drains. Until then
the device holds the input and the gradient of the logits of every micro-batch whose gradients it defers.

References: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core/models/common/model_chunk_schedule_plan.py (`run`) and
megatron/core/utils.py (`drain_embedding_wgrad_compute`).
"""

from collections.abc import Hashable, Sequence

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import MLP, CompositeModule, Layer, Module, MoE, SharedExperts, Unit
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.operators import Head
from meshcast.simulator.ir.ops import COMPUTE, Fragment
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassOverlap,
    PipelineShape,
    Schedule,
    ScheduleItem,
)


class PutsOffWeightGradients(Schedule):
    """Base of the 1F1B schedules of Megatron-Core."""

    class Options(Schedule.Options, PassOverlap):
        delay_weight_gradients: bool = False
        """Inside of the backward pass of a layer weight gradients run after the gradients of inputs: those of experts
        beside the exchange of tokens, those of attention and shared experts last (Megatron-Core's
        --delay-wgrad-compute, which needs `overlap_passes`)."""
        deferred_output_gradients: int | None = Field(default=None, ge=0, strict=True)
        """Micro-batches of which the last stage computes the output layer's weight gradients after all of its backward
        passes; 0: all (Megatron-Core's --defer-embedding-wgrad-compute and --wgrad-deferral-limit). Default: none."""

    @property
    def defers_output(self) -> bool:
        """Whether the output layer's weight gradients are deferred."""
        return self.options.deferred_output_gradients is not None

    @property
    def backward_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("BW", "B", "W") if self.defers_output else ("BW",)

    def check_weight_gradients(self, shape: PipelineShape) -> None:
        """Raises PlanError where weight gradients cannot be put off as the options say."""
        if self.options.delay_weight_gradients and not self.options.overlap_passes:
            rule = "weight gradients are delayed where a forward and a backward pass overlap"
            raise PlanError("plan.schedule.delay_weight_gradients", rule, "Set overlap_passes: true as well", True)
        if self.defers_output and (shape.p == 1 or self.options.overlap_passes):
            rule = "weight gradients of the output layer are deferred in a pipeline whose passes do not overlap"
            remedy = "Leave it out, or set pp: 2 and overlap_passes: false"
            value = self.options.deferred_output_gradients
            raise PlanError("plan.schedule.deferred_output_gradients", rule, remedy, value)

    @property
    def lowering_key(self) -> Hashable:
        """That of other schedules where weight gradients are put off in no way."""
        ways = self.options.delay_weight_gradients, self.defers_output
        return (super().lowering_key, *ways) if any(ways) else super().lowering_key

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if self.options.delay_weight_gradients and isinstance(module, Layer):
            delay_weight_gradients(fragment, module)
        if self.defers_output and isinstance(module, Unit):
            keep_output_gradients(fragment, module)
        return fragment

    def defer_output(self, order: Sequence[ScheduleItem], shape: PipelineShape) -> Sequence[ScheduleItem]:
        """Returns the order of a device with the deferred weight gradients of its last stage behind all passes."""
        last = shape.stages - 1
        if not self.defers_output or shape.forward_only:
            return order
        limit = self.options.deferred_output_gradients or shape.m
        changed, deferred = list(order), list[Action]()
        for at, item in enumerate(changed):
            if isinstance(item, Action) and (item.stage, item.kind) == (last, "BW") and len(deferred) < limit:
                changed[at] = item._replace(kind="B")
                deferred.append(item._replace(kind="W"))
        return [*changed, *deferred]


def delay_weight_gradients(fragment: Fragment, layer: CompositeModule) -> None:
    """Moves the kernels of weight gradients of a layer behind those of the gradients of inputs: of experts, and of an
    MLP, behind theirs, of all other linear layers but routers to the end. No other op waits for them."""
    early, routers = _names_of(layer)
    delayed = [op for op in fragment.backward if op.phase == "W" and op.stream == COMPUTE and op.name not in routers]
    moved = set(delayed)
    kept = [op for op in fragment.backward if op not in moved]
    for op in kept:
        op.after = [other for other in op.after if other not in moved]
    first = [op for op in delayed if op.name in early]
    inputs = [at for at, op in enumerate(kept) if f"w{op.name.removeprefix('d')}" in early and op.stream == COMPUTE]
    behind = max(inputs, default=-1) + 1 if first else 0
    rest = [op for op in delayed if op.name not in early]
    fragment.backward[:] = [*kept[:behind], *first, *kept[behind:], *rest]


def _names_of(layer: CompositeModule) -> tuple[set[str], set[str]]:
    """Returns the names of the weight gradients of experts and of an MLP, and of those of routers."""
    early, routers = set[str](), set[str]()
    for child in layer.children:
        if isinstance(child, MoE):
            routers |= {f"w{each.name}" for each in child.operators() if each.name.startswith("router")}
            early |= {f"w{each.name}" for each in child.operators() if each.view == EXPERTS}
        elif isinstance(child, MLP) and not isinstance(child, SharedExperts):
            early |= {f"w{each.name}" for each in child.operators()}
    return early, routers


def keep_output_gradients(fragment: Fragment, unit: CompositeModule) -> None:
    """Leaves of the weight gradients of a unit those of output layers alone, with the collectives that gather inputs
    for them; all others run with the gradients of inputs."""
    heads = {f"w{each.name}" for each in unit.operators() if isinstance(each, Head)}
    kept = {op for op in fragment.backward if op.name in heads}
    read = {other for op in fragment.backward if op not in kept for other in op.after}
    gathered = {other for op in kept for other in op.after if other.work is not None and other not in read}
    for op in fragment.backward:
        op.phase = "W" if op in kept or op in gathered else "B" if op.phase == "W" else op.phase

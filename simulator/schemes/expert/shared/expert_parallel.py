"""Expert parallelism: placement of experts, their capacity, and uneven routing, shared by all expert schemes.

Operators, layouts and their collectives assume even routing. `ExpertScheme.lower` adds what uneven routing changes:
work states its mean over ranks, which adds up to the total, and takes the `pace` and the groups of the most loaded rank
(see `simulator.ir.routing.slowest_rank`). The device that stands for all ranks holds the tokens of the most loaded
rank, since its memory must suffice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import prod
from typing import Annotated, Any, ClassVar

from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field
from meshcast.simulator.formats.expert_counts import RoutingOption
from meshcast.simulator.ir.capabilities import AdaptsModel, VariesSteps
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import Module, MoE, Operator, Stage, add_marks, every_module
from meshcast.simulator.ir.moe_operators import EXPERTS, ExpertCast, Permute
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, Memory, Op, StageOps
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.routing import USUAL_DOCUMENTS, ExpertLoad, Routing
from meshcast.simulator.ir.scheme import LowerModule, LowerStage, Rule, Scheme, SchemeOptions
from meshcast.simulator.ir.settings import OptionValues

TOKENS = Permute("tokens", (Tensor("x", {dim: Dim(1) for dim in "bsh"}),), ())
"""An operator at which tokens are dispatched, to ask which axes shard them."""

Capacity = Annotated[float, Field(strict=True, ge=0.01, le=1000, allow_inf_nan=False)]


def chunked_round_s(t: float, u: float, n: int) -> float:
    """Computes the seconds of dispatch, experts and combine in `n` equal chunks, each with all-to-alls of `t` and
    kernels of `u` seconds (PipeMoE, section IV): chunks follow each other on the stream of the all-to-alls and on that
    of the kernels.
    """
    return max(2 * n * t + max(0.0, u - (n - 1) * t), 2 * t + n * u)


@dataclass(frozen=True)
class ExpertSetting:
    """A layer of experts, of two matrices with biases each, on expert-parallel ranks.

    ep: ranks over which the experts are distributed.
    b: sequences of a rank, of s tokens each.
    h: hidden size.
    experts: routed experts of the layer.
    top_k: experts of a token.
    capacity: capacity factor; None: no token is dropped.
    over: the axis whose ranks hold the experts: dp, cp or tp (with sequence parallelism).
    nodes: nodes that the ranks lie on.
    exchange_s: seconds of an all-to-all of all tokens of a rank.
    compute_s: seconds of all expert kernels of a pass.
    expert_ffn: inner width of an expert.
    options: of the scheme.
    """

    ep: int = 1
    b: int = 1
    s: int = 16
    h: int = 32
    experts: int = 8
    top_k: int = 2
    capacity: float | None = None
    over: str = "dp"
    nodes: int = 1
    exchange_s: float = 1.0
    compute_s: float = 1.0
    expert_ffn: int = 16
    options: OptionValues = ()

    @property
    def slots_per_token(self) -> float:
        """Expert slots that a token takes: top_k times the capacity factor."""
        return self.top_k * (self.capacity or 1)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of the layer."""
        return self.experts * (2 * self.h * self.expert_ffn + self.expert_ffn + self.h)

    def chunked_round_s(self, n: int) -> float:
        """Computes the seconds of dispatch, experts and combine in `n` equal chunks."""
        return chunked_round_s(self.exchange_s / n, self.compute_s / n, n)


class ExpertScheme(AdaptsModel, VariesSteps):
    """Base of the expert schemes: `over` names the axis of the experts' view over which they are distributed, then,
    optionally, the axis that shards each of them.
    """

    family = "expert"
    role = "expert scheme"
    most_axes = 2
    default_capacity: ClassVar[float | None] = None
    """Capacity factor of distributed experts where neither the plan nor the model says any."""

    class Options(SchemeOptions):
        capacity: Capacity | None = None
        """Capacity factor: slots of every expert, in tokens x top_k / experts, all sent and computed, filled or not;
        tokens without a slot are dropped. null: that of the model; dropless where it has none.
        """
        routing: RoutingOption = Field(default="balanced", validate_default=True)  # type: ignore[assignment]
        """How often experts are chosen: balanced, natural, loss-free, {zipf: exponent} or {counts: FILE}; in steps that
        differ {zipf: exponent, drift: share, steps: number} or {trace: FILE} (see `simulator.ir.routing`). Default: as
        the model says, balanced where it does not."""

    @property
    def ranks(self) -> int:
        """Ranks over which the experts are distributed."""
        return self.mesh.size(self.axes[:1])

    def capacity(self, moe: Any) -> float | None:
        """Returns the capacity factor under this scheme; None: dropless."""
        factor: float | None = self.options.capacity
        if factor is None:
            factor = moe.capacity
        return self.default_capacity if factor is None and self.ranks > 1 else factor

    def adapt_model(self, model: Any) -> Any:
        if model.moe is None:
            return model
        return model.model_copy(update={"moe": model.moe.model_copy(update={"capacity": self.capacity(model.moe)})})

    def assumptions(self, model: Any) -> Iterable[str]:
        if model.moe is not None:
            routing, capacity, counts = self.options.routing, model.moe.capacity, model.moe.expert_counts
            loads = [routing.load(self.ranks, number, capacity) for number in counts]
            is_open = model.moe.routing is None and capacity is None and self.ranks > 1
            if is_open and all(load.even for load in loads):
                natural = Routing(trained="natural", documents=USUAL_DOCUMENTS).load(self.ranks, counts[0])
                busiest = f"the busiest of {self.ranks} ranks {natural.most_loaded - 1:.0%} more"
                yield f"{routing}; a trained router gives {busiest} (model.moe.routing: natural)"
            else:
                yield str(routing)
            if dropped := max(load.dropped for load in loads):
                yield f"{dropped:.1%} of the choices of an expert find no slot there and are dropped"

    def check_job(self, job: Any) -> None:
        for number in job.model.moe.expert_counts if job.model.moe is not None else ():
            if number % self.ranks == 0:
                where = next(i for i, entry in enumerate(job.plan.schemes) if entry.use == self.use)
                self.options.routing.check(self.ranks, number, f"plan.schemes[{where}].routing")

    @property
    def steps(self) -> int:
        return int(self.options.routing.steps)

    def at_step(self, step: int) -> Scheme:
        routing = self.options.routing
        number = routing.warmup + step
        return self if routing.step == number else self.with_options(routing=routing.at_step(number))

    def axes_with_same_tokens(self, job: Any) -> list[str]:
        """Returns the axes over which experts are distributed and along which no other scheme of the plan shards
        tokens."""
        mine, divided = self.mesh.parts(self.axes[:1]), self._dims_of_tokens(job)
        return [part for part in mine if self.mesh.size(part) > 1 and part not in divided]

    def sequence_shards(self, job: Any) -> int:
        """Parts of a sequence whose tokens different ranks dispatch."""
        return prod(self.mesh.size(part) for part, dim in self._dims_of_tokens(job).items() if dim == "s")

    def replicas(self, job: Any) -> int:
        """Counts the data-parallel replicas, each of which has other samples."""
        return prod(self.mesh.size(part) for part, dim in self._dims_of_tokens(job).items() if dim == "b")

    def _dims_of_tokens(self, job: Any) -> dict[str, str]:
        """Returns the dim of tokens, batch or sequence, that other schemes of the plan shard over an axis."""
        divided: dict[str, str] = {}
        for entry in job.plan.schemes:
            kind, options = find_scheme(entry.use), entry.model_extra or {}
            if kind.family not in ("pipeline", "expert"):
                other = kind(kind.all_axes(entry.over, options), kind.Options(**options), self.mesh, self.framework)
                rule = other.layouts(TOKENS)
                dims = dict.fromkeys(other.over, rule) if isinstance(rule, str) else rule.divide if rule else {}
                divided |= {part: dim for part, dim in dims.items() if dim in ("b", "s")}
        return divided

    def layouts(self, operator: Operator) -> Rule:
        dims = ((axis, dim, operator.has(dim)) for axis, dim in zip(self.axes, ("e", "f"), strict=False))
        # Tokens are cast where the GEMM reads them, after ranks that shard an expert have gathered them.
        kept = isinstance(operator, ExpertCast)
        return Rule({part: dim * has for axis, dim, has in dims if has or kept for part in self.mesh.parts(axis)})

    def expert_load(self, module: MoE) -> ExpertLoad:
        """Returns the load of the ranks that hold the experts of a layer."""
        load: ExpertLoad = self.options.routing.load(self.ranks, module.experts, module.capacity)
        return load

    def marks_of(self, layer: MoE) -> frozenset[Hashable]:
        """Marks of a layer with experts and of all modules inside it: its load, where that is uneven."""
        expert_load = self.expert_load(layer)
        return frozenset() if expert_load.even else frozenset({expert_load})

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        layers = {layer: self.marks_of(layer) for layer in every_module(stage) if isinstance(layer, MoE)}
        return inner(add_marks(stage, {part: marks for layer, marks in layers.items() for part in every_module(layer)}))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        expert_load = next((mark for mark in module.marks if isinstance(mark, ExpertLoad)), None)
        if expert_load is not None and isinstance(module, MoE):
            return skew_collectives(inner(module), self, expert_load)
        if expert_load is not None and isinstance(module, Operator) and module.view == EXPERTS:
            return skew_expert_work(inner(module), module, expert_load)
        return inner(module)


def expert_collectives(fragment: Fragment, scheme: ExpertScheme) -> list[Op]:
    """Returns the collectives of a layer over the ranks that experts are distributed over, forward and backward, in
    issue order.
    """
    parts = set(scheme.mesh.parts(scheme.axes[:1]))
    ops = [op for op in (*fragment.forward, *fragment.backward) if op.stream == scheme.family]
    return [op for op in ops if isinstance(op.work, Collective) and parts >= set(op.work.axes)]


def skew_collectives(fragment: Fragment, scheme: ExpertScheme, expert_load: ExpertLoad) -> Fragment:
    """Gives the collectives of a layer the mean bytes that leave a rank, and the pace of the busiest rank.

    Ranks that shard experts exchange the tokens of these: their most loaded ranks are those of the most loaded experts.
    """
    across = set(expert_collectives(fragment, scheme))
    for op in (*fragment.forward, *fragment.backward):
        if isinstance(op.work, Collective) and op.stream == scheme.family:
            if op in across:
                op.work = replace(
                    op.work, nbytes=round(expert_load.remote * op.work.nbytes), pace=expert_load.busiest_exchange
                )
            else:
                op.work = replace(op.work, pace=max(expert_load.rank_loads))
    return fragment


def skew_expert_work(fragment: Fragment, operator: Operator, expert_load: ExpertLoad) -> Fragment:
    """Gives the kernels and memory of an expert operator the pace of its most loaded rank.

    Memory of tokens that every rank gathers, and of weights, whose keys have no layout, stays as it is.
    """
    # With the dot that ends the name: a tensor's cast has its name and a number format.
    routed = tuple(f"{tensor.name}." for tensor in (*operator.ins, *operator.outs) if tensor.has("e"))
    for op in (*fragment.forward, *fragment.backward):
        if isinstance(op.work, Gemm) and op.work.groups:
            ((_, mean),) = op.work.groups
            groups = tuple((1, share * mean) for share in expert_load.expert_loads if share)
            op.work = replace(op.work, groups=groups, pace=expert_load.most_loaded)
        elif isinstance(op.work, Gemm) or (
            isinstance(op.work, Memory) and (op.phase != "W" or op.work.what == "permute")
        ):  # other kernels of phase W read weights only
            op.work = replace(op.work, pace=expert_load.most_loaded)
    for i, tensor_use in enumerate(fragment.tensor_uses):
        stem, of_tensor, _ = tensor_use.key.partition("@")
        if of_tensor and f"{stem.removeprefix('d:')}.".startswith(routed):
            fragment.tensor_uses[i] = replace(tensor_use, nbytes=round(expert_load.most_stored * tensor_use.nbytes))
    return fragment

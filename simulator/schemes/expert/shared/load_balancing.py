"""Placements of experts that follow their loads from step to step: base of the expert schemes with such a policy.

Before each step the policy of a scheme sees the loads of all earlier steps, never that of the step, and decides which
ranks host each expert. Tokens are then routed by the loads of the step.

- Experts that *move*, and replicas that stay: weights and optimizer states are sent to each new host once. Gradients of
  replicas are summed among their hosts.
- *Shadows* (`Placement.stays`): each step their weights are broadcast to the hosts, and gradients reduced to the owner.

Both run on a separate stream: weights arrive from the start of the step on, layer after layer, and the first use of
a layer's experts waits for its weights; gradients leave beside the rest of the last backward pass. All ranks gather the
token counts of all ranks in every layer. Not modelled: states of experts that are sharded over several groups of
expert-parallel ranks, of which each would send its shard; the optimizer update of replicas.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.capabilities import FitsModels
from meshcast.simulator.ir.modules import Module, MoE, Stage, Unit, every_module
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Gemm, Op, SideOps, StageOps, UnitRun, Work
from meshcast.simulator.ir.routing import ExpertLoad, Placement, Routing
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Scheme
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import exchange_counts

STREAM = "expert-weights"
"""The stream of weights, states and gradients of experts that change ranks."""

COUNT = 8
"""Bytes of a token count, a 64-bit integer."""


@dataclass(frozen=True)
class LayerTimes:
    """Times of a layer of experts in a step, as a system measures them before training [s].

    ranks, experts: ranks that hold the experts, and number of these.
    exchange: its all-to-alls under even routing.
    compute: the kernels of a rank's experts under even routing.
    others: forward kernels of the linear layers between two layers of experts.
    broadcast, reduce: the weights, or gradients, of an expert to or from all ranks.
    all_reduce: the gradients of an expert among all ranks.
    move: weights and optimizer states of an expert, from a rank to another.
    """

    ranks: int
    experts: int
    exchange: float
    compute: float
    others: float
    broadcast: float
    reduce: float
    all_reduce: float
    move: float

    def of_load(self, routing: Routing, placement: Placement) -> float:
        """Returns the slowest rank's time for tokens [s]."""
        load = routing.load(self.ranks, self.experts, placement=placement)
        return self.exchange * load.remote * load.busiest_exchange + self.compute * load.most_loaded

    def of_moves(self, before: Placement, after: Placement) -> float:
        """Returns the busiest rank's time to send or receive experts between two placements [s]."""
        return self.move * _busiest(after.transfers(before, self.ranks))


Policy = Callable[[Any, Placement, Sequence[Routing], LayerTimes], Placement]


class BalancedScheme(ExpertScheme, FitsModels):
    """Base of the expert schemes that place experts by the loads of earlier steps.

    Customise by: `decide`. Seldom: `reserved_replicas`.

    placements: for each number of experts of a layer, the placement of the step before and that of this step.
    """

    placements: dict[int, tuple[Placement, Placement]]

    class Options(ExpertScheme.Options):
        capacity: None = None  # type: ignore[assignment]
        """null: there is none, whatever the model says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.placements = {}

    @staticmethod
    @abstractmethod
    def decide(options: Any, held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        """Returns the placement of the next step.

        held: the placement of the step before.
        past: the routing of all earlier steps.
        """

    @property
    def reserved_replicas(self) -> int:
        """Experts of other ranks for which a rank reserves memory, whether it hosts them or not."""
        return 0

    def capacity(self, moe: Any) -> None:
        return None

    def fit_models(self, job: Any, measure: Callable[[Work], float]) -> Scheme:
        if self.ranks == 1 or job.model.moe is None:
            return self
        fitted, options = copy.copy(self), self.options.model_copy(update={"routing": self.options.routing.at_step(0)})
        fitted.placements = {}
        for number in job.model.moe.expert_counts:
            times, step = self._measure_layer(job, number, measure), self.options.routing.step
            steps = (max(0, step - 1), step)
            before, now = (_place(type(self).decide, options, times, number) for number in steps)
            fitted.placements[number] = before, now
        return fitted

    def _measure_layer(self, job: Any, experts: int, measure: Callable[[Work], float]) -> LayerTimes:
        model, axes = job.model, self.mesh.parts(self.axes[:1])
        width, ffn = BYTES[self.framework.weights], model.moe.expert_ffn // self.mesh.size(self.axes[1:])
        rows = job.batch.micro * job.batch.sequence / self.sequence_shards(job) * model.moe.top_k
        passes = job.batch.total / (job.batch.micro * self.replicas(job))
        hidden = model.moe.token_width(model.hidden)
        sizes = ((2 if model.gated else 1) * ffn, hidden), (hidden, ffn)
        experts_per_rank, weights = experts // self.ranks, sum(n * k for n, k in sizes)
        products = [
            Gemm(
                rows / experts_per_rank,
                n,
                k,
                experts_per_rank,
                self.framework.weights,
                groups=((experts_per_rank, rows / experts_per_rank),),
            )
            for n, k in sizes
        ]
        exchange = Collective("all_to_all", round(rows * hidden * width), axes)
        between = model.moe.every * 4 * model.hidden + (model.moe.every - 1) * (3 if model.gated else 2) * model.ffn
        others = Gemm(rows / model.moe.top_k, between, model.hidden, dtype=self.framework.weights)
        gradients = round(weights * BYTES[self.framework.gradients])
        expert_moved = np.zeros((self.ranks, self.ranks), dtype=int)
        expert_moved[0, 1] = 1
        return LayerTimes(
            ranks=self.ranks,
            experts=experts,
            exchange=passes * 4 * measure(exchange),
            compute=passes * 3 * sum(map(measure, products)),
            others=passes * measure(others),
            broadcast=measure(Collective("broadcast", round(weights * width), axes)),
            reduce=measure(Collective("reduce", gradients, axes)),
            all_reduce=measure(Collective("all_reduce", gradients, axes)),
            move=measure(self._move(expert_moved, weights)),
        )

    def _move(self, transfers: np.ndarray, elements: float) -> Collective:
        """Sends weights and optimizer states of experts of `elements` each from rank to rank."""
        framework, total = self.framework, int(transfers.sum())
        states = BYTES[framework.main_weights] + framework.states.element_bytes(framework.moments)
        nbytes = elements * (BYTES[framework.weights] + states) * total / (self.ranks - 1)
        pace = _busiest(transfers) * self.ranks / total
        return Collective("all_to_all", round(nbytes), self.mesh.parts(self.axes[:1]), pace=pace)

    def placements_of(self, experts: int) -> tuple[Placement, Placement]:
        """Returns the placements of a layer in the step before and in this step."""
        start = Placement.in_order(self.ranks, experts)
        return self.placements.get(experts, (start, start))

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, tuple(self.placements.items())

    def expert_load(self, module: MoE) -> ExpertLoad:
        routing: Routing = self.options.routing
        return routing.load(self.ranks, module.experts, module.capacity, self.placements_of(module.experts)[1])

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE) and self.ranks > 1:
            counts = module.experts * self.ranks * COUNT
            exchange_counts(fragment, self.mesh.parts(self.axes[:1]), counts, "all_gather")
        return fragment

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        if self.ranks == 1:
            return stage_ops
        ahead, behind, start, weights, gradients = _Sides(), _Sides(), 0, 0, 0
        for unit, unit_run in _runs_of_units(stage, stage_ops):
            for layer in (module for module in every_module(unit) if isinstance(module, MoE)):
                replicas = self._move_experts(layer, unit_run, start, ahead, behind)
                weights, gradients = weights + replicas[0], gradients + replicas[1]
            start += unit_run.count * len(unit_run.fragment.params)
        return replace(
            stage_ops,
            ahead=[*stage_ops.ahead, *ahead.side_ops()],
            behind=[*stage_ops.behind, *behind.side_ops(backward=True)],
            whole_weights=stage_ops.whole_weights + weights,
            whole_gradients=stage_ops.whole_gradients + gradients,
        )

    def _move_experts(
        self, layer: MoE, unit_run: UnitRun, start: int, ahead: _Sides, behind: _Sides
    ) -> tuple[int, int]:
        """Moves weights to the hosts of experts and gradients back, and returns the bytes of both on a host.

        start: the number of the first parameter of the units.
        """
        params = unit_run.fragment.params
        numbers = np.array([i for i, param in enumerate(params) if param.view == self.view])
        elements = sum(params[i].size for i in numbers) * self.ranks / layer.experts
        trained = all(params[i].trained for i in numbers)
        before, now = self.placements_of(layer.experts)
        arriving, leaving = self._arriving(before, now, elements), self._leaving(now, elements)
        for copied in range(unit_run.count):
            at = start + copied * len(params) + numbers
            ahead.add(arriving, at)
            behind.add(leaving if trained else [], at)
        hosted = unit_run.count * max(self.reserved_replicas, self._foreign(now)) * elements
        return round(hosted * self._held_bytes(now)), round(hosted * BYTES[self.framework.gradients]) * trained

    def _held_bytes(self, placement: Placement) -> float:
        """Counts the bytes that a host beside the owner holds of each weight: of replicas with optimizer states."""
        framework = self.framework
        states = (
            0 if placement.stays else BYTES[framework.main_weights] + framework.states.element_bytes(framework.moments)
        )
        return float(BYTES[framework.weights] + states)

    def _foreign(self, placement: Placement) -> int:
        """Returns the most experts of other ranks that a rank hosts."""
        return int(np.bincount([rank for hosts in placement.hosts for rank in hosts[1:]], minlength=1).max())

    def _arriving(self, before: Placement, now: Placement, elements: float) -> list[Op]:
        """Returns the ops that bring weights to the hosts of a layer at the start of a step."""
        if not now.stays:
            moved = now.transfers(before, self.ranks)
            return [Op("move experts", STREAM, self._move(moved, elements))] if moved.any() else []
        nbytes = round(elements * BYTES[self.framework.weights])
        return [Op(f"shadow {expert}", STREAM, work) for expert, work in self._among_hosts(now, "broadcast", nbytes)]

    def _leaving(self, now: Placement, elements: float) -> list[Op]:
        """Returns the ops that sum the gradients of a layer's experts with several hosts."""
        operation, nbytes = "reduce" if now.stays else "all_reduce", round(elements * BYTES[self.framework.gradients])
        among = self._among_hosts(now, operation, nbytes)
        return [Op(f"sum gradients {expert}", STREAM, work, phase="W") for expert, work in among]

    def _among_hosts(self, now: Placement, operation: str, nbytes: int) -> Iterable[tuple[int, Collective]]:
        """Yields a collective among the hosts of every expert that has several."""
        axes = self.mesh.parts(self.axes[:1])
        for expert, hosts in enumerate(now.hosts):
            if len(hosts) > 1:
                yield expert, Collective(operation, nbytes, axes, members=tuple(sorted(hosts)))

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.top_k * setting.b * setting.s
        sent = 4 * (p - 1) / p * slots * setting.h * 2 + (p - 1) * setting.experts * COUNT
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "a rank owns E/P experts")
        yield ClosedForm("sent_per_layer", sent, "even loads: four all-to-alls, and counts of E experts to all ranks")
        yield ClosedForm("rows_per_layer", slots, "no token is dropped or padded")


def _runs_of_units(stage: Stage, stage_ops: StageOps) -> Iterator[tuple[Unit, UnitRun]]:
    """Yields the runs of a stage with their units: sharded weights divide the copies of a unit into several runs."""
    runs = iter(stage_ops.unit_runs)
    for unit in stage.units:
        left = unit.count
        while left > 0:
            yield unit, (run := next(runs))
            left -= run.count


class _Sides:
    """Side ops that are collected layer after layer, with the numbers of the parameters of each."""

    def __init__(self) -> None:
        self.ops: list[tuple[Op, np.ndarray]] = []

    def add(self, ops: Iterable[Op], params: np.ndarray) -> None:
        self.ops += [(op, params) for op in ops]

    def side_ops(self, backward: bool = False) -> list[SideOps]:
        ops = self.ops[::-1] if backward else self.ops
        if not ops:
            return []
        starts = np.cumsum([0, *(len(params) for _, params in ops[:-1])])
        return [SideOps([op for op, _ in ops], np.concatenate([params for _, params in ops]), starts)]


def _busiest(transfers: np.ndarray) -> int:
    """Returns the most experts that a rank sends or receives."""
    return int(max(transfers.sum(axis=0).max(), transfers.sum(axis=1).max()))


@lru_cache(maxsize=512)
def _place(decide: Policy, options: Any, times: LayerTimes, step: int) -> Placement:
    """Returns the placement of a step under a policy: of the first step that in order."""
    if step == 0:
        return Placement.in_order(times.ranks, times.experts)
    past = [options.routing.at_step(earlier) for earlier in range(step)]
    return decide(options, _place(decide, options, times, step - 1), past, times)

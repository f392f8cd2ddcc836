"""Whole jobs at ideal prices: lowered, played and their memory, for tests that count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil, inf, prod
from operator import mul
from typing import Any

from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.engine.peak_memory import Peak
from meshcast.simulator.engine.play import Engine, PlayedStep
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.resident_memory import resident_bytes
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params
from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import Attention, Gemm, HostLaunch, Memory, Op, Param, StageOps, Transfer, Work
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.memory_profile import block_events, memory_events
from meshcast.simulator.program.program import EveryStageOps, Program, one_of
from meshcast.simulator.program.task import Task
from meshcast.simulator.scheduling.schedule import OverlappedPasses, ScheduleItem
from meshcast.validation.contract.measure import params_of


@dataclass(frozen=True)
class Ideal:
    """Prices without overheads: FLOPs, bytes of memory and bytes of buffers, each over one rate.

    latency: of a message between stages, which does not block its sender.
    launch: of an op by the host.
    """

    flops: float = 1e9
    memory: float = 1e8
    links: float = 1e7
    latency: float = 0.0
    launch: float = 0.0

    def __call__(self, work: Work) -> tuple[float, float, float]:
        work = slowest_rank(work)
        match work:
            case Gemm() | Attention():
                return work.flops / self.flops, 0.0, 0.0
            case Memory():
                return work.bytes / self.memory, 0.0, 0.0
            case HostLaunch():
                return work.number * self.launch, 0.0, 0.0
        return work.nbytes / self.links, 0.0, self.latency if isinstance(work, Transfer) else 0.0


TOKENS = {"b": Dim(4), "s": Dim(4)}
ROUTER = Linear(
    "router",
    (Tensor("x", {**TOKENS, "h": Dim(4)}),),
    (Tensor("logits", {**TOKENS, "r": Dim(4)}),),
    (Tensor("w", {"h": Dim(4), "r": Dim(4)}),),
)
"""A linear that has neither heads nor feed-forward columns nor vocabulary: a tensor scheme shards its tokens or width,
or every rank computes all of it."""

PAID = Ideal()
"""Communication takes its time."""

FREE = Ideal(links=inf)
"""Communication costs nothing."""


@dataclass(frozen=True)
class Played:
    """A job as lowered and played."""

    plan: Plan
    stages: EveryStageOps
    program: Program
    step: PlayedStep
    peaks: Sequence[Peak]

    @property
    def flat(self) -> FlatProgram:
        return self.step.flat

    @property
    def times(self) -> OpTimes:
        return self.step.times

    @property
    def ranks(self) -> int:
        """Ranks that each device of the pipeline stands for."""
        return self.plan.mesh.world // self.plan.shape.p

    @property
    def by_a_clock(self) -> bool:
        """Whether ops are formed by when gradients come, so that faster links make other ops."""
        stages_ops = (one_of(stage) for stage in self.stages)
        return any(side_ops.formed for stage_ops in stages_ops for side_ops in (*stage_ops.ahead, *stage_ops.behind))

    def stage_ops(self, stage: int, part: int = 0) -> StageOps:
        """The ops of a stage: of whole sequences, or of a slice of them."""
        ops = self.stages[stage]
        return ops if isinstance(ops, StageOps) else ops[part]

    def actions(self, device: int) -> range:
        """The numbers of a device's actions."""
        return range(*self.program.timetable.starts[device : device + 2])

    def task(self, action: int) -> Task:
        return self.program.tasks[self.program.timetable.slot[action]]

    def ops(self, action: int) -> range:
        """The numbers of an action's ops."""
        return range(self.flat.first[action], self.flat.behind[action])

    def instances(self, device: int | None = None) -> Iterator[tuple[int, Op]]:
        """Every op that runs, with its number."""
        for number, op in enumerate(self.flat.ops):
            if device in (None, self.flat.device[number]):
                yield number, op

    @cached_property
    def counts(self) -> Counter[Op]:
        """How often each op runs."""
        return Counter(self.flat.ops)

    def list_held(self, device: int) -> list[Param]:
        """The parameters of a device, once for each layer that has them."""
        shape, schedule = self.plan.shape, self.plan.schedule
        return [
            param
            for stage, stage_ops in enumerate(self.stages)
            if schedule.device(shape, stage) == device
            for param in params_of(one_of(stage_ops))
        ]

    def resting(self, device: int) -> dict[str, float]:
        """Bytes of the states that a device holds all the time, by category."""
        return resident_bytes(self.plan, device_params(self.plan, self.stages)[device])

    def flops(self, *phases: str, dispatch: bool = True) -> dict[str, float]:
        """FLOPs over all ranks by kind of work, of the given phases. dispatch: with GEMMs that only move tokens."""
        flops = {"gemm": 0.0, "attention": 0.0}
        for op, count in self.counts.items():
            if isinstance(op.work, Gemm) and op.work.what == "dispatch" and not dispatch:
                continue
            if op.phase in phases and isinstance(op.work, Gemm | Attention):
                flops["gemm" if isinstance(op.work, Gemm) else "attention"] += count * op.work.flops * self.ranks
        return flops

    @property
    def wanted(self) -> dict[str, float]:
        """FLOPs of all forward passes over all ranks: the model's, and what schemes say is done more than once; of a
        step, or without a flush of the run that is played.

        Places of experts are filled up to a whole number on every rank. Tensor ranks that all see all tokens do the
        linears twice that they do not divide: routers, down to the latents, from two streams to one, from inputs to a
        branch, and from a branch to the trunk.
        """
        job, mesh = self.plan.job, self.plan.mesh
        model, seq = self.plan.model_parts.model, job.batch.sequence or 0
        joint = self.plan.schedule.microbatches_per_forward
        tokens = self.plan.passes.played_shape.m * joint * job.batch.micro * self.plan.ranks.replicas * seq
        flash = job.framework.attention == "flash"
        parts = forward_matmul_flops(model, tokens, seq, causal=flash)
        if model.moe:
            groups = self.ranks // self._expert_ranks
            each = Fraction(job.batch.micro * self.plan.ranks.replicas * seq, groups * model.moe.experts)
            each *= model.moe.top_k * Fraction(model.moe.capacity or 1)
            parts["experts"] *= ceil(each) / each
        tensor = [scheme for scheme in self.plan.stage_schemes if scheme.family == "tensor" and scheme.axes]
        if any(scheme.layouts(ROUTER) is None for scheme in tensor):
            again = mesh.size("tp") - 1
            latents = model.mla.kv_lora_rank + model.mla.qk_rope + (model.mla.q_lora_rank or 0) if model.mla else 0
            branches = [*zip(model.branches, model.branch_tokens(seq), strict=True)]
            encoders = sum(branch.layers * of / seq for branch, of in branches)
            linear = [(branch.hidden, of) for branch, of in branches if branch.projector == "linear"]
            whole = parts["inputs"] + sum(2 * tokens * of / seq * hidden * model.hidden for hidden, of in linear)
            narrow = 2 * tokens * model.hidden * latents * (model.layers + model.mtp + encoders)
            parts["copies"] = again * (parts["router"] + parts["mtp"] + narrow + whole)
        # Ranks that share a key/value head project it again.
        ranks = min(mesh.size([axis for scheme in tensor for axis in scheme.over]), self.plan.ranks.head_ranks)
        trunk = (model, seq, len(model.every_layer) - sum(branch.layers for branch in model.branches) + model.mtp)
        towers = zip(
            model.branches, model.branch_tokens(seq), (branch.layers for branch in model.branches), strict=True
        )
        for tower, tokens_of, layers in (trunk, *towers) if model.mla is None and model.ssm is None else ():
            again = max(0, ranks - (tower.kv_heads or tower.heads))
            parts["shared heads"] = parts.get("shared heads", 0) + (
                4 * tokens * tokens_of / seq * tower.hidden * (tower.head_dim or 0) * again * layers
            )
        attention, slices = parts.pop("attention"), self.plan.slice_lengths
        if not flash:  # a slice has the scores of all keys up to its end
            attention *= sum(map(mul, slices, accumulate(slices))) / sum(slices) ** 2
        gemm = sum(parts.values())
        return {"gemm": gemm, "attention": attention} if flash else {"gemm": gemm + attention, "attention": 0.0}

    @property
    def _expert_ranks(self) -> int:
        """Ranks that hold one copy of the experts, each rank a part of it."""
        view = self.plan.job.plan.views.get("experts")
        return prod(size for axis, size in view.items() if axis != "edp") if view else self.plan.mesh.size("tp")

    # -------------------------------------------------------------------------------------- memory

    def changes(self, device: int) -> Iterator[tuple[int, float, str]]:
        """Memory taken and given back, in the order in which a device issues its ops: action, bytes, category.

        Op by op and copy by copy, from the tensor uses of the fragments.
        """
        actions, table = self.actions(device), self.program.timetable
        for action in actions:
            flying = self._message(action + 1, False) if action + 1 in actions else 0
            flying += self._message(action - 1, True) if action - 1 in actions else 0
            flying *= self.program.overlap_sends
            yield action, flying, "buffers"
            stage, kind, _, part = table.actions[action]
            stage_ops = self.stage_ops(stage, part)
            yield from ((action, nbytes, category) for nbytes, category in self._whole(stage_ops, action, 1))
            yield from ((action, nbytes, category) for nbytes, category in self._pass(stage_ops, kind, action))
            yield from ((action, nbytes, category) for nbytes, category in self._whole(stage_ops, action, -1))
            yield action, -flying, "buffers"

    def gathers_again(self, stage: int) -> bool:
        """Whether whole weights of a stage are freed after its forward passes and gathered again for its backward
        passes: where the latter are several and follow the former."""
        kinds = [
            action.kind
            for action in self.program.timetable.actions
            if action.stage == stage and action.kind in ("F", "B", "BW")
        ]
        backward = [kind for kind in kinds if kind != "F"]
        return bool(self.stage_ops(stage).again) and kinds[-len(backward) :] == backward and len(backward) > 1

    def weight_moves(self, stage: int) -> tuple[int, int]:
        """How often the sharded weights of a stage are gathered in a step, and its gradients reduced."""
        plan = self.plan
        (data,) = plan.family("data")
        if getattr(data, "across_microbatches", False):
            return 1 + self.gathers_again(stage), 1
        passes = len(plan.schedule.microbatches(plan.passes.played_shape, stage)) * plan.shape.slices
        return 2 * passes, passes

    def _whole(self, stage_ops: StageOps, action: int, sign: int) -> Iterator[tuple[float, str]]:
        """Whole weights and gradients that an action allocates at its begin (sign 1) or frees at its end (-1), of a
        step with a flush."""
        table = self.program.timetable
        stage = table.actions[action].stage
        numbers = [number for number, action_of in enumerate(table.actions) if action_of.stage == stage]
        forward = [number for number in numbers if table.actions[number].kind == "F"]
        backward = [number for number in numbers if table.actions[number].kind == "BW"]
        apart = self.gathers_again(stage)
        weights = {
            1: [forward[0], *backward[: apart or 0]],
            -1: [*forward[-1 if apart else len(forward) :], backward[-1]],
        }
        if action in weights[sign]:
            yield sign * stage_ops.whole_weights, "parameters"
        if action == backward[0 if sign == 1 else -1]:
            yield sign * stage_ops.whole_gradients, "gradients"

    def _message(self, action: int, sent: bool) -> int:
        """Bytes that an action sends to other devices, or receives from them."""
        table, shape, predecessors = self.program.timetable, self.plan.shape, self.plan.schedule.predecessors
        stage, kind, _, part = table.actions[action]
        total = 0
        for taker in range(shape.stages):
            givers = {giver: self.stage_ops(giver, part) for giver in predecessors(shape, taker)}
            whole = sum(given.unit_runs[-1].nbytes for given in givers.values())
            assert not givers or self.stage_ops(taker, part).unit_runs[0].nbytes_in == whole
            for giver, given in givers.items():
                nbytes = given.message_nbytes
                # Back comes as much as was given.
                if stage == (giver if (kind == "F") == sent else taker) and table.stages.elsewhere(giver, taker):
                    total += nbytes
        return total

    def _pass(self, stage_ops: StageOps, kind: str, action: int) -> Iterator[tuple[float, str]]:
        """One pass through a stage without a weight pass of its own."""
        assert kind in ("F", "BW")
        unit_runs = stage_ops.unit_runs if kind == "F" else stage_ops.unit_runs[::-1]
        ends = [
            stage_ops.unit_runs[0].nbytes_in if stage_ops.unit_runs[0].residual_in else 0,
            stage_ops.unit_runs[-1].nbytes if stage_ops.unit_runs[-1].residual_out else 0,
        ]
        comes, goes = ends if kind == "F" else reversed(ends)
        yield comes, "activations" if kind == "F" else "workspace"
        for unit_run, part in zip(unit_runs, self.task(action).parts, strict=True):
            fragment, block = unit_run.fragment, part.block
            by_op = memory_events(fragment.tensor_uses, fragment.forward, fragment.backward, unit_run)
            events = sorted(block_events(block.ops, block.after, by_op), key=lambda event: event[:2])
            for _ in range(unit_run.count):
                yield from ((nbytes, category) for _, _, nbytes, category in events)
        yield -goes, "activations" if kind == "F" else "workspace"

    def category_peak(self, device: int, category: str) -> float:
        """The most bytes of one category at any moment."""
        changes = [nbytes for _, nbytes, kind in self.changes(device) if kind == category]
        return max(accumulate(changes), default=0.0)

    def most_kept(self, device: int, category: str = "activations") -> float:
        """The most bytes of one category between two actions: tensors that wait for backward passes."""
        by_action: dict[int, float] = defaultdict(float)
        for action, nbytes, kind in self.changes(device):
            by_action[action] += nbytes if kind == category else 0.0
        return max(accumulate(by_action.values()))


LIKE: SharedWork | None = SharedWork()
"""The lowered units of all jobs; None: every job is lowered alone."""


def play_job(
    job: SomeFields,
    price: Any = PAID,
    changes: Iterable[str] = (),
    engine: Engine = "simpy",
    orders: Sequence[Sequence[ScheduleItem]] | None = None,
    shared: SharedWork | None = None,
) -> Played:
    """Lowers and plays `job` as `simulate` does, at ideal prices.

    orders: in place of the schedule's. shared: the lowered units of the same job at other prices, or of a like job;
    by default those of `LIKE`.
    """
    shared = shared or LIKE
    if shared is not None:
        shared.forget_excess()
    plan = resolve_plan(load_job(job, changes), shared, price)
    priced = replace(price, launch=hidden_launch_s(plan.job.framework)) if isinstance(price, Ideal) else price
    stages, program = build_program(plan, priced, shared, orders)
    played = play_forecast(plan, stages, program, engine=engine)
    return Played(plan, stages, program, played.step, played.peaks)


def state_orders(played: Played) -> list[list[ScheduleItem]]:
    """The orders of a job as its schedule states them: without the updates inside a run."""
    return [
        [turn for turn in order if isinstance(turn, OverlappedPasses) or turn.kind != "O"]
        for order in played.program.timetable.orders
    ]


def copies_of(param: Param, plan: Plan) -> int:
    """Ranks of a stage that hold the same part of a weight: ranks with other tokens, and tensor ranks that do not shard
    it.
    """
    return plan.mesh.size(param.partial) * equal_copies(param, plan)


def equal_copies(param: Param, plan: Plan) -> int:
    """Ranks that hold the same part of a weight and see the same tokens."""
    tensor = [part for scheme in plan.family("tensor") for part in scheme.over]
    if param.view:
        # The bias behind the sum over the ranks that divide an expert.
        inside = [axis for axis in plan.job.plan.views.get("experts", {}) if axis not in ("edp", "ep")]
        return plan.mesh.size(inside) if param.name.endswith("bexpert.down") else 1
    copies = plan.mesh.size(set(tensor) - set(param.partial))
    return max(1, round(copies * param.size / param.total))


def summed_over(param: Param, plan: Plan) -> tuple[str, ...]:
    """The axes whose ranks hold the same part of a weight and see other tokens: data and sequence axes; for experts all
    axes that do not shard them.
    """
    parts = [part for part in plan.mesh.parts(plan.mesh.named_axes) if plan.mesh.size(part) > 1]
    if param.view:
        (expert,) = plan.family("expert")
        sharded = plan.mesh.parts(expert.axes)
        return tuple(part for part in parts if part not in (*sharded, *plan.mesh.parts(plan.ranks.pipeline_axis)))
    data = plan.mesh.parts(("dp", "cp"))
    return tuple(part for part in parts if part in data)


def sent_between_stages(played: Played) -> dict[tuple[int, str], list[int]]:
    """Bytes of every message, by the virtual stage that sends it and the kind of action whose result it is."""
    messages: dict[tuple[int, str], list[int]] = {}
    for number, _, _ in played.flat.sent:
        op = played.flat.ops[number]
        assert isinstance(op.work, Transfer)
        stage, kind = stage_and_kind(op.name.removeprefix("send "))
        messages.setdefault((stage, kind), []).append(op.work.nbytes)
    return messages


def stage_and_kind(text: str) -> tuple[int, str]:
    """Stage and kind of an action that is printed like ``2BW0``."""
    stage = text[: next(i for i, letter in enumerate(text) if letter.isalpha())]
    return int(stage), "".join(letter for letter in text if letter.isalpha())

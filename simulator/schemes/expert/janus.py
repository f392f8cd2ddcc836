"""Janus: the weights of experts are sent to the tokens instead of tokens to the experts, where that moves fewer bytes.

A rank still owns E/P of the experts. But where many tokens meet small experts, all ranks fetch the weights of all
experts, process their tokens with them, and send the gradients of weights back to the owners, where they are
summed: no token travels, and no rank waits for a more loaded rank. Weights do not depend on the router's choice, so
    they
are fetched during the layer before: those of the rank's machine beside the others, so that kernels begin with them.

    fetch experts   of layer 1   of layer 2   of layer 3
    kernels         layer 0      layer 1      layer 2

With T tokens on a rank, k experts per token, and E/P experts of w matrices h x f on each of the P ranks of n machines,
the bytes of tokens that leave a machine, dispatch and combine, relate to the bytes of weights that enter it, each once,
as

    R = 2 T k / (n (E/P) w f), which is T k / (4 n h E/P) for experts of 8 h^2 weights,

and so do their gradients. Experts move where R > 1. The all-gather crosses each machine's border once per expert; it is
repeated in the backward pass where the framework regathers (1.5 times the bytes), else the gathered weights are kept.
All near weights of a linear arrive before its first expert starts.

References: Liu, Wang, Jiang 2023, doi 10.1145/3603269.3604869: the data-centric paradigm, its ratio R, prefetching.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE, Operator, Stage, Unit
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper, Rule
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import MoESizes

MOVING = "experts move"
"""The mark of a layer whose experts move."""


class Janus(ExpertScheme):
    paper = Paper(
        "doi:10.1145/3603269.3604869",
        "Janus: A Unified Distributed Training Framework for Sparse Mixture-of-Experts Models",
        2023,
    )

    class Options(ExpertScheme.Options):
        when: Literal["auto", "always", "never"] = "auto"
        """Whether experts move: auto where R > 1."""
        machine: int = Field(default=8, ge=1, strict=True)
        """Ranks of a machine, which fetch an expert once."""
        prefetch: bool = True
        """Whether experts are fetched during the layer before theirs; otherwise from the start of their layer on."""
        near_first: bool = True
        """Whether experts of the rank's machine are fetched beside the others, and compute while those come."""

    def marks_of(self, layer: MoE) -> frozenset[Hashable]:
        when = self.options.when
        moves = self.ranks > 1 and (when == "always" or (when == "auto" and self.ratio(layer) > 1))
        return frozenset({MOVING}) if moves else super().marks_of(layer)

    def layouts(self, operator: Operator) -> Rule:
        rule = super().layouts(operator)
        if MOVING not in operator.marks:
            return rule
        parts = self.mesh.parts(self.axes[:1])
        divide = {part: dim for part, dim in rule.divide.items() if part not in parts}
        return Rule(divide, {part: "e" for part in parts if operator.has("e")})

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment, machine = super().lower(module, inner), self.options.machine
        if not isinstance(module, Unit):
            return fragment
        for use in fragment.tensor_uses:
            if use.made and use.category == "parameters" and self._gathers_experts(use.op):
                use.op.stream = NEAR
        if self.options.near_first and machine < self.ranks and self.ranks % machine == 0:
            fragment = fetch_near_first(fragment, machine, self.ranks)
        return issue_fetches_first(fragment)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        return fetch_a_unit_ahead(stage_ops) if self.options.prefetch else stage_ops

    def ratio(self, module: MoE) -> float:
        """Returns R of a layer."""
        routed, machines = MoESizes.of(module), max(1, self.ranks // self.options.machine)
        sent = 2 * routed.copies * routed.hidden / self.mesh.size(self.mesh.views[self.view])
        return sent / (machines * routed.weights * routed.experts / self.ranks)

    def _gathers_experts(self, op: Op) -> bool:
        work, parts = op.work, self.mesh.parts(self.axes[:1])
        gathers = isinstance(work, Collective) and work.operation == "all_gather" and op.stream == self.family
        return gathers and {*work.axes} <= {*parts}  # type: ignore[union-attr]

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        n = max(1, p // self.options.machine)
        ratio = 2 * slots / (n * setting.experts / p * 2 * setting.expert_ffn)
        elements = 2 * setting.expert_parameters if ratio > 1 else 4 * slots * setting.h
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "every rank owns E/P experts")
        yield ClosedForm("sent_per_layer", 2 * elements * (p - 1) / p, "experts or tokens, by the ratio R")


NEAR, FAR = "expert-fetch", "expert-fetch-far"
"""Streams of fetches within a machine, and of all others."""


@dataclass(frozen=True)
class FetchTurn:
    """What a unit of a stage fetches.

    run: number of its run of units.
    unfetched: its weights, in the forward and in the backward pass, which no unit before it has fetched.
    ahead: the run of the unit whose weights it fetches in each pass; None: it fetches none.
    """

    run: int
    unfetched: tuple[bool, bool]
    ahead: tuple[int | None, int | None]


def _is_fetch(op: Op) -> bool:
    return op.stream in (NEAR, FAR)


def issue_fetches_first(fragment: Fragment) -> Fragment:
    """Issues the fetches of a unit at its start, where they wait for nothing else."""
    for issued, begin in ((fragment.forward, fragment.entry), (fragment.backward, fragment.grad_entry)):
        fetches = [op for op in issued if _is_fetch(op)]
        for op in fetches:
            op.after = list(begin.values())
        issued[:] = [*fetches, *(op for op in issued if op not in fetches)]
    return fragment


def fetch_a_unit_ahead(stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which every unit fetches the weights of the unit that follows it in a pass.

    These fetches wait for nothing but the beginning of the unit, so at most the experts of two units are in memory. A
    mark on the stream of fetches, the first thing of a unit there, is reached when those of the unit before have ended;
    the kernels that read the weights wait for it.
    """
    runs = stage_ops.unit_runs
    units = [i for i, run in enumerate(runs) for _ in range(run.count)]
    passes = [(run.fragment.forward, run.fragment.backward) for run in runs]
    fetches = [tuple(any(_is_fetch(op) for op in issued) for issued in both) for both in passes]
    if not any(map(any, fetches)):
        return stage_ops
    turns = []
    for place, run in enumerate(units):
        before = units[place - 1] if place else None
        behind = units[place + 1] if place + 1 < len(units) else None
        unfetched, ahead = [], []
        for way, (earlier, later) in enumerate(((before, behind), (behind, before))):
            unfetched.append(fetches[run][way] and (earlier is None or not _begins(runs[earlier].fragment, way)))
            ahead.append(
                later if later is not None and fetches[later][way] and _begins(runs[run].fragment, way) else None
            )
        turns.append(FetchTurn(run, (unfetched[0], unfetched[1]), (ahead[0], ahead[1])))
    fetching = [_fetching_run(runs, turn, len(list(same))) for turn, same in groupby(turns)]
    return StageOps(fetching, stage_ops.ahead, stage_ops.behind)


def _begins(fragment: Fragment, way: int) -> bool:
    """Returns whether a pass of a unit (0 forward, 1 backward) has an input whose arrival begins it."""
    return bool(fragment.backward and fragment.grad_entry) if way else bool(fragment.entry)


def _fetching_run(runs: Sequence[UnitRun], turn: FetchTurn, count: int) -> UnitRun:
    fetching = runs[turn.run].fragment.copy()
    for forward, unfetched, ahead in zip((True, False), turn.unfetched, turn.ahead, strict=True):
        issued, begin = (fetching.forward, fetching.entry) if forward else (fetching.backward, fetching.grad_entry)
        if issued:
            other = runs[ahead].fragment if ahead is not None else Fragment()
            _fetch_in_pass(fetching, issued, list(begin.values()), unfetched, other, forward)
    return replace(runs[turn.run], fragment=fetching, count=count)


def _fetch_in_pass(
    fetching: Fragment, issued: list[Op], begin: list[Op], unfetched: bool, other: Fragment, forward: bool
) -> None:
    """Moves the fetches of a pass to its beginning, or leaves them to the unit before, and adds those of `other`."""
    mine = [op for op in issued if _is_fetch(op)]
    rest = [op for op in issued if op not in mine]
    front: list[Op] = []
    if unfetched:
        for op in mine:
            op.after = list(begin)
        front += mine
    elif mine:
        marks = {op.stream: Op("experts fetched", op.stream, None, [], op.phase) for op in mine}
        front += marks.values()
        for op in rest:
            op.after = replace_dependencies(op.after, {fetch: [marks[fetch.stream]] for fetch in mine})
        fetching.tensor_uses = [replace(use, op=rest[0]) if use.op in mine else use for use in fetching.tensor_uses]
        readers = {fetch: op for op in reversed(rest) if marks[mine[-1].stream] in op.after for fetch in mine}
        fetching.params = [replace(param, used=readers.get(param.used, param.used)) for param in fetching.params]
    ahead: dict[str, list[Op]] = {}
    for op in (op for op in (other.forward if forward else other.backward) if _is_fetch(op)):
        copy = replace(op, name=f"{op.name} ahead", after=list(begin))
        ahead.setdefault(op.stream, []).append(copy)
        nbytes = sum(use.nbytes for use in other.tensor_uses if use.op is op and use.made)
        fetching.tensor_uses += [
            TensorUse(copy.name, nbytes, user, user is copy, "parameters") for user in (copy, rest[-1])
        ]
    for stream, ops in ahead.items():
        front += [*ops, Op("next experts fetched", stream, None, ops, ops[0].phase)]
    issued[:] = [*front, *rest]


def fetch_near_first(fragment: Fragment, machine: int, ranks: int) -> Fragment:
    """Returns the fragment of a unit whose experts are fetched in two parts at the same time, those of a machine of
    `machine` ranks, and those of the others; and whose kernels compute with the near experts while the far ones come.
    """
    rewrite, near = Rewrite(fragment), dict[Op, Op]()
    for issued in (fragment.forward, fragment.backward):
        fetches = [op for op in issued if _is_fetch(op)]
        for op in fetches:
            assert isinstance(op.work, Collective)
            whole = op.work.nbytes
            inside = replace(op.work, nbytes=whole * machine // ranks, members=tuple(range(machine)))
            outside = replace(op.work, nbytes=whole * (ranks - machine) // (ranks - 1))
            near[op] = replace(op, name=f"{op.name} near", stream=NEAR, work=inside)
            far = replace(op, name=f"{op.name} far", stream=FAR, work=outside)
            rewrite.swap(op, [near[op], far], [near[op], far])
        for phase in dict.fromkeys(op.phase for op in fetches):
            ops = [op for op in issued if op.phase == phase and op.stream == COMPUTE]
            places = [i for i, op in enumerate(ops) if isinstance(op.work, Gemm) and op.work.groups]
            if places:
                _compute_near_first(rewrite, ops[places[0] : places[-1] + 1], (machine, ranks - machine), near)
    return rewrite.apply()


def _compute_near_first(rewrite: Rewrite, kernels: list[Op], sizes: tuple[int, int], near: dict[Op, Op]) -> None:
    """Splits kernels by experts: the first part reads the near ones."""
    for op, parts in zip(kernels, rewrite.chunk(kernels, sizes), strict=True):
        if isinstance(op.work, Gemm):
            ((number, tokens),) = op.work.groups
            for part, size in zip(parts, sizes, strict=True):
                experts = op.work.batch * size // sum(sizes)
                part.work = replace(op.work, batch=experts, groups=((number * size / sum(sizes), tokens),))
        parts[0].after = [near.get(op, op) for op in parts[0].after]

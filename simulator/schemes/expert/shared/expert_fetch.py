"""Weights of experts that are fetched during the unit before theirs, those of the own machine first (Janus).

A unit begins with the fetches of the next one, which wait for nothing but its beginning: so at most the experts of two
units are in memory. They are on streams of their own: one within machines, one between them. A mark on a stream, the
first thing of a unit there, is reached when the fetches of the unit before have ended; the kernels that read the
weights wait for that mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies

NEAR, FAR = "expert-fetch", "expert-fetch-far"
"""Streams of fetches within a machine, and of all others."""


@dataclass(frozen=True)
class FetchTurn:
    """What a unit of a stage fetches.

    run: number of its run of units.
    own: its own weights, in the forward and in the backward pass, which no unit before it has fetched.
    ahead: the run of the unit whose weights it fetches in each pass; None: it fetches none.
    """

    run: int
    own: tuple[bool, bool]
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
    """`stage_ops` in which every unit fetches the weights of the unit that follows it in a pass."""
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
        own, ahead = [], []
        for way, (earlier, later) in enumerate(((before, behind), (behind, before))):
            own.append(fetches[run][way] and (earlier is None or not _begins(runs[earlier].fragment, way)))
            ahead.append(
                later if later is not None and fetches[later][way] and _begins(runs[run].fragment, way) else None
            )
        turns.append(FetchTurn(run, (own[0], own[1]), (ahead[0], ahead[1])))
    made = [_fetching_run(runs, turn, len(list(same))) for turn, same in groupby(turns)]
    return StageOps(made, stage_ops.ahead, stage_ops.behind)


def _begins(fragment: Fragment, way: int) -> bool:
    """Whether a pass of a unit (0 forward, 1 backward) has an input whose arrival begins it."""
    return bool(fragment.backward and fragment.grad_entry) if way else bool(fragment.entry)


def _fetching_run(runs: Sequence[UnitRun], turn: FetchTurn, count: int) -> UnitRun:
    made = runs[turn.run].fragment.copy()
    for forward, own, ahead in zip((True, False), turn.own, turn.ahead, strict=True):
        issued, begin = (made.forward, made.entry) if forward else (made.backward, made.grad_entry)
        if issued:
            other = runs[ahead].fragment if ahead is not None else Fragment()
            _fetch_in_pass(made, issued, list(begin.values()), own, other, forward)
    return replace(runs[turn.run], fragment=made, count=count)


def _fetch_in_pass(
    made: Fragment, issued: list[Op], begin: list[Op], own: bool, other: Fragment, forward: bool
) -> None:
    """Moves the fetches of a pass to its beginning, or leaves them to the unit before, and adds those of `other`."""
    mine = [op for op in issued if _is_fetch(op)]
    rest = [op for op in issued if op not in mine]
    front: list[Op] = []
    if own:
        for op in mine:
            op.after = list(begin)
        front += mine
    elif mine:
        marks = {op.stream: Op("experts fetched", op.stream, None, [], op.phase) for op in mine}
        front += marks.values()
        for op in rest:
            op.after = replace_dependencies(op.after, {one: [marks[one.stream]] for one in mine})
        made.tensor_uses = [replace(use, op=rest[0]) if use.op in mine else use for use in made.tensor_uses]
        readers = {one: op for op in reversed(rest) if marks[mine[-1].stream] in op.after for one in mine}
        made.params = [replace(one, used=readers.get(one.used, one.used)) for one in made.params]
    ahead: dict[str, list[Op]] = {}
    for op in (op for op in (other.forward if forward else other.backward) if _is_fetch(op)):
        copy = replace(op, name=f"{op.name} ahead", after=list(begin))
        ahead.setdefault(op.stream, []).append(copy)
        nbytes = sum(use.nbytes for use in other.tensor_uses if use.op is op and use.made)
        made.tensor_uses += [TensorUse(copy.name, nbytes, one, one is copy, "parameters") for one in (copy, rest[-1])]
    for stream, ops in ahead.items():
        front += [*ops, Op("next experts fetched", stream, None, ops, ops[0].phase)]
    issued[:] = [*front, *rest]


def fetch_near_first(fragment: Fragment, machine: int, ranks: int) -> Fragment:
    """The fragment of a unit whose experts are fetched in two parts at the same time, those of a machine of `machine`
    ranks, and those of the others; and whose kernels compute with the near experts while the far ones come.
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
        parts[0].after = [near.get(one, one) for one in parts[0].after]

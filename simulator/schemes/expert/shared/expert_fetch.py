"""Weights of experts that are fetched during the unit before theirs (Janus).

A unit begins with the fetches of the next one, which wait for nothing but its beginning: so at most the experts of two
units are in memory. They are on a stream of their own. A mark on it, the first thing of a unit there, is reached when
the fetches of the unit before have ended; the kernels that read the weights wait for that mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from simulator.ir.ops import Fragment, Op, StageOps, TensorUse, UnitRun
from simulator.lowering.rewrite import replace_dependencies

STREAM = "expert-fetch"

IsFetch = Callable[[Op], bool]
"""Whether an op fetches weights of experts."""


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


def fetch_a_unit_ahead(stage_ops: StageOps, is_fetch: IsFetch) -> StageOps:
    """`stage_ops` in which every unit fetches the weights of the unit that follows it in a pass."""
    runs = stage_ops.unit_runs
    units = [i for i, run in enumerate(runs) for _ in range(run.count)]
    passes = [(run.fragment.forward, run.fragment.backward) for run in runs]
    fetches = [tuple(any(is_fetch(op) for op in issued) for issued in both) for both in passes]
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
    made = [_fetching_run(runs, turn, len(list(same)), is_fetch) for turn, same in groupby(turns)]
    return StageOps(made, stage_ops.ahead, stage_ops.behind)


def _begins(fragment: Fragment, way: int) -> bool:
    """Whether a pass of a unit (0 forward, 1 backward) has an input whose arrival begins it."""
    return bool(fragment.backward and fragment.grad_entry) if way else bool(fragment.entry)


def _fetching_run(runs: Sequence[UnitRun], turn: FetchTurn, count: int, is_fetch: IsFetch) -> UnitRun:
    made = runs[turn.run].fragment.copy()
    for forward, own, ahead in zip((True, False), turn.own, turn.ahead, strict=True):
        issued, begin = (made.forward, made.entry) if forward else (made.backward, made.grad_entry)
        if issued:
            other = runs[ahead].fragment if ahead is not None else Fragment()
            _fetch_in_pass(made, issued, list(begin.values()), own, other, forward, is_fetch)
    return replace(runs[turn.run], fragment=made, count=count)


def _fetch_in_pass(
    made: Fragment, issued: list[Op], begin: list[Op], own: bool, other: Fragment, forward: bool, is_fetch: IsFetch
) -> None:
    """Moves the fetches of a pass to its beginning, or leaves them to the unit before, and adds those of `other`."""
    mine = [op for op in issued if is_fetch(op)]
    rest = [op for op in issued if op not in mine]
    front: list[Op] = []
    if own:
        for op in mine:
            op.after, op.stream = list(begin), STREAM
        front += mine
    elif mine:
        fetched = Op("experts fetched", STREAM, None, [], mine[0].phase)
        front.append(fetched)
        for op in rest:
            op.after = replace_dependencies(op.after, {one: [fetched] for one in mine})
        made.tensor_uses = [replace(use, op=rest[0]) if use.op in mine else use for use in made.tensor_uses]
        readers = {one: op for op in reversed(rest) if fetched in op.after for one in mine}
        made.params = [replace(one, used=readers.get(one.used, one.used)) for one in made.params]
    ahead = []
    for op in (op for op in (other.forward if forward else other.backward) if is_fetch(op)):
        copy = replace(op, name=f"{op.name} ahead", after=list(begin), stream=STREAM)
        ahead.append(copy)
        nbytes = sum(use.nbytes for use in other.tensor_uses if use.op is op and use.made)
        made.tensor_uses += [TensorUse(copy.name, nbytes, one, one is copy, "parameters") for one in (copy, rest[-1])]
    marks = [Op("next experts fetched", STREAM, None, ahead, ahead[0].phase)] if ahead else []
    issued[:] = [*front, *ahead, *marks, *rest]

"""Several layers as one unit, whose weights are gathered together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from meshcast.simulator.ir.ops import Fragment, StageOps, UnitRun


def group_layers(stage_ops: StageOps, layers: int) -> StageOps:
    """`stage_ops` in which each run has units of `layers` copies, and the remainder in a run of its own."""
    if layers == 1:
        return stage_ops
    unit_runs: list[UnitRun] = []
    for unit_run in stage_ops.unit_runs:
        whole, rest = divmod(unit_run.count, layers)
        unit_runs += [_join_copies(unit_run, n, count) for n, count in ((layers, whole), (rest, 1)) if n and count]
    return replace(stage_ops, unit_runs=unit_runs)


def _join_copies(unit_run: UnitRun, n: int, count: int) -> UnitRun:
    """A run of `count` units, each of `n` copies in one fragment."""
    if n == 1:
        return replace(unit_run, count=count)
    copies = [unit_run.fragment.copy() for _ in range(n)]
    takes, gives = unit_run.residual_in or "", unit_run.residual_out or ""
    for one, other in pairwise(copies):
        other.entry[takes].after.append(one.exit[gives])
        if takes in other.grad_exit:
            one.grad_entry[gives].after.append(other.grad_exit[takes])

    def key(old: str, i: int) -> str:
        """Memory keys of copy i: neighbouring copies share the residual stream between them."""
        back, (come, go) = old.removeprefix("d:"), unit_run.keys
        at = {come: i, go: i + 1}.get(back)
        if at is None:
            return f"{old} of {i}"
        return old if at in (0, n) else f"{old.removesuffix(back)}between {at}"

    fragment = Fragment(
        [op for one in copies for op in one.forward],
        [op for one in reversed(copies) for op in one.backward],
        copies[0].entry,
        copies[-1].exit,
        copies[-1].grad_entry,
        copies[0].grad_exit,
        [param for one in copies for param in one.params],
        [name for one in copies for name in one.shared_weights],
        [
            replace(tensor_use, key=key(tensor_use.key, i))
            for i, one in enumerate(copies)
            for tensor_use in one.tensor_uses
        ],
    )
    found, left = (
        tuple(key(old, i) for i in range(n) for old in keys)
        for keys in (unit_run.allocated_before, unit_run.freed_later)
    )
    return replace(unit_run, fragment=fragment, count=count, layers=n, allocated_before=found, freed_later=left)

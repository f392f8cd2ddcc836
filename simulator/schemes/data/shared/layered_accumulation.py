"""Layered gradient accumulation: a unit runs several micro-batches, one after another, before the next unit does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.ir.ops import Fragment, Op, Param, StageOps, TensorUse, UnitRun


def repeat_units(stage_ops: StageOps, count: int) -> StageOps:
    """A stage whose units each run `count` micro-batches of `stage_ops` in a pass."""
    if count == 1:
        return stage_ops
    return replace(stage_ops, unit_runs=[_repeat(unit_run, count) for unit_run in stage_ops.unit_runs])


def _repeat(unit_run: UnitRun, count: int) -> UnitRun:
    """A run of units whose passes are those of `count` micro-batches; each has buffers of its own.

    A pass begins once the outputs of all its micro-batches are there. That costs no time while kernels of all of them
    run on one stream.
    """
    copies = [unit_run.fragment.copy() for _ in range(count)]
    for number, one in enumerate(copies[1:], 1):
        one.tensor_uses = [_of_copy(use, number, unit_run.keys) for use in one.tensor_uses]
    first = copies[0]
    made = Fragment(
        [op for one in copies for op in one.forward],
        [op for one in copies for op in one.backward],
        _enter([one.entry for one in copies]),
        _leave([one.exit for one in copies]),
        _enter([one.grad_entry for one in copies]),
        _leave([one.grad_exit for one in copies]),
        [_join_param(one) for one in zip(*(one.params for one in copies), strict=True)],
        first.shared_weights,
        [use for one in copies for use in one.tensor_uses],
    )
    taken, given = unit_run.keys
    before = [key for key in (taken, given and f"d:{given}", *unit_run.allocated_before) if key]
    later = [key for key in (given, taken and f"d:{taken}", *unit_run.freed_later) if key]
    others = range(1, count)
    return replace(
        unit_run,
        fragment=made,
        nbytes=unit_run.nbytes * count,
        nbytes_in=unit_run.nbytes_in * count,
        allocated_before=(*unit_run.allocated_before, *(_name(key, n) for n in others for key in before)),
        freed_later=(*unit_run.freed_later, *(_name(key, n) for n in others for key in later)),
    )


def _name(key: str, number: int) -> str:
    """The key of a buffer of a further micro-batch."""
    return f"{key} of micro-batch {number}"


def _of_copy(use: TensorUse, number: int, residual: Sequence[str | None]) -> TensorUse:
    """A use of a buffer of a further micro-batch. residual: keys of the residual stream, which are activations."""
    category = "activations" if use.key in residual else use.category
    return replace(use, key=_name(use.key, number), category=category)


def _enter(every: Sequence[dict[str, Op]]) -> dict[str, Op]:
    """One mark for each input, for which those of all micro-batches wait."""
    found = {}
    for name, first in every[0].items():
        found[name] = replace(first, after=[])
        for marks in every:
            marks[name].after = [found[name]]
    return found


def _leave(every: Sequence[dict[str, Op]]) -> dict[str, Op]:
    """One mark for each output, which waits for those of all micro-batches."""
    return {
        name: Op(first.name, first.stream, None, [ends[name] for ends in every], first.phase)
        for name, first in every[0].items()
    }


def _join_param(copies: Sequence[Param]) -> Param:
    """A parameter that the first micro-batch reads first, and whose gradient all of them complete."""
    last = copies[-1].ready
    ready = Op(last.name, last.stream, None, [one.ready for one in copies], last.phase)
    return replace(copies[0], ready=ready)

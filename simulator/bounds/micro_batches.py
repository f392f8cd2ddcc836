"""Ops of a stage at any micro-batch size, from those at sizes 1 and 2.

Sizes of ops and of buffers are affine in the number of sequences of a micro-batch: what belongs to sequences is
proportional to it, weights and their gradients do not depend on it. So the ops at size b are those at size 1, with
b - 1 times what they grow by from 1 to 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from meshcast.simulator.ir.ops import COMPUTE, Fragment, Op, StageOps, TensorUse, UnitRun, Work


class NotAffine(Exception):
    """The ops at sizes 1 and 2 differ in more than sizes."""


def scale_stage(one: StageOps, two: StageOps, size: int) -> StageOps:
    """The ops of a stage at a micro-batch of `size` sequences. one, two: at sizes 1 and 2.

    Raises NotAffine if these have other ops.
    """
    _check(len(one.unit_runs) == len(two.unit_runs))
    runs = zip(one.unit_runs, two.unit_runs, strict=True)
    return replace(one, unit_runs=[_scale_run(first, second, size - 1) for first, second in runs])


def scale_kernels(one: StageOps, two: StageOps, size: int) -> list[tuple[str, Work, int]]:
    """The kernels of a stage at a micro-batch of `size` sequences: phases, works, and how often each runs.

    Raises NotAffine if the stages at sizes 1 and 2 have other ops.
    """
    _check(len(one.unit_runs) == len(two.unit_runs))
    return [
        (first.phase, _scale(first.work, second.work, size - 1), run.count)
        for run, other in zip(one.unit_runs, two.unit_runs, strict=True)
        for first, second in _pair_ops(run.fragment, other.fragment)
        if first.stream == COMPUTE and first.work is not None
    ]


def _check(holds: bool) -> None:
    if not holds:
        raise NotAffine


def _scale_run(one: UnitRun, two: UnitRun, times: int) -> UnitRun:
    _check((one.name, one.count, one.keys) == (two.name, two.count, two.keys))
    sizes = {key: _scale(getattr(one, key), getattr(two, key), times) for key in ("nbytes", "nbytes_in")}
    return replace(one, fragment=_scale_fragment(one.fragment, two.fragment, times), **sizes)


def _scale_fragment(one: Fragment, two: Fragment, times: int) -> Fragment:
    pairs = dict(_pair_ops(one, two))
    made = one.copy()
    known: dict[tuple[Any, Any], Any] = {}
    for first, own in zip((*one.forward, *one.backward), (*made.forward, *made.backward), strict=True):
        key = first.work, pairs[first].work
        if key not in known:
            known[key] = _scale(*key, times)
        own.work, own.launches = known[key], _scale(first.launches, pairs[first].launches, times)
    _check([use.key for use in one.tensor_uses] == [use.key for use in two.tensor_uses])
    uses = zip(one.tensor_uses, two.tensor_uses, made.tensor_uses, strict=True)
    made.tensor_uses = [
        TensorUse(own.key, _scale(first.nbytes, second.nbytes, times), own.op, own.made, own.category, own.stays)
        for first, second, own in uses
    ]
    return made


def _pair_ops(one: Fragment, two: Fragment) -> Iterable[tuple[Op, Op]]:
    """The ops of two fragments that do the same for other sizes."""
    for first, second in ((one.forward, two.forward), (one.backward, two.backward)):
        _check(len(first) == len(second))
        for a, b in zip(first, second, strict=True):
            _check((a.name, a.stream, a.phase) == (b.name, b.stream, b.phase))
            yield a, b


def _scale(one: Any, two: Any, times: int) -> Any:
    """A value, or the sizes of a work, that is `one` and then `two`, after so many more steps of the same."""
    if one == two:
        return one
    _check(type(one) is type(two))
    if isinstance(one, int | float) and not isinstance(one, bool):
        return one + times * (two - one)
    if isinstance(one, tuple) and len(one) == len(two):
        return tuple(_scale(a, b, times) for a, b in zip(one, two, strict=True))
    _check(is_dataclass(one))
    changed = {
        field.name: _scale(getattr(one, field.name), getattr(two, field.name), times)
        for field in fields(one)
        if field.init and getattr(one, field.name) != getattr(two, field.name)
    }
    return replace(one, **changed)

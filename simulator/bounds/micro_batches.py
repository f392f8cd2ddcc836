"""Units of a plan at any micro-batch size, from those at sizes 1 and 2.

Sizes of ops and of buffers are affine in the number of sequences of a micro-batch: what belongs to sequences is
proportional to it, weights and their gradients do not depend on it. So the ops at size b are those at size 1, with
b - 1 times what they grow by from 1 to 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.bounds.schedule_bound import StageTimes
from meshcast.simulator.bounds.unit_prices import LoweredUnits, UnitLayout, UnitPrices, price_units
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import COMPUTE, Fragment, Op, StageOps, TensorUse, UnitRun, Work


class NotAffine(Exception):
    """The ops at sizes 1 and 2 differ in more than sizes."""


@dataclass(eq=False)
class SizedUnits:
    """The units of plans that differ in the size of their micro-batches alone.

    lower: returns the units with micro-batches of so many sequences; None: the plan breaks a rule.
    scales: whether larger ones are scaled: chunks and tiles of some schemes are not affine in their size.
    shared: work that is shared with other plans.
    """

    lower: Callable[[int], LoweredUnits | None]
    scales: bool
    shared: SharedWork

    @remembered
    def prices(self, size: int) -> UnitPrices | None:
        """Returns the prices of the units; None if the plan breaks a rule."""
        units = self._at_size(size)
        return price_units(units, self.shared) if units is not None else None

    def times(self, size: int, recomputed: bool) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit; None if the plan breaks a rule. recomputed:
        with every kind of layer once more, whose kernels run again."""
        if (prices := self.prices(size)) is None:
            return None
        return prices.times_with_recompute if recomputed else prices.unit_times

    @remembered
    def kernel_seconds(self, size: int, recomputed: bool) -> float:
        """Returns the least seconds of the kernels of all layers in a micro-batch; 0 if they are not known. recomputed:
        with the forward passes once more, but for the longest kernel of each, whose output nobody needs again."""
        first, second = map(self.lower, (1, 2) if self.scales else (size, size))
        total = 0.0
        if first is None or second is None:
            return total
        for kind, number in zip(*np.unique(first.of_layer, return_counts=True), strict=True):
            try:
                kernels = scale_kernels(first.stages[kind], second.stages[kind], size)
            except NotAffine:
                return 0.0
            prices = [(phase, first.price(work)[0], count) for phase, work, count in kernels]
            seconds = sum(count * each for _, each, count in prices)
            if recomputed:
                forward = [(count * each, each) for phase, each, count in prices if phase == "F"]
                seconds += sum(every for every, _ in forward) - max((each for _, each in forward), default=0.0)
            total += number * seconds
        return total

    @remembered
    def layout(self, size: int, recomputed: bool) -> UnitLayout | None:
        """Returns the kinds of units; None if the plan breaks a rule. recomputed: as in `times`."""
        if (units := self.lower(1 if self.scales else size)) is None:
            return None
        return units.layout.with_recomputed() if recomputed else units.layout

    @remembered
    def memory(self, size: int) -> np.ndarray | None:
        """Returns what the forward pass of a unit leaves for its backward pass, at least [kinds] [bytes]; None if the
        plan breaks a rule."""
        if self.scales and size > 2 and self._is_affine:
            first, second = self.memory(1), self.memory(2)
            return first + (size - 1) * (second - first) if first is not None and second is not None else None
        units = self._at_size(size)
        return units.grown(self.shared.blocks) if units is not None else None

    def _at_size(self, size: int) -> LoweredUnits | None:
        if self.scales and size > 2:
            with suppress(NotAffine):
                return self.scale(size)
        return self.lower(size)

    @cached_property
    def _is_affine(self) -> bool:
        with suppress(NotAffine):
            return self.scale(3) is not None
        return False

    def scale(self, size: int) -> LoweredUnits | None:
        """Returns the units from those of 1 and of 2 sequences; None if either of these plans breaks a rule.

        Raises NotAffine if both differ in more than sizes.
        """
        first, second = self.lower(1), self.lower(2)
        if first is None or second is None:
            return None
        pairs = zip(first.stages, second.stages, strict=True)
        return replace(first, stages=tuple(scale_stage(small, large, size) for small, large in pairs))


def scale_stage(small: StageOps, large: StageOps, size: int) -> StageOps:
    """Returns the ops of a stage at a micro-batch of `size` sequences. small, large: at sizes 1 and 2.

    Raises NotAffine if these have other ops.
    """
    _check(len(small.unit_runs) == len(large.unit_runs))
    runs = zip(small.unit_runs, large.unit_runs, strict=True)
    return replace(small, unit_runs=[_scale_run(first, second, size - 1) for first, second in runs])


def scale_kernels(small: StageOps, large: StageOps, size: int) -> list[tuple[str, Work, int]]:
    """Returns the kernels of a stage at a micro-batch of `size` sequences: phases, works, and how often each runs.

    Raises NotAffine if the stages at sizes 1 and 2 have other ops.
    """
    _check(len(small.unit_runs) == len(large.unit_runs))
    return [
        (first.phase, _scale(first.work, second.work, size - 1), run.count)
        for run, other in zip(small.unit_runs, large.unit_runs, strict=True)
        for first, second in _pair_ops(run.fragment, other.fragment)
        if first.stream == COMPUTE and first.work is not None
    ]


def _check(holds: bool) -> None:
    if not holds:
        raise NotAffine


def _scale_run(small: UnitRun, large: UnitRun, times: int) -> UnitRun:
    _check((small.name, small.count, small.keys) == (large.name, large.count, large.keys))
    sizes = {key: _scale(getattr(small, key), getattr(large, key), times) for key in ("nbytes", "nbytes_in")}
    return replace(small, fragment=_scale_fragment(small.fragment, large.fragment, times), **sizes)


def _scale_fragment(small: Fragment, large: Fragment, times: int) -> Fragment:
    pairs = dict(_pair_ops(small, large))
    scaled = small.copy()
    known: dict[tuple[Any, Any], Any] = {}
    for first, op in zip((*small.forward, *small.backward), (*scaled.forward, *scaled.backward), strict=True):
        key = first.work, pairs[first].work
        if key not in known:
            known[key] = _scale(*key, times)
        op.work, op.launches = known[key], _scale(first.launches, pairs[first].launches, times)
    _check([use.key for use in small.tensor_uses] == [use.key for use in large.tensor_uses])
    uses = zip(small.tensor_uses, large.tensor_uses, scaled.tensor_uses, strict=True)
    scaled.tensor_uses = [
        TensorUse(use.key, _scale(first.nbytes, second.nbytes, times), use.op, use.made, use.category, use.stays)
        for first, second, use in uses
    ]
    return scaled


def _pair_ops(small: Fragment, large: Fragment) -> Iterable[tuple[Op, Op]]:
    """Yields the ops of two fragments that do the same for other sizes."""
    for first, second in ((small.forward, large.forward), (small.backward, large.backward)):
        _check(len(first) == len(second))
        for a, b in zip(first, second, strict=True):
            _check((a.name, a.stream, a.phase) == (b.name, b.stream, b.phase))
            yield a, b


def _scale(small: Any, large: Any, times: int) -> Any:
    """Returns a value, or the sizes of a work, that is `small` and then `large`, after so many more steps of the
    same."""
    if small == large:
        return small
    _check(type(small) is type(large))
    if isinstance(small, int | float) and not isinstance(small, bool):
        return small + times * (large - small)
    if isinstance(small, tuple) and len(small) == len(large):
        return tuple(_scale(a, b, times) for a, b in zip(small, large, strict=True))
    _check(is_dataclass(small))
    changed = {
        field.name: _scale(getattr(small, field.name), getattr(large, field.name), times)
        for field in fields(small)
        if field.init and getattr(small, field.name) != getattr(large, field.name)
    }
    return replace(small, **changed)

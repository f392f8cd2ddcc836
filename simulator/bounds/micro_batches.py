"""Units of a plan at any micro-batch size, from those at sizes 1 and 2.

Sizes of ops and of buffers are affine in the number of sequences of a micro-batch: what belongs to sequences is
proportional to it, weights and their gradients do not depend on it. So the ops at size b are those at size 1, with
b - 1 times what they grow by from 1 to 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.bounds.schedule_bound import PASSES, StageTimes
from meshcast.simulator.bounds.unit_prices import (
    LoweredUnits,
    UnitKind,
    UnitLayout,
    UnitPrices,
    add_recomputed,
    price_units,
    rows_of_passes,
)
from meshcast.simulator.engine.maxplus import Coordinates, product
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import COMPUTE, Fragment, Op, StageOps, TensorUse, UnitRun, Work
from meshcast.simulator.program.block import Price
from meshcast.simulator.program.task import Task


class NotAffine(Exception):
    """The ops at sizes 1 and 2 differ in more than sizes."""


@dataclass(eq=False)
class SizedUnits:
    """The units of plans that differ in the size of their micro-batches alone.

    lower: returns the units with micro-batches of so many sequences; None: the plan breaks a rule.
    scales: whether larger ones are scaled: chunks and tiles of some schemes are not affine in their size.
    shared: work that is shared with other plans.
    sizes: for which durations are computed at once.
    """

    lower: Callable[[int], LoweredUnits | None]
    scales: bool
    shared: SharedWork
    sizes: tuple[int, ...] = ()

    @remembered
    def prices(self, size: int) -> UnitPrices | None:
        """Returns the prices of the units; None if the plan breaks a rule."""
        units = self._at_size(size)
        return price_units(units, self.shared) if units is not None else None

    def times(self, size: int, recomputed: bool) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit; None if the plan breaks a rule. recomputed:
        with every kind of layer once more, whose kernels run again."""
        if (times := self._times(size)) is not None:
            return add_recomputed(*times) if recomputed else times[0]
        return None

    @remembered
    def _times(self, size: int) -> tuple[StageTimes, np.ndarray] | None:
        """Returns `times` without recomputation, and the longest kernel of the forward pass of every kind of unit."""
        if self.scales:
            with suppress(NotAffine):
                if (every := self._scaled_times(self._at_once(size))) is not None:
                    return every[size]
        prices = self.prices(size)
        return (prices.unit_times, prices.longest_kernels) if prices is not None else None

    @remembered
    def _scaled_times(self, sizes: tuple[int, ...]) -> dict[int, tuple[StageTimes, np.ndarray]] | None:
        """Returns `_times` by size; None if the plan breaks a rule. Raises NotAffine."""
        first, second, prices = self.lower(1), self.lower(2), self.prices(1)
        if first is None or second is None or prices is None:
            return None
        both = zip(first.stages, second.stages, strict=True)
        pairs = {op: other for stages in both for _, op, other in _pair_runs(*stages)}
        check_affine(all(op.launches == other.launches for op, other in pairs.items()))
        tasks = _ScaledTasks(prices.coordinates, self._works(sizes), pairs)
        columns = [np.stack(column, axis=1) for column in zip(*map(tasks.rows_of, prices.kinds), strict=True)]
        longest = np.stack([tasks.longest_kernel(kind) for kind in prices.kinds], axis=1)
        times = [StageTimes(*(rows[i] for rows in columns), hop=0.0) for i in range(len(sizes))]  # type: ignore[misc]
        return dict(zip(sizes, zip(times, longest, strict=True), strict=True))

    def _at_once(self, size: int) -> tuple[int, ...]:
        return self.sizes if size in self.sizes else (size,)

    @remembered
    def _works(self, sizes: tuple[int, ...]) -> ScaledWorks:
        units = self.lower(1)
        assert units is not None
        return ScaledWorks(units.price, sizes)

    def kernel_seconds(self, size: int, recomputed: bool) -> float:
        """Returns the least seconds of the kernels of all layers in a micro-batch; 0 if they are not known. recomputed:
        with the forward passes once more, but for the longest kernel of each, whose output nobody needs again."""
        sizes = self._at_once(size) if self.scales else (size,)
        return float(self._kernel_seconds(sizes, recomputed)[sizes.index(size)])

    @remembered
    def _kernel_seconds(self, sizes: tuple[int, ...], recomputed: bool) -> np.ndarray:
        """Returns `kernel_seconds` at some sizes [sizes]."""
        first, second = map(self.lower, (1, 2) if self.scales else sizes * 2)
        total = np.zeros(len(sizes))
        if first is None or second is None:
            return total
        works = self._works(sizes) if self.scales else ScaledWorks(first.price, sizes)
        for kind, number in zip(*np.unique(first.of_layer, return_counts=True), strict=True):
            longest, seconds = works.free[0], works.free[0]
            try:
                for run, op, other in _pair_runs(first.stages[kind], second.stages[kind]):
                    if op.stream == COMPUTE and op.work is not None:
                        kernel, _ = works(op.work, other.work)
                        again = recomputed and op.phase == "F"
                        seconds = seconds + run.count * (1 + again) * kernel
                        longest = np.maximum(longest, again * kernel)
            except NotAffine:
                return 0.0 * total
            total += number * (seconds - longest)
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
        first, second = self.lower(1), self.lower(2)
        if first is None or second is None:
            return False
        with suppress(NotAffine):
            for stages in zip(first.stages, second.stages, strict=True):
                _check_sizes(*stages)
            return True
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
    check_affine(len(small.unit_runs) == len(large.unit_runs))
    runs = zip(small.unit_runs, large.unit_runs, strict=True)
    return replace(small, unit_runs=[_scale_run(first, second, size - 1) for first, second in runs])


class ScaledWorks:
    """Prices of works at several sizes of micro-batches, from their sizes at one and two sequences.

    price: of a work.
    """

    def __init__(self, price: Price, sizes: tuple[int, ...]) -> None:
        self._price, self._sizes = price, sizes
        self.free = np.zeros((2, len(sizes)))
        """Seconds and latency of an op without work."""
        self._known: dict[tuple[Work, Work], np.ndarray] = {}

    def __call__(self, small: Work, large: Work | None) -> np.ndarray:
        """Returns seconds and latency [2, sizes] [s]. Raises NotAffine if the works differ in more than sizes."""
        check_affine(large is not None)
        key = small, large
        if key not in self._known:
            prices = [self._price(_scale(small, large, size - 1)) for size in self._sizes]
            self._known[key] = np.array(prices).T[::2]  # type: ignore[index]
        return self._known[key]  # type: ignore[index]


class _ScaledTasks:
    """Passes of units at several sizes of micro-batches, from their tasks at one sequence.

    axes: of their matrices.
    works: prices of their works.
    pairs: the ops at two sequences.
    """

    def __init__(self, axes: Coordinates, works: ScaledWorks, pairs: Mapping[Op, Op]) -> None:
        self._axes, self._works, self._pairs = axes, works, pairs

    def rows_of(self, kind: UnitKind) -> tuple[np.ndarray, ...]:
        """Returns the times of a unit, as `StageTimes` has them [sizes, ...]."""
        wholes, busy = zip(*(self._run(kind.tasks[action]) for action in PASSES), strict=True)
        return rows_of_passes(self._axes, np.stack(wholes, axis=1), np.stack(busy, axis=1))

    def longest_kernel(self, kind: UnitKind) -> np.ndarray:
        """Returns the seconds of the longest kernel of the forward pass of a unit [sizes]."""
        kernels = (op for part in kind.tasks["F"].parts for op in part.block.ops if op.stream == COMPUTE)
        return np.maximum.reduce([self._works.free[0], *(self._price(op)[0] for op in kernels)])

    def _price(self, op: Op) -> np.ndarray:
        """Returns seconds and latency of an op [2, sizes] [s]."""
        return self._works(op.work, self._pairs[op].work) if op.work is not None else self._works.free

    def _run(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """Returns the matrix of a pass [sizes, coordinates, coordinates], and the seconds of its ops on every stream
        [sizes, streams]."""
        sizes = self._works.free.shape[1]
        busy, matrices = np.zeros((sizes, len(self._axes.streams))), list[np.ndarray]()
        for part in task.parts:
            seconds, latency = np.array([self._price(op) for op in part.block.ops]).reshape(-1, 2, sizes).swapaxes(0, 1)
            for op, of_sizes in zip(part.block.ops, seconds, strict=True):
                busy[:, self._axes.at[op.stream]] += part.count * of_sizes
            matrix = self._axes.sweep(part.block, seconds, latency, prices=(sizes,)).out  # type: ignore[arg-type]
            matrices += [np.moveaxis(matrix, -1, 0)] * part.count
        return reduce(lambda before, after: product(after, before), matrices), busy


def _pair_runs(small: StageOps, large: StageOps) -> Iterator[tuple[UnitRun, Op, Op]]:
    """Yields the ops of two stages that do the same for other sizes, with the unit of the first. Raises NotAffine if
    they have other ops."""
    check_affine(len(small.unit_runs) == len(large.unit_runs))
    for run, other in zip(small.unit_runs, large.unit_runs, strict=True):
        yield from ((run, *ops) for ops in _pair_ops(run.fragment, other.fragment))


def _check_sizes(small: StageOps, large: StageOps) -> None:
    """Raises NotAffine where `scale_stage` does."""
    for first, second in {(op.work, other.work): None for _, op, other in _pair_runs(small, large)}:
        _scale(first, second, 1)
    for run, other in zip(small.unit_runs, large.unit_runs, strict=True):
        _check_run(run, other)


def check_affine(holds: bool) -> None:
    """Raises NotAffine unless something holds of the ops at sizes 1 and 2."""
    if not holds:
        raise NotAffine


def _check_run(small: UnitRun, large: UnitRun) -> None:
    check_affine((small.name, small.count, small.keys) == (large.name, large.count, large.keys))
    uses = zip(small.fragment.tensor_uses, large.fragment.tensor_uses, strict=False)
    check_affine(len(small.fragment.tensor_uses) == len(large.fragment.tensor_uses))
    check_affine(all(use.key == other.key for use, other in uses))


def _scale_run(small: UnitRun, large: UnitRun, times: int) -> UnitRun:
    _check_run(small, large)
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
    uses = zip(small.tensor_uses, large.tensor_uses, scaled.tensor_uses, strict=True)
    scaled.tensor_uses = [
        TensorUse(use.key, _scale(first.nbytes, second.nbytes, times), use.op, use.made, use.category, use.stays)
        for first, second, use in uses
    ]
    return scaled


def _pair_ops(small: Fragment, large: Fragment) -> Iterable[tuple[Op, Op]]:
    """Yields the ops of two fragments that do the same for other sizes."""
    for first, second in ((small.forward, large.forward), (small.backward, large.backward)):
        check_affine(len(first) == len(second))
        for a, b in zip(first, second, strict=True):
            check_affine((a.name, a.stream, a.phase) == (b.name, b.stream, b.phase))
            yield a, b


def _scale(small: Any, large: Any, times: int) -> Any:
    """Returns a value, or the sizes of a work, that is `small` and then `large`, after so many more steps of the
    same."""
    if small == large:
        return small
    check_affine(type(small) is type(large))
    if isinstance(small, int | float) and not isinstance(small, bool):
        return small + times * (large - small)
    if isinstance(small, tuple) and len(small) == len(large):
        return tuple(_scale(a, b, times) for a, b in zip(small, large, strict=True))
    check_affine(is_dataclass(small))
    changed = {
        field.name: _scale(getattr(small, field.name), getattr(large, field.name), times)
        for field in fields(small)
        if field.init and getattr(small, field.name) != getattr(large, field.name)
    }
    return replace(small, **changed)

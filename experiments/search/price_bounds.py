"""Prices of the units of a group: how long its kernels and its passes take, and what they leave behind, at least."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from meshcast.experiments.search.keys.data_schemes import may_shard_gradients
from meshcast.experiments.search.space import LayerGroup, Pipeline, Space
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.bounds.micro_batches import NotAffine
from meshcast.simulator.bounds.schedule_bound import StageTimes
from meshcast.simulator.bounds.unit_prices import LoweredUnits, UnitLayout, UnitPrices, lower_units, price_units
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.plan.plan import Plan

Made = TypeVar("Made")


class PriceBounds:
    """Makes the prices of groups."""

    def __init__(self, space: Space, shared: SharedWork) -> None:
        self.space, self.shared = space, shared

    def make_for_plan(self, job: dict[str, Any], total: int, make: Callable[[Plan], Made]) -> Made | None:
        """Makes something of the plan of a job with another global batch; None if the plan breaks a rule."""
        job["batch"] = {**job.get("batch", {}), "global": total}
        try:
            return make(resolve_plan(load_job(job, base=self.space.base), self.shared))
        except MeshcastError:
            return None

    # ------------------------------------------------------------------------------------------- units

    def _units(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group: lowered for the smallest micro-batches, scaled for others.

        fused: gradients are added by no kernels of their own, and not by GEMMs either.
        """
        if group.recompute == "full":
            kept, recomputed = self._units(group._replace(recompute="none"), fused), self._scale(group, fused)
            return kept.join_recomputed(recomputed) if kept is not None and recomputed is not None else None
        return self._scale(group, fused)

    def _scale(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group, all layers recomputed alike, for its micro-batches."""
        if group.micro > 2 and not group.names_schemes:  # chunks and tiles of some schemes are not affine
            first, second = self._lower_smallest(group, fused)
            with suppress(NotAffine):
                return first.at_size(second, group.micro) if first is not None and second is not None else None
        return self._lower(group, fused)

    def _lower_smallest(self, group: LayerGroup, fused: bool) -> list[LoweredUnits | None]:
        """Returns the units of a group with micro-batches of one sequence and of two."""
        return [self._lower(group._replace(micro=micro), fused) for micro in (1, 2)]

    @remembered
    def _lower(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group as the lowering makes them; None if the group breaks a rule."""
        job = self.space.job_of(group, Pipeline(1, "1f1b", 1, "even"), self.space.any_step)
        job = apply_changes(job, {"batch.micro": group.micro})
        if fused:
            job = apply_changes(job, {"framework.set.fused_gradients": True})
        total = group.micro * self.space.loaded.cluster.gpus // (group.tp * group.cp)
        units = self.make_for_plan(job, total, lambda plan: lower_units(plan, self.shared))
        return units.of_new_gradients if fused and units is not None else units

    @cached_property
    def _shards_gradients(self) -> bool:
        """Whether a data scheme of the space may reduce gradients in every micro-batch: no kernels then add them."""
        return any(map(may_shard_gradients, self.space.values["data"]))

    @cached_property
    def _fuses_gradients(self) -> bool:
        return self._shards_gradients and not self.space.loaded.framework.fused_gradients

    # ------------------------------------------------------------------------------------------ passes

    def prices(self, group: LayerGroup, sharded: bool = False, offloaded: bool = False) -> UnitPrices | None:
        """Returns the prices of the units of a group; None if the group breaks a rule.

        All layers are on one stage, and weights are whole: that only leaves out waiting. sharded: for gradients that
        are reduced in every micro-batch, and so not accumulated by kernels of their own. offloaded: with the copies of
        activations that the group offloads.
        """
        fused = sharded and not self.space.loaded.framework.fused_gradients
        return self._price(group._replace(offload=("activations",) if offloaded else ()), fused)

    @remembered
    def _price(self, group: LayerGroup, fused: bool) -> UnitPrices | None:
        units = self._units(group, fused)
        return price_units(units, self.shared) if units is not None else None

    def pass_prices(self, group: LayerGroup) -> UnitPrices | None:
        """Returns the prices of the units of a group for any data scheme of the space; None if it breaks a rule."""
        return self.prices(group, self._shards_gradients)

    def times_without_recompute(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit, of what is recomputed those of the kernels
        of whole layers alone."""
        prices = self.pass_prices(group._replace(recompute="none"))
        return _unit_times(group, prices) if prices is not None else None

    def copy_seconds(self, group: LayerGroup) -> float:
        """Returns the time of the copies of the activations of a layer to the host, or back [s]."""
        if "activations" not in group.offload:
            return 0.0
        prices = self.prices(group, offloaded=True)
        return max(prices.stream_seconds(OUT, "F"), prices.stream_seconds(IN, "BW")) if prices else 0.0

    # ----------------------------------------------------------------------------------------- kernels

    def kernel_group(self, group: LayerGroup) -> LayerGroup:
        """Returns the group whose kernels take no longer: GEMMs are whole, norms are sharded, nothing is recomputed."""
        plain = group._replace(recompute="none", offload=(), overlap_tp=group.overlap_tp and group.tp == 1)
        # A host that waits for routers launches more collectives with sequence parallelism.
        sharded = group.tp > 1 and self.space.loaded.model.moe is None and group.tp_scheme is None
        divides = (self.space.loaded.batch.sequence or 0) % (group.tp * group.cp) == 0
        return plain._replace(sequence_parallel=True) if sharded and divides else plain

    def bound_kernels(self, group: LayerGroup) -> float:
        """Returns a lower bound of the step time of all points of a group from its kernels: spread over all GPUs,
        without waiting [s]."""
        job, again = self.space.loaded, group.recompute == "full" and self.space.values["recomputed"] == (None,)
        assert job.batch.total is not None
        micro_batches = group.tp * group.cp / job.cluster.gpus * job.batch.total / group.micro
        return micro_batches * self._sum_kernels(self.kernel_group(group), again) + job.framework.step_overhead_s

    @remembered
    def _sum_kernels(self, group: LayerGroup, again: bool) -> float:
        """Returns the seconds of the kernels of all layers of a group in one micro-batch; 0 if they are not known."""
        if group.names_schemes:
            units = self._lower(group, self._fuses_gradients)
            return units.kernel_seconds(units, 1, again) if units is not None else 0.0
        first, second = self._lower_smallest(group, self._fuses_gradients)
        with suppress(NotAffine):
            return first.kernel_seconds(second, group.micro, again) if first and second else 0.0
        return 0.0

    def kernel_times(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit, without communication; None if there are
        none."""
        prices = self._price_kernels(self.kernel_group(group))
        return _unit_times(group, prices) if prices is not None else None

    @remembered
    def _price_kernels(self, group: LayerGroup) -> UnitPrices | None:
        """Returns the prices of the kernels of a group, without communication."""
        units = self._units(group, self._fuses_gradients)
        return price_units(units.of_kernels, self.shared) if units is not None else None

    def unit_layout(self, group: LayerGroup) -> UnitLayout | None:
        """Returns the kinds of units of a group; None if there are none."""
        return self._layout(self.kernel_group(group), group.recompute == "full")

    @remembered
    def _layout(self, group: LayerGroup, recomputes: bool) -> UnitLayout | None:
        if recomputes:
            layout = self._layout(group, False)
            return layout.with_recomputed() if layout is not None else None
        units = self._lower(group if group.names_schemes else group._replace(micro=1), self._fuses_gradients)
        return units.layout if units is not None else None

    # ------------------------------------------------------------------------------------------ memory

    def unit_memory(self, group: LayerGroup) -> np.ndarray | None:
        """Returns what the forward pass of a unit leaves for its backward pass, at least [kinds] [bytes]; None if the
        group breaks a rule."""
        return self._memory(group._replace(offload=("activations",) if "activations" in group.offload else ()))

    @remembered
    def _memory(self, group: LayerGroup) -> np.ndarray | None:
        if group.micro > 2 and not group.names_schemes:
            first, second = (self.unit_memory(group._replace(micro=micro)) for micro in (1, 2))
            if first is None or second is None:
                return None
            if self._is_affine(group):
                return first + (group.micro - 1) * (second - first)
        units = self._units(group._replace(offload=()), self._fuses_gradients)
        return units.grown(self.shared.blocks) * (not group.offload) if units is not None else None

    @remembered_by(lambda bounds, group: group._replace(micro=1, offload=()))
    def _is_affine(self, group: LayerGroup) -> bool:
        """Returns whether the units of a group at one and at two sequences differ in sizes alone."""
        first, second = (
            self._units(group._replace(micro=micro, offload=()), self._fuses_gradients) for micro in (1, 2)
        )
        try:
            return first is not None and second is not None and bool(first.at_size(second, 3))
        except NotAffine:
            return False


def _unit_times(group: LayerGroup, prices: UnitPrices) -> StageTimes:
    return prices.times_with_recompute if group.recompute == "full" else prices.unit_times

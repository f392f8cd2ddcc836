"""Least durations and memory of the units of a model on the ranks of a stage, as sums from layer to layer.

The embedding, every layer and the output layer are lowered alone, at the degrees of a stage and the rates of its kind
of nodes (`simulator.bounds.unit_prices`). Passes of a stage last at least the sum of their units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.search.heterogeneous.open_fields import HeterogeneousFields
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.bounds.collectives import LARGE
from meshcast.simulator.bounds.schedule_bound import FORWARD, INPUTS, WEIGHTS, WHOLE
from meshcast.simulator.bounds.unit_prices import LoweredUnits, lower_units, price_units
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.resident_memory import DeviceParams, state_bytes, whole_bucket_bytes
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import BYTES, Collective
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan


class RunOption(NamedTuple):
    """The degrees of a stage.

    kind: number of its kind of nodes; the number of kinds: several of them.
    """

    kind: int
    tp: int
    dp: int
    ep: int
    recompute: str

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


class UnitKey(NamedTuple):
    """What the passes of units depend on.

    samples: sequences of a micro-batch on a rank.
    """

    kind: int
    tp: int
    ep: int
    recompute: str
    samples: int


@dataclass(frozen=True, eq=False)
class UnitSums:
    """Of a model's units with some degrees, in the order of the model: embedding, layers, output layer.

    Everything is the sum over the units before a place: [..., units + 1] [s], or bytes on a rank.

    forward, whole, halves, inputs: passes on every stream [streams, units + 1]: forward, whole backward, both halves of
        a split backward pass, its first half.
    path, gradient, gradient_of_inputs: from the input of a pass to its result: forward, whole backward, first half.
    early, late, late_inputs: how much of a stage's passes may run before the input is there, and after the result of
        a whole backward pass, or of its first half [s].
    grown: what a forward pass leaves for the backward pass.
    weights, optimizer: states that data-parallel ranks hold whole, and those that ZeRO-1 shards; where embedding and
        output layer share a matrix, that of the output layer is `tied_weights` and `tied_optimizer`.
    gradients: those of them that replicas sum; a matrix that embedding and output layer share is the embedding's.
    """

    forward: np.ndarray
    whole: np.ndarray
    halves: np.ndarray
    inputs: np.ndarray
    path: np.ndarray
    gradient: np.ndarray
    gradient_of_inputs: np.ndarray
    early: float
    late: float
    late_inputs: float
    grown: np.ndarray
    weights: np.ndarray
    optimizer: np.ndarray
    tied_weights: float
    tied_optimizer: float
    gradients: np.ndarray


class StageUnits:
    """Makes the sums of units, once for equal degrees."""

    def __init__(self, fields: HeterogeneousFields, shared: SharedWork) -> None:
        self.fields, self.shared = fields, shared
        self.clusters: list[Cluster] = [kind.cluster for kind in fields.kinds]
        if len(self.clusters) > 1:
            self.clusters.append(fields.loaded.cluster)

    def find(self, option: RunOption, samples: int) -> UnitSums | None:
        """Returns the units of a stage with a micro-batch of some sequences on a rank; None if they break a rule."""
        return self._make(UnitKey(option.kind, option.tp, option.ep, option.recompute, samples))

    @remembered
    def _make(self, key: UnitKey) -> UnitSums | None:
        try:
            priced = [self._price(key, rows) for rows in self._possible_rows(key.tp)]
        except MeshcastError:
            return None
        columns = {name: np.min([columns_of_rows[name] for columns_of_rows in priced], axis=0) for name in priced[0]}
        for name in ("early", "late", "late_inputs"):
            columns[name] = max(columns_of_rows[name] for columns_of_rows in priced)
        both = columns["forward"] + columns["whole"]
        longer = (both > both[:1]).any(axis=1)
        longer[0] = True  # streams that are shorter than the compute stream in every unit never count
        for name in ("forward", "whole", "halves", "inputs"):
            columns[name] = columns[name][longer]
        summed: dict[str, Any] = {
            name: column if np.ndim(column) == 0 else np.insert(np.cumsum(column, axis=-1), 0, 0.0, axis=-1)
            for name, column in columns.items()
        }
        return UnitSums(**summed)

    def _possible_rows(self, tp: int) -> list[int]:
        """Returns rows that the embedding may have in a plan with a stage of this degree."""
        model, framework = self.fields.loaded.model, self.fields.loaded.framework
        products = {tp}
        for other in self.fields.values.tp:
            products |= {math.lcm(product, other) for product in products}
        rows = {
            model.vocab if model.vocab % n == 0 else model.padded_vocab(framework.vocab_multiple * n) for n in products
        }
        return sorted(rows)

    def plan(self, key: UnitKey, zero: int = 1) -> Plan:
        """Returns a plan of equal stages with these degrees. Raises MeshcastError for a broken rule."""
        cluster = self.clusters[key.kind]
        ranks = math.lcm(key.tp, key.ep)
        gpus = max(1, cluster.gpus // ranks) * ranks
        changes: dict[str, Any] = {f"plan.{name}": getattr(key, name) for name in ("tp", "ep", "recompute")}
        changes |= {"plan.zero": zero, "batch.micro": key.samples, "plan.dp": gpus // key.tp}
        changes |= {"batch.global": key.samples * gpus // key.tp}
        job = load_job(apply_changes(self.fields.job, changes), base=self.fields.base)
        if gpus != cluster.gpus:
            nodes = -(-gpus // cluster.gpus_per_node)
            cluster = cluster.model_copy(update={"nodes": nodes, "used": gpus})
        return resolve_plan(job.model_copy(update={"cluster": cluster}), self.shared)

    def _price(self, key: UnitKey, rows: int) -> dict[str, Any]:
        """Returns the columns of `UnitSums`, unit by unit."""
        plan = replace(self.plan(key), vocab_rows=rows)
        units = lower_units(plan, self.shared)
        times = price_units(units, self.shared).unit_times
        order = np.array([0, *units.of_layer, len(units.stages) - 1])
        seconds, path = times.stream.transpose(1, 2, 0)[..., order], times.path.T[..., order]
        compute = times.stream[:, :, 0]
        states = self._count_states(units, replace(self.plan(key, 0), vocab_rows=rows))
        weights, optimizer, gradients = states[:-1].T
        tied_weights, tied_optimizer, tied_gradients = states[-1].tolist()
        gradients[-1] -= tied_gradients
        return {
            "forward": seconds[FORWARD],
            "whole": seconds[WHOLE],
            "halves": seconds[INPUTS] + seconds[WEIGHTS],
            "inputs": seconds[INPUTS],
            "path": path[FORWARD],
            "gradient": path[WHOLE],
            "gradient_of_inputs": path[INPUTS],
            "early": max(0.0, float((compute[:, FORWARD] - times.from_input[:, FORWARD, 0]).max())),
            "late": max(0.0, float((compute[:, WHOLE] - times.to_result[:, WHOLE, 0]).max())),
            "late_inputs": max(0.0, float((compute[:, INPUTS] - times.to_result[:, INPUTS, 0]).max())),
            "grown": units.grown(self.shared.blocks)[order],
            "weights": weights[order],
            "optimizer": optimizer[order],
            "tied_weights": tied_weights,
            "tied_optimizer": tied_optimizer,
            "gradients": gradients[order],
        }

    def _count_states(self, units: LoweredUnits, plan: Plan) -> np.ndarray:
        """Returns the bytes of states on a rank without data parallelism: weights with gradients, the optimizer's, and
        what replicas sum of the gradients; of every kind of unit, and last of a matrix of the output layer that is the
        embedding's [kinds + 1, 3]."""
        nbytes, width = [], BYTES[plan.job.framework.gradients]
        every = [[*stage.params()] for stage in units.stages]
        tied = [param for param in every[-1] if param[0].tied]
        for params in (*every, tied):
            held = DeviceParams(params)
            states = state_bytes(plan, held)
            # Ranks of this plan may keep buckets beside their gradients where a stage on a single rank keeps none.
            whole = states["parameters"] + states["gradients"] - whole_bucket_bytes(plan, held)
            summed = width * sum(size for param, size in held.groups if param.trained)
            nbytes.append((whole, states["optimizer"], summed))
        return np.array(nbytes, float)

    def replica_sum_rate(self, kind: int, border: int) -> float:
        """Returns the least seconds a byte of an all-reduce between ranks of two replicas, as a device on a kind of
        nodes takes it.

        border: the first rank of the second replica. Those beside it are nearest to each other, or those at the same
        place of neighbouring nodes.
        """
        cluster = self.clusters[kind]
        try:
            plan = self.plan(UnitKey(kind, 1, 1, "none", 1))
        except MeshcastError:  # the job has no stage of a single rank, and so no prices
            return 0.0
        price = self.shared.device_costs(plan)[0].estimate
        pairs = [(border - 1, border), (border - cluster.gpus_per_node, border)]
        works = [Collective("all_reduce", LARGE, ("dp",), (0, 1), ranks=pair) for pair in pairs if pair[0] >= 0]
        return min(price(work)[0] for work in works) / LARGE


def stack_sums(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks sums of several options [streams, options, units + 1]: streams that an option lacks take no time."""
    streams = max(len(unit_sums) for unit_sums in sums)
    stacked = np.zeros((streams, len(sums), sums[0].shape[-1]))
    for number, unit_sums in enumerate(sums):
        stacked[: len(unit_sums), number] = unit_sums
    return stacked

"""Metis: groups of GPUs for stages, on GPUs of several kinds, with layers balanced by speed and memory.

For every order of the kinds, number of stages, groups of powers of two and number of micro-batches, stages start as
replicas without tensor parallelism. While layers do not fit, the stage with least memory left doubles its tensor
parallelism. A plan costs the sum of its stages, (m - 1) x the slowest, messages, and the largest sum of gradients with
its update (Um et al. 2024, USENIX ATC, and the released code SamsungLabs/Metis). Layers are balanced exactly here,
where the code shares them out by a heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, permutations

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.ordered_stages import Partition, partition_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.kind_stages import KindStages, StageChoice, bound_stages, propose_cheapest
from meshcast.experiments.planning.pricing.mixed import MixedProblem, require_kinds
from meshcast.experiments.planning.problem import Changes, Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper

Strategies = tuple[tuple[int, int], ...]
"""Data and tensor parallelism of every stage."""


class Metis(Planner):
    paper = Paper(
        "https://www.usenix.org/conference/atc24/presentation/um",
        "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs",
        2024,
    )
    restrictions = (
        "mix kinds of GPUs in a stage",
        "use groups that are no powers of two",
        "recompute",
        "balance more plans than the budget has steps, or seconds of CPU time",
    )

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        mixed = require_kinds(problem)
        best: tuple[float, Changes] | None = None
        visited, whole = 0, True
        for stages, groups in self._space(mixed):
            for choices, partition in self._balance(stages, groups):
                visited += 1
                value = stages.step_seconds(choices, partition.layers)
                if best is None or value < best[0]:
                    best = value, stages.write(choices, partition.layers)
            if visited >= budget.steps or is_over():
                whole = False
                break
        return propose_cheapest(self, problem, best, visited, whole)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds the space where the enumeration was cut: by the best stages of every order of the kinds and number of
        micro-batches, with any tensor parallelism, at no cost of messages and exchanges."""
        if proposal.proof is not None:
            return super().bound_space(problem, proposal, budget)
        mixed = require_kinds(problem)
        counts = list_divisors(mixed.sequences)
        bounds = [
            bound_stages(KindStages(variant, order), proposal.value)
            for variant in map(mixed.with_microbatches, counts)
            for order in permutations(variant.kinds)
        ]
        return SpaceOptimum(min([proposal.value, *bounds]), "dynamic programming without messages")

    def _space(self, mixed: MixedProblem) -> Iterator[tuple[KindStages, Sequence[int]]]:
        """Yields groups on the GPUs in an order of their kinds, in a number of micro-batches; few stages first."""
        ordered = [
            KindStages(variant, order)
            for variant in map(mixed.with_microbatches, list_divisors(mixed.sequences))
            for order in permutations(variant.kinds)
        ]
        for number in range(1, min(mixed.gpus, mixed.layers) + 1):
            sizes = device_groups(mixed.gpus, number)
            yield from ((stages, groups) for stages in ordered for groups in sizes)

    def _balance(self, stages: KindStages, groups: Sequence[int]) -> Iterator[tuple[list[StageChoice], Partition]]:
        """Yields strategies of the groups whose layers fit, with these layers."""
        strategies: Strategies | None = tuple((size, 1) for size in groups)
        while strategies is not None:
            left = [1.0 / data for data, _ in strategies]
            try:
                choices = stages.choose(strategies)
            except PlanError:  # degrees, or groups of several kinds, that are not allowed
                choices = []
            if choices:
                fitting = [stages.fitting_seconds(choice, len(groups) - 1 - i) for i, choice in enumerate(choices)]
                partition = partition_stages(fitting)
                if partition is not None:
                    yield choices, partition
                    return
                anyhow = partition_stages([choice.seconds for choice in choices])
                if anyhow is not None:
                    left = stages.memory_left(choices, anyhow.layers)
            strategies = _double_tensor(strategies, left)


def _double_tensor(strategies: Strategies, left: Sequence[float]) -> Strategies | None:
    """Returns the strategies with twice the tensor parallelism where least is left; None if no stage can."""
    for stage in np.argsort(left, kind="stable").tolist():
        data, tensor = strategies[stage]
        if data > 1:
            doubled = (data // 2, tensor * 2)
            return (*strategies[:stage], doubled, *strategies[stage + 1 :])
    return None


def device_groups(devices: int, stages: int, variance: float = 0.5, longest: int = 4) -> list[tuple[int, ...]]:
    """Returns the sizes of the groups of as many stages, in all orders that count.

    Groups are powers of two and add up to all devices; a group has at least a share of the mean size. For every
    multiset of sizes all orders count, but where these are many, equal smallest groups stay together.

    variance: least share of the mean size that a group has. longest: groups whose orders all count.
    """
    least = max(devices // stages, stages // devices) * variance
    sizes = [2**power for power in range(devices.bit_length()) if 2**power >= least]
    multisets = _multisets(devices, stages, sizes)
    return sorted(
        {tuple(chain(*order)) for chosen in multisets for order in permutations(_merge_smallest(chosen, longest))}
    )


def _multisets(devices: int, stages: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields ascending sizes that add up to all devices."""
    if not stages:
        if not devices:
            yield ()
        return
    for place, size in enumerate(sizes):
        if size * stages > devices:
            break
        if sizes[-1] * stages >= devices:
            for others in _multisets(devices - size, stages - 1, sizes[place:]):
                yield size, *others


def _merge_smallest(sizes: tuple[int, ...], longest: int) -> list[tuple[int, ...]]:
    """Returns groups of which pairs of the smallest are joined, until no more are left than may be ordered."""
    groups: list[tuple[int, ...]] = [(size,) for size in sizes]
    while len(groups) > longest:
        smallest = min(map(sum, groups))
        equal = [group for group in groups if sum(group) == smallest]
        if len(equal) < 2:
            break
        pairs = len(equal) // 2
        joined = [equal[2 * place] + equal[2 * place + 1] for place in range(pairs)]
        groups = sorted([*joined, *equal[2 * pairs :], *(group for group in groups if sum(group) > smallest)], key=sum)
    return groups

"""Pipelines as runs of stages with equal degrees, many at once: how a cluster and the layers of a model divide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from math import comb
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.search.heterogeneous.open_fields import MAX_SEQUENCES_OF_A_RANK, HeterogeneousFields
from meshcast.experiments.search.heterogeneous.stage_units import RunOption

ROWS = 400_000
"""Pipelines that are bounded at once, about."""


class Runs(NamedTuple):
    """Pipelines of as many runs of stages.

    option: number of the degrees of its stages.
    stages: number of stages.
    layers: of all of them [pipelines, runs].
    """

    option: np.ndarray
    stages: np.ndarray
    layers: np.ndarray

    def take(self, rows: Any) -> Runs:
        return Runs(self.option[rows], self.stages[rows], self.layers[rows])


def list_options(fields: HeterogeneousFields, micro: int) -> list[RunOption]:
    """Returns the degrees of a stage with micro-batches of `micro` sequences."""
    v, options = fields.values, []
    for number, kind in enumerate(fields.kinds):
        for tp in v.tp:
            if kind.domain % tp:
                continue
            for dp in range(1, min(kind.gpus // tp, micro) + 1):
                if micro % dp or micro // dp > MAX_SEQUENCES_OF_A_RANK or (v.dp is not None and dp not in v.dp):
                    continue
                degrees = [ep for ep in v.ep if tp * dp % ep == 0]
                options += [RunOption(number, tp, dp, ep, recompute) for ep in degrees for recompute in v.recompute]
    return options


def kinds_of_runs(kinds: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yields the kinds of nodes of the runs of a pipeline through all of them, in order. most: of runs."""
    for number in range(kinds, most + 1):
        for kinds_in_order in combinations_with_replacement(range(kinds), number):
            if len({*kinds_in_order}) == kinds:
                yield kinds_in_order


def place_runs(
    options: Sequence[RunOption], fields: HeterogeneousFields, kinds: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Returns the options and numbers of stages of runs that take all GPUs of their kinds of nodes, in order [rows,
    runs] each.

    A tensor-parallel group lies in a single scale-up domain: ranks of a stage begin at a multiple of its degree.
    """
    most, placed = fields.loaded.model.layers, [np.zeros((1, 0), int)] * 2
    for number, kind in enumerate(fields.kinds):
        count = list(kinds).count(number)
        numbered = [(i, option) for i, option in enumerate(options) if option.kind == number]
        parts = _fill(numbered, kind.gpus, count, most)
        left, right = len(placed[0]), len(parts[0])
        placed = [
            np.hstack([np.repeat(before, right, axis=0), np.tile(after, (left, 1))])
            for before, after in zip(placed, parts, strict=True)
        ]
        keep = placed[1].sum(axis=1) <= most
        placed = [column[keep] for column in placed]
    if fields.values.pp is not None:
        keep = np.isin(placed[1].sum(axis=1), fields.values.pp)
        placed = [column[keep] for column in placed]
    return tuple(placed)


def _list_runs(options: Sequence[tuple[int, RunOption]], gpus: int, most: int) -> dict[int, np.ndarray]:
    """Returns the options and numbers of stages of runs of at most `gpus` GPUs by their GPUs [rows, 2]."""
    by_gpus: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, option in options:
        for stages in range(1, min(most, gpus // option.gpus) + 1):
            by_gpus[stages * option.gpus].append((number, stages))
    return {count: np.array(pairs) for count, pairs in by_gpus.items()}


def _fill(options: Sequence[tuple[int, RunOption]], gpus: int, count: int, most: int) -> list[np.ndarray]:
    """Returns the options and numbers of stages of `count` runs that take `gpus` GPUs together [rows, runs]."""
    by_gpus = _list_runs(options, gpus, most)
    tensor = np.zeros(1 + max((number for number, _ in options), default=0), int)
    for number, option in options:
        tensor[number] = option.tp
    # By the GPUs that the runs so far take: their options and stages.
    so_far = {0: [np.zeros((1, 0), int)] * 2}
    for left in range(count - 1, -1, -1):
        grown: dict[int, list[list[np.ndarray]]] = defaultdict(list)
        for taken, (before, lengths) in so_far.items():
            for more, pairs in by_gpus.items():
                if taken + more > gpus or (left == 0) != (taken + more == gpus):
                    continue
                possible = pairs[taken % tensor[pairs[:, 0]] == 0]
                rows, new = np.repeat(np.arange(len(before)), len(possible)), np.tile(possible, (len(before), 1))
                parts = np.column_stack([before[rows], new[:, 0]]), np.column_stack([lengths[rows], new[:, 1]])
                grown[taken + more].append([*parts])
        so_far = {
            total: [np.concatenate(parts) for parts in zip(*every, strict=True)] for total, every in grown.items()
        }
    return so_far.get(gpus, [np.zeros((0, count), int)] * 2)


def count_layers(option: np.ndarray, stages: np.ndarray, layers: int) -> np.ndarray:
    """Returns the number of ways to divide the layers among the runs of every row [rows]."""
    runs = option.shape[1]
    free = layers - stages.sum(axis=1)
    table = np.array([comb(n + runs - 1, runs - 1) for n in range(layers + 1)])
    ways = table[free]
    for row in np.flatnonzero((option[:, 1:] == option[:, :-1]).any(axis=1)):
        ways[row] = len(divide_layers_of_runs(option[row : row + 1], stages[row : row + 1], layers).layers)
    return np.asarray(ways)


def divide_layers_of_runs(option: np.ndarray, stages: np.ndarray, layers: int) -> Runs:
    """Returns all ways to divide the layers among runs of which every stage has a layer at least.

    Neighbouring runs of equal degrees have different numbers of layers, each the same on all stages, and are not what
    a single run with a remainder would be.
    """
    runs = option.shape[1]
    after = np.cumsum(stages[:, ::-1], axis=1)[:, ::-1]
    parts: list[np.ndarray] = []
    rows, left = np.arange(len(option)), np.full(len(option), layers)
    for run in range(runs - 1):
        least, most = stages[rows, run], left - after[rows, run + 1]
        width = np.maximum(most - least + 1, 0)
        again = np.repeat(np.arange(len(rows)), width)
        of_run = np.arange(len(again)) - np.repeat(np.cumsum(width) - width, width) + least[again]
        rows, parts, left = rows[again], [part[again] for part in parts] + [of_run], left[again] - of_run
    divided = Runs(option[rows], stages[rows], np.column_stack([*parts, left]))
    keep = _are_told_apart(divided)
    return divided.take(keep) if not keep.all() else divided


def _are_told_apart(divided: Runs) -> np.ndarray:
    """Returns in which pipelines neighbouring runs of equal degrees are what no other division is [pipelines]."""
    keep, runs = np.ones(len(divided.layers), bool), divided.layers.shape[1]
    each, rest = np.divmod(divided.layers, divided.stages)
    for run in range(runs - 1):
        equal = divided.option[:, run] == divided.option[:, run + 1]
        former, other = each[:, run], each[:, run + 1]
        merges = (other == former + 1) & (divided.stages[:, run] == 1) if runs == 2 else np.abs(former - other) == 1
        keep &= ~(equal & ((rest[:, run] > 0) | (rest[:, run + 1] > 0) | (former == other) | merges))
    return keep


def layers_of_run(stages: int, layers: int, run: int, runs: int) -> list[int]:
    """Returns the layers of every stage of a run.

    What is left of an even division goes, a layer each, to the last stages of the first run, to the first stages of
    every other run, and of a run that is alone to those from the second on: away from embedding and loss.
    """
    each, rest = divmod(layers, stages)
    first = 1 if runs == 1 else stages - rest if run == 0 else 0
    return [each + (first <= stage < first + rest) for stage in range(stages)]


def split_rows(counts: np.ndarray) -> Iterator[slice]:
    """Yields slices of rows that have about `ROWS` pipelines together. counts: of every row."""
    ends, begin = np.cumsum(counts), 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + ROWS, side="right")))
        yield slice(begin, end)
        begin = end

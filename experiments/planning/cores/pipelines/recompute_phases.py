"""AdaPipe's two levels: which layers a stage keeps, and how 1F1B's phases add up over stages.

A stage that holds a range of layers keeps, of all sets that fit, the one whose recomputation would take longest: a 0/1
knapsack. With the times F and B of each stage, for p stages and n micro-batches:

    W_s = F_s + max(W_{s+1} + B_{s+1}, (p - s - 1) F_s)      warm-up: until the first gradient has arrived
    E_s = B_s + max(E_{s+1} + F_{s+1}, (p - s - 1) B_s)      ending: from the last forward pass on
    step = W_0 + E_0 + (n - p) max_s (F_s + B_s)

and stages are prepended by dynamic programming, which keeps for every first layer the suffix of the shortest step (Sun
et al. 2024, https://doi.org/10.1145/3620666.3651359, section 5). All three sums grow with those of the suffix, so that
suffixes which no other beats in all of them give the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Suffix(NamedTuple):
    """The stages from one on: warm-up and ending as the stage before sees them, slowest stage [s], and their layers."""

    warm_up: float
    ending: float
    slowest: float
    layers: tuple[int, ...]
    own: float = 0.0
    """Seconds of the first of these stages, which are in both sums [s]."""


class PhasePlan(NamedTuple):
    """Layers of every stage, with the step [s] and the number of stages that were prepended."""

    layers: tuple[int, ...]
    value: float
    visited: int


def keep_most(seconds: np.ndarray, nbytes: np.ndarray, room: np.ndarray, units: int = 500) -> np.ndarray:
    """The least seconds of what is not kept, of the items of every range from first to last; infinite for no room.

    seconds, nbytes: of an item, if it is recomputed, and if it is kept [items].
    room: bytes for the kept items of every range [items, items]; negative: even without them it does not fit.
    units: parts of the largest room that are told apart; an item takes whole ones.
    """
    count = len(seconds)
    if not np.ptp(seconds) and not np.ptp(nbytes):  # of equal items as many as there is room for
        items = np.indices(room.shape)[1] - np.indices(room.shape)[0] + 1
        fitting = np.floor(np.maximum(room, 0.0) / max(float(nbytes[0]), 1e-300) + 1e-9)
        left = float(seconds[0]) * (items - np.minimum(items, fitting))
        return np.where((room >= 0) & (items > 0), left, np.inf)
    largest = float(min(room.max(initial=0.0), nbytes.sum()))
    unit = max(largest / units, 1e-300)
    sizes = np.ceil(nbytes / unit - 1e-9)
    found = np.full(room.shape, np.inf)
    for first in range(count):
        most = np.zeros(units + 1)  # seconds saved within so many units
        for last in range(first, count):
            size = int(min(sizes[last], units + 1))
            better = most.copy()
            better[size:] = np.maximum(most[size:], most[: units + 1 - size] + seconds[last])
            most = better
            if room[first, last] >= 0:
                have = int(min(units, math.floor(room[first, last] / unit + 1e-9)))
                found[first, last] = float(seconds[first : last + 1].sum() - most[have])
    return found


def plan_phases(
    forward: Sequence[np.ndarray],
    backward: Sequence[np.ndarray],
    microbatches: int,
    keep: int = 1,
    end: float = math.inf,
) -> PhasePlan | None:
    """The stages of the shortest step that was found; None if nothing fits.

    forward, backward: seconds of every stage with the layers from first to last; infinite: it does not fit [layers,
        layers].
    keep: suffixes kept for a first layer; 1: the paper's search. 0: all that may matter, and the plan is the optimum.
    end: of the CPU time of the process [s].

    Raises ValueError if the time has come to an end.
    """
    depth, layers = len(forward), len(forward[0])
    suffixes: list[list[Suffix]] = [[] for _ in range(layers)] + [[Suffix(0.0, 0.0, 0.0, ())]]
    visited = 0
    for stage in range(depth - 1, -1, -1):
        flights = min(microbatches, depth - stage)
        ahead, back = forward[stage].tolist(), backward[stage].tolist()
        grown: list[list[Suffix]] = [[] for _ in range(layers + 1)]
        for first in range(layers):
            if time.process_time() > end:
                raise ValueError(f"the time was up at stage {stage} of {depth}")
            for last in range(first, layers):
                both = ahead[first][last] + back[first][last]
                if not math.isfinite(both):
                    continue
                for after in suffixes[last + 1]:
                    visited += 1
                    warm_up = both + max(after.warm_up, (flights - 1) * ahead[first][last])
                    ending = both + max(after.ending, (flights - 1) * back[first][last])
                    layout = (last - first + 1, *after.layers)
                    grown[first].append(Suffix(warm_up, ending, max(both, after.slowest), layout, both))
        steady = max(0, microbatches - (depth - stage))
        # How the first stage is ranked depends on its own passes: all of its suffixes are compared below.
        suffixes = [_prune(one, steady, keep) for one in grown] if stage else grown
    best, value = None, math.inf
    for one in suffixes[0]:
        # The first stage has no stage before: its warm-up ends, and its ending begins, with its own passes.
        step = one.warm_up + one.ending - one.own + max(0, microbatches - depth) * one.slowest
        if step < value:
            best, value = one, step
    return None if best is None else PhasePlan(best.layers, value, visited)


def _prune(suffixes: list[Suffix], steady: int, keep: int) -> list[Suffix]:
    ranked = sorted(suffixes, key=lambda one: (one.warm_up + one.ending - one.own + steady * one.slowest, one.layers))
    if keep:
        return ranked[:keep]
    found: list[Suffix] = []
    for one in ranked:
        if not any(all(a <= b for a, b in zip(other[:3], one[:3], strict=True)) for other in found):
            found.append(one)
    return found

"""Two figures of many plans, and those that no other plan is better than in both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshcast.simulator.report.figures import FIGURES

PAIRS = (("peak_device_gib", "tokens_per_s_per_gpu"), ("cost", "days"), ("gpu_hours", "days"), ("cost", "step_time_s"))
"""Figures across and up; the first pair, and the first of the others that the plans have."""


def choose_pairs(columns: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    """Chooses at most two of `PAIRS`, both of whose figures differ between plans. columns: figures by name [plans]."""
    differing = {name for name, values in columns.items() if len(values) and np.ptp(np.nan_to_num(values)) > 0}
    pairs = [pair for pair in PAIRS if {*pair} <= differing]
    return [pair for pair in pairs if pair == PAIRS[0]] + [pair for pair in pairs if pair != PAIRS[0]][:1]


def find_front(across: str, up: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Finds the indices of the points that no other dominates, by ascending x; of equal points the first.

    across, up: the figures whose values are `x` and `y`.
    """
    a, b = (values if FIGURES[name].better == "lower" else -values for name, values in ((across, x), (up, y)))
    order = np.lexsort((b, a))
    front, least = [], np.inf
    for index in order.tolist():
        if b[index] < least:
            front.append(index)
            least = b[index]
    return np.array(sorted(front, key=lambda index: x[index]), int)

"""Tokens of each expert on the most loaded rank, in benchmarks of expert blocks.

Benchmarks send `tokens` tokens to `topk` of `experts` experts each; each of `ranks` ranks holds consecutive experts,
and the rank with the most rows is measured.

- balanced: experts take turns, so that loads differ by a row at most.
- power law with exponent a: the popularity x of an expert is drawn with density x^-a between 1 and 0.8 tokens (0.01 and
  2 where there are fewer rows than experts), and loads are proportional to it, in whole rows. No expert gets a token
  twice: what exceeds `tokens` goes to the least loaded experts of each rank, rank after rank, and so does what rounding
  loses, or it is taken from the most loaded ones (collector/helper.py in ai-dynamo/aiconfigurator @095f58a51c4c).
- Zipf with exponent s: the i-th expert is i^-s as popular as the first; the rank that holds it is random.

Random routings are represented by their mean: the largest load of the rank, the second largest, ... over many routings
drawn from a fixed seed, so that the result is always the same.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

DRAWS = 8192
"""Popularities drawn for a mean: routings times experts."""
ROUTINGS = (16, 128)
"""Least and most routings of a mean."""
STEEPEST = 10.0
"""Largest exponent: a larger exponent leaves nothing to any expert but the first."""


def is_supported(distribution: object) -> bool:
    """Returns whether `loads` supports this distribution."""
    exponent = _exponent(distribution)
    return distribution == "balanced" or (exponent is not None and exponent <= STEEPEST)


def loads(distribution: str, tokens: int, topk: int, experts: int, ranks: int) -> np.ndarray:
    """Returns the mean loads of the experts of the most loaded rank, largest first.

    distribution: "balanced", or "power_law_1.2", "zipf_1.0", ...
    """
    exponent = _exponent(distribution)
    if exponent is None:
        return balanced_loads(tokens, topk, experts, ranks)
    return (power_law if distribution.startswith("power_law") else zipf)(tokens, topk, experts, ranks, exponent)


@cache
def balanced_loads(tokens: int, topk: int, experts: int, ranks: int) -> np.ndarray:
    """Loads of the first rank's experts, largest first, when experts take turns."""
    local = experts // ranks
    if tokens >= experts:
        return np.full(local, tokens * topk / experts)
    stride = -(-experts // topk)
    step = 1.0 if tokens >= stride else stride / tokens  # few tokens go round all experts
    chosen = (np.arange(tokens)[:, None] * step + np.arange(topk) * stride).astype(int) % experts
    return np.sort(np.bincount(chosen.ravel(), minlength=experts)[:local])[::-1].astype(float)


@cache
def power_law(tokens: int, topk: int, experts: int, ranks: int, exponent: float) -> np.ndarray:
    """Returns the mean loads of the experts of the most loaded rank, largest first."""
    low, high = (1.0, 0.8 * tokens) if tokens * topk > experts else (0.01, 2.0)
    draw = _uniform(experts)
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        popularity = low * (high / low) ** draw
    else:
        popularity = (low**power + draw * (high**power - low**power)) ** (1 / power)
    return _most_loaded(popularity, tokens, topk, ranks)


@cache
def zipf(tokens: int, topk: int, experts: int, ranks: int, exponent: float) -> np.ndarray:
    """Returns the mean loads of the experts of the most loaded rank, largest first."""
    order = np.argsort(_uniform(experts), axis=1)
    return _most_loaded((1.0 + order) ** -exponent, tokens, topk, ranks)


def count_arrived(distribution: str, loads: np.ndarray, tokens: float) -> float:
    """Returns the number of tokens that chose at least one of the experts of a rank, by the loads of these.

    Experts that take turns are chosen apart from each other, others independently of each other.
    """
    if distribution == "balanced":
        return float(min(tokens, loads.sum()))
    return float(tokens * (1.0 - np.prod(1.0 - np.minimum(loads / tokens, 1.0))))


def histogram(loads: np.ndarray, most: int = 8) -> tuple[tuple[float, float], ...]:
    """Returns `loads`, largest first, as at most `most` pairs (number of experts, rows of each), without idle experts.

    Experts in a pair have similar loads; all pairs hold about the same number of rows, so they are finest at the top.
    """
    busy = loads[loads >= 0.5]
    if not len(busy):
        return ()
    if busy[0] - busy[-1] < 1e-9 * busy[0]:
        return ((float(len(busy)), float(busy[0])),)
    level = np.sqrt(busy / busy[0])  # between as many rows and as many experts
    before = np.cumsum(level) - level / 2
    parts = np.minimum((before / level.sum() * most).astype(int), most - 1)
    sizes = [busy[parts == part] for part in np.unique(parts)]
    return tuple((float(len(some)), float(some.mean())) for some in sizes)


def _exponent(distribution: object) -> float | None:
    match = re.fullmatch(r"(?:power_law|zipf)_(\d+(?:\.\d+)?)", str(distribution))
    return float(match[1]) if match else None


def _uniform(experts: int) -> np.ndarray:
    """Returns uniform random numbers: routings x experts."""
    routings = int(np.clip(DRAWS // experts, *ROUTINGS))
    return np.random.default_rng(0).random((routings, experts))


def _most_loaded(popularity: np.ndarray, tokens: int, topk: int, ranks: int) -> np.ndarray:
    """Returns the mean sorted loads of the most loaded rank. popularity: of experts, routings x experts."""
    rows = tokens * topk
    loads = np.rint(popularity / popularity.sum(axis=1, keepdims=True) * rows)
    if loads.max() > tokens:
        above = np.maximum(loads - tokens, 0).sum(axis=1)
        loads = np.minimum(loads, tokens)
        for routing in np.flatnonzero(above):
            loads[routing] = _fill_up(loads[routing].reshape(ranks, -1), above[routing], tokens).ravel()
    split = _correct_sums(loads.reshape(len(loads), ranks, -1), rows, tokens)
    best = split[np.arange(len(split)), split.sum(axis=2).argmax(axis=1)]
    return np.sort(best, axis=1)[:, ::-1].mean(axis=0)


def _correct_sums(loads: np.ndarray, rows: int, most: float) -> np.ndarray:
    """Returns `loads` (routings x ranks x experts) with `rows` rows in each routing, where rounding lost or added some.

    Ranks take turns to give a further row to their least loaded expert below `most`, or a row less to the most loaded.
    """
    changes = np.rint(rows - loads.sum(axis=(1, 2)))
    count, signs = np.abs(changes), np.sign(changes)[:, None]
    turns = count[:, None] // loads.shape[1] + (np.arange(loads.shape[1]) < count[:, None] % loads.shape[1])
    for turn in range(int(turns.max())):
        least = np.where(loads < most, loads, np.inf).argmin(axis=2)
        expert = np.where(signs > 0, least, loads.argmax(axis=2))[..., None]
        added = np.where(turn < turns, signs, 0.0)[..., None]
        np.put_along_axis(loads, expert, np.take_along_axis(loads, expert, axis=2) + added, axis=2)
    return loads


def _fill_up(loads: np.ndarray, rows: float, most: float) -> np.ndarray:
    """Returns `loads` (ranks x experts) and `rows` more, shared by all ranks, on their least loaded experts, up to
    `most`."""
    loads = np.sort(loads, axis=1)
    while rows > 0.5:
        open_ranks = np.flatnonzero(loads[:, 0] < most - 0.5)
        if not len(open_ranks):
            break
        share = rows / len(open_ranks)
        for rank in open_ranks:
            mine = loads[rank]
            count = np.arange(1, len(mine) + 1)
            need = mine * count - np.cumsum(mine)  # to lift all that are below up to the size of each
            lifted = int((need <= share).sum())
            level = min((share + mine[:lifted].sum()) / lifted, most)
            rows -= level * lifted - mine[:lifted].sum()
            mine[:lifted] = level
    return loads

"""Coefficients of programs and GPUs, fitted to published runs together, and tested on sources that they have not seen.

    log(measured / forecast) = sum over kinds of work c of   share(c) x(c)   + error

- x is the logarithm of a factor on the time of one kind of work. It is the sum of an effect of a family (of programs or
  an architecture of GPUs) and of one of the member. Effects are pulled to 0 (ridge): a member towards its family, a
  family towards what meshcast ships. Their prior standard deviations are `PRIOR`.
- Errors are of Student's t distribution, so single runs pull little; a source counts with the root of its runs.
- A kind of work is kept only if sources that are left out, one after another, are forecast better with it than without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]

PRIOR = (0.10, 0.05)
"""Prior standard deviation of the effect of a family, and of a member within it."""
SPREAD, FREEDOM = 0.05, 4.0
"""Scale and degrees of freedom of the errors."""
ITERATIONS = 12

FAMILIES = {
    **dict.fromkeys(("megatron-core", "nemo", "megatron-bridge", "mlperf-nemo", "primus"), "megatron-core"),
    **dict.fromkeys(("megatron-lm-2021", "megatron-deepspeed", "gpt-neox"), "megatron-2021"),
    **dict.fromkeys(("llm-foundry", "torchtitan", "fms-fsdp", "hf-trainer"), "fsdp"),
}
"""Families of programs; any other program is a family of its own."""


def _program(row: Row) -> tuple[str, str]:
    return FAMILIES.get(row["stack"], row["stack"]), row["stack"]


def _gpu(row: Row) -> tuple[str, str]:
    return row["architecture"], row["gpu"]


@dataclass(frozen=True)
class Kind:
    """One kind of work: its share of the step of a run, and who sets its factor, a family and a member of it."""

    share: Callable[[Row], float]
    members: Callable[[Row], tuple[str, str]]


def _gemm_in(*formats: str) -> Callable[[Row], float]:
    return lambda row: row["shares"]["gemm"] if row["format"] in formats else 0.0


def _share_of(name: str) -> Callable[[Row], float]:
    return lambda row: row["shares"][name]


KINDS = {
    "GEMMs in 16 bits": Kind(_gemm_in("bf16", "fp16"), _gpu),
    "GEMMs in 8 bits": Kind(_gemm_in("fp8"), _gpu),
    "GEMMs in 4 bits": Kind(_gemm_in("fp4"), _gpu),
    "attention": Kind(_share_of("attention"), _program),
    "memory-bound kernels": Kind(_share_of("memory_bound"), _program),
    "communication": Kind(_share_of("communication"), _program),
    "step overhead": Kind(_share_of("overhead"), _program),
    "launches": Kind(_share_of("launch"), _program),
}
"""Kinds of work that have a factor: per GPU at most three, per program at most five."""


@dataclass
class Fit:
    """Effects by (kind, family) and (kind, family, member), and their standard errors."""

    effects: dict[tuple[str, ...], float]
    errors: dict[tuple[str, ...], float]

    def correction(self, row: Row, kinds: Iterable[str]) -> float:
        """Logarithm by which the step of a run is longer than its forecast; an unseen member has its family's."""
        total = 0.0
        for name in kinds:
            family, member = KINDS[name].members(row)
            keys = (name, family), (name, family, member)
            total += KINDS[name].share(row) * sum(self.effects.get(key, 0.0) for key in keys)
        return total


def fit(rows: Sequence[Row], kinds: Sequence[str]) -> Fit:
    """The most probable effects of `kinds`."""
    places: dict[tuple[str, ...], int] = {}
    entries: list[tuple[int, int, float]] = []
    for number, row in enumerate(rows):
        for name in kinds:
            share = KINDS[name].share(row)
            if share:
                family, member = KINDS[name].members(row)
                for key in ((name, family), (name, family, member)):
                    entries.append((number, places.setdefault(key, len(places)), share))
    design = np.zeros((len(rows), len(places)))
    for number, place, share in entries:
        design[number, place] += share
    wanted, weights = np.array([row["log_ratio"] for row in rows]), source_weights(rows)
    prior = np.diag([PRIOR[len(key) - 2] ** -2 for key in places])
    effects, robust = np.zeros(len(places)), np.ones(len(rows))
    for _ in range(ITERATIONS):
        scaled = design * (weights * robust / SPREAD**2)[:, None]
        precision = design.T @ scaled + prior
        effects = np.linalg.solve(precision, scaled.T @ wanted)
        left = (wanted - design @ effects) / SPREAD
        robust = (FREEDOM + 1) / (FREEDOM + left**2)
    errors = np.sqrt(np.diag(np.linalg.inv(precision))) if places else np.zeros(0)
    keys = list(places)
    return Fit(dict(zip(keys, effects.tolist(), strict=True)), dict(zip(keys, errors.tolist(), strict=True)))


def source_weights(rows: Sequence[Row]) -> np.ndarray:
    """Weights of runs: each source has that of the root of its number of runs; their mean is 1."""
    number = Counter(row["source"] for row in rows)
    weights = np.array([number[row["source"]] ** -0.5 for row in rows])
    return weights / weights.mean() if len(rows) else weights


def left_out_errors(rows: Sequence[Row], kinds: Sequence[str], by: Callable[[Row], str]) -> np.ndarray:
    """Forecast / measured - 1 of all runs, each with a fit to the runs of other groups (sources, families)."""
    found = np.zeros(len(rows))
    for group in sorted({by(row) for row in rows}):
        own = [number for number, row in enumerate(rows) if by(row) == group]
        made = fit([row for row in rows if by(row) != group], kinds)
        for number in own:
            found[number] = np.expm1(made.correction(rows[number], kinds) - rows[number]["log_ratio"])
    return found


def in_sample_errors(rows: Sequence[Row], kinds: Sequence[str]) -> np.ndarray:
    """Forecast / measured - 1 of all runs with the fit to all of them."""
    made = fit(rows, kinds)
    return np.array([np.expm1(made.correction(row, kinds) - row["log_ratio"]) for row in rows])


def source_of(row: Row) -> str:
    return str(row["source"])


def family_of(row: Row) -> str:
    return _program(row)[0]


def score(rows: Sequence[Row], errors: np.ndarray) -> float:
    """Mean |error|, weighted by source."""
    weights = source_weights(rows)
    return float((weights * np.abs(errors)).sum() / weights.sum())


def choose_kinds(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """The kinds of work whose factors help sources that are left out, and how each of all kinds fared.

    Begins with all, and drops the one without which left-out sources are forecast best, while that is better.
    """
    kept = [name for name in KINDS if any(KINDS[name].share(row) for row in rows)]
    dropped: dict[str, float] = {}
    while True:
        now = score(rows, left_out_errors(rows, kept, source_of))
        without = {
            name: score(rows, left_out_errors(rows, [one for one in kept if one != name], source_of)) for name in kept
        }
        worst = min(without, key=lambda name: without[name], default=None)
        if worst is None or without[worst] > now:
            break
        kept.remove(worst)
        dropped[worst] = now
    table = [{"kind": name, "kept": True, "with": now, "without": without[name]} for name in kept]
    table += [{"kind": name, "kept": False, "with": with_it, "without": None} for name, with_it in dropped.items()]
    return kept, table

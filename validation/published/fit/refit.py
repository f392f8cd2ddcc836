"""Coefficients of programs and GPUs, fitted to published runs together, and tested on sources that they have not seen.

    log(measured / forecast) = sum over kinds of work c of   share(c) x(c)   + error

- x is the logarithm of a factor on the time of a kind of work. It is the sum of an effect of a family (of programs or
  an architecture of GPUs) and of the member. Effects are pulled to 0 (ridge): a member towards its family, a
  family towards what meshcast ships. Their prior standard deviations are `PRIOR`.
- Errors are of Student's t distribution, so single runs pull little; a source counts with the root of its runs.
- Runs of a source err together by what no kind of work explains: clocks and links of its machine, settings that nobody
  knows. Each source has an effect on whole steps, pulled to 0 by `SOURCE`, so that a source that is slow or fast
  throughout says little of any kind of work. It belongs to no correction.
- A kind of work is kept only if sources that are left out in turn are forecast better with it than without,
  by more than two standard errors of the difference over sources, and by `MIN_GAIN`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import STEPS, Calibration
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.validation.published.stacks import FITTED_SOURCES
from meshcast.validation.published.summary import error_statistics

Row = dict[str, Any]

PRIOR = (0.10, 0.05)
"""Prior standard deviation of the effect of a family, and of a member within it."""
SPREAD, FREEDOM = 0.05, 4.0
"""Scale and degrees of freedom of the errors."""
SOURCE = 0.03
"""Prior standard deviation of the effect of a source on its steps."""
ITERATIONS = 12

FREE = (1.0, 0.05)
"""The same where nothing pulls a family to what meshcast ships: its factor is what the fitted runs alone say."""
FITTED = {"experts": ("launches",), "dense": ("GEMMs in 16 bits", "GEMMs in 8 bits", "memory-bound kernels")}
"""Kinds of work whose shipped coefficients were fitted to many published runs of a class, see `list_fitted`."""

MIN_GAIN = 0.001
"""Fall of the mean |error| of left-out sources below which no coefficient is worth having."""

FAMILIES = {
    **dict.fromkeys(("megatron-core", "nemo", "megatron-bridge", "mlperf-nemo", "primus"), "megatron-core"),
    **dict.fromkeys(("megatron-lm-2021", "megatron-deepspeed", "gpt-neox"), "megatron-2021"),
    **dict.fromkeys(("llm-foundry", "torchtitan", "fms-fsdp", "hf-trainer"), "fsdp"),
}
"""Families of programs; any other program is a family of its own."""


def _program(row: Row) -> tuple[str, str]:
    name = str(row["stack"])
    return FAMILIES.get(name, name), name


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
class FactorFit:
    """Effects by (kind, family) and (kind, family, member), and their standard errors."""

    effects: dict[tuple[str, ...], float]
    errors: dict[tuple[str, ...], float]

    def correction(self, row: Row, kinds: Iterable[str]) -> float:
        """Returns the logarithm by which the step of a run is longer than its forecast; an unseen member has its
        family's."""
        total = 0.0
        for name in kinds:
            family, member = KINDS[name].members(row)
            keys = (name, family), (name, family, member)
            total += KINDS[name].share(row) * sum(self.effects.get(key, 0.0) for key in keys)
        return total


def fit(rows: Sequence[Row], kinds: Sequence[str], priors: tuple[float, float] = PRIOR) -> FactorFit:
    """Returns the most probable effects of `kinds`. priors: standard deviations of the effects of a family and of a
    member."""
    places: dict[tuple[str, ...], int] = {}
    entries: list[tuple[int, int, float]] = []
    for number, row in enumerate(rows):
        for name in kinds:
            share = KINDS[name].share(row)
            if share:
                family, member = KINDS[name].members(row)
                for key in ((name, family), (name, family, member)):
                    entries.append((number, places.setdefault(key, len(places)), share))
    sources = sorted({row["source"] for row in rows})
    design = np.zeros((len(rows), len(places) + len(sources)))
    for number, place, share in entries:
        design[number, place] += share
    for number, row in enumerate(rows):
        design[number, len(places) + sources.index(row["source"])] = 1.0
    wanted, weights = np.array([row["log_ratio"] for row in rows]), source_weights(rows)
    prior = np.diag([*(priors[len(key) - 2] ** -2 for key in places), *(SOURCE**-2 for _ in sources)])
    effects, robust = np.zeros(len(prior)), np.ones(len(rows))
    for _ in range(ITERATIONS):
        scaled = design * (weights * robust / SPREAD**2)[:, None]
        precision = design.T @ scaled + prior
        effects = np.linalg.solve(precision, scaled.T @ wanted)
        left = (wanted - design @ effects) / SPREAD
        robust = (FREEDOM + 1) / (FREEDOM + left**2)
    errors = np.sqrt(np.diag(np.linalg.inv(precision))) if places else np.zeros(0)
    # Those of sources come last.
    return FactorFit(*(dict(zip(places, values.tolist(), strict=False)) for values in (effects, errors)))


def source_weights(rows: Sequence[Row]) -> np.ndarray:
    """Returns the weights of runs: each source has that of the root of its number of runs; their mean is 1."""
    number = Counter(row["source"] for row in rows)
    weights = np.array([number[row["source"]] ** -0.5 for row in rows])
    return weights / weights.mean() if len(rows) else weights


def left_out_errors(
    rows: Sequence[Row], kinds: Sequence[str], by: Callable[[Row], str], priors: tuple[float, float] = PRIOR
) -> np.ndarray:
    """Returns forecast / measured - 1 of all runs, each with a fit to the runs of other groups (sources, families,
    models)."""
    errors = np.zeros(len(rows))
    for group in sorted({by(row) for row in rows}):
        left_out = [number for number, row in enumerate(rows) if by(row) == group]
        fitted = fit([row for row in rows if by(row) != group], kinds, priors)
        for number in left_out:
            errors[number] = np.expm1(fitted.correction(rows[number], kinds) - rows[number]["log_ratio"])
    return errors


def corrections_without_source(rows: Sequence[Row]) -> list[float]:
    """Returns the logarithm by which the step of each run is longer with coefficients that its source did not set.

    Those of `FITTED` are fitted anew to the runs of all other sources that ship in them (`FITTED_SOURCES`). The steps
    of any other source set none: its runs need no correction.
    """
    used = [row for row in rows if row["source"] in FITTED_SOURCES]
    fits: dict[tuple[str, str], FactorFit] = {}
    corrections = []
    for row in rows:
        kinds, key = FITTED.get(row["class"], ()), (row["class"], row["source"])
        if not kinds or row["source"] not in FITTED_SOURCES:
            corrections.append(0.0)
            continue
        if key not in fits:
            others = [other for other in used if other["class"] == row["class"] and other["source"] != row["source"]]
            fits[key] = fit(others, kinds, FREE)
        corrections.append(fits[key].correction(row, kinds))
    return corrections


def in_sample_errors(rows: Sequence[Row], kinds: Sequence[str]) -> np.ndarray:
    """Returns forecast / measured - 1 of all runs with the fit to all of them."""
    fitted = fit(rows, kinds)
    return np.array([np.expm1(fitted.correction(row, kinds) - row["log_ratio"]) for row in rows])


def source_of(row: Row) -> str:
    return str(row["source"])


def family_of(row: Row) -> str:
    return _program(row)[0]


GROUPINGS: dict[str, Callable[[Row], str]] = {
    "source": source_of, "family": family_of, "model": lambda row: str(row["model"])
}  # fmt: skip
"""What is left out: a source, a family of programs, or a model."""


def score(rows: Sequence[Row], errors: np.ndarray) -> float:
    """Returns the mean |error|, weighted by source."""
    weights = source_weights(rows)
    return float((weights * np.abs(errors)).sum() / weights.sum())


@dataclass(frozen=True)
class KindTrial:
    """How a kind of work fared: mean |error| of left-out sources with and without it.

    standard_error: of the difference, over sources.
    kept: whether the difference is more than twice that, and more than `MIN_GAIN`.
    """

    kind: str
    with_it: float
    without: float
    standard_error: float
    kept: bool


def choose_kinds(rows: Sequence[Row]) -> tuple[list[str], list[KindTrial]]:
    """Returns the kinds of work whose factors help sources that are left out, and how each of all kinds fared.

    Begins with all, and drops the least useful in turn, while its use is within two standard errors.
    """
    kept = [name for name in KINDS if any(KINDS[name].share(row) for row in rows)]
    dropped: list[KindTrial] = []
    while kept:
        with_all = left_out_errors(rows, kept, source_of)
        trials = [_try_without(rows, name, kept, with_all) for name in kept]
        worst = min(trials, key=lambda trial: trial.without - trial.with_it - 2 * trial.standard_error)
        if worst.kept:
            return kept, trials + dropped
        kept.remove(worst.kind)
        dropped.append(worst)
    return kept, dropped


def _try_without(rows: Sequence[Row], name: str, kinds: Sequence[str], with_all: np.ndarray) -> KindTrial:
    """Leaves one of `kinds` out. with_all: errors of left-out sources with all of them."""
    without = left_out_errors(rows, [kind for kind in kinds if kind != name], source_of)
    gains, weights = np.abs(without) - np.abs(with_all), source_weights(rows)
    mean = float((weights * gains).sum() / weights.sum())
    by_source: dict[str, float] = {}
    for row, gain, weight in zip(rows, gains.tolist(), weights.tolist(), strict=True):
        by_source[row["source"]] = by_source.get(row["source"], 0.0) + weight * (gain - mean)
    sources = len(by_source)
    variance = sum(total**2 for total in by_source.values()) * sources / max(sources - 1, 1) / weights.sum() ** 2
    error = math.sqrt(variance)
    return KindTrial(name, score(rows, with_all), score(rows, without), error, mean > max(2 * error, MIN_GAIN))


# ------------------------------------------------------------------------------------------- answers


def refit_class(rows: Sequence[Row]) -> dict[str, Any]:
    """Fits all runs of a class: trials of kinds, error statistics, and the effects of kept kinds."""
    kept, trials = choose_kinds(rows)
    every = [trial.kind for trial in trials]
    errors = {"shipped": np.array([np.expm1(-row["log_ratio"]) for row in rows])}
    for name, kinds in (("all", every), ("kept", kept)):
        errors[f"{name}_in_sample"] = in_sample_errors(rows, kinds)
        for grouping, by in GROUPINGS.items():
            errors[f"{name}_{grouping}_left_out"] = left_out_errors(rows, kinds, by)
    if refitted := FITTED.get(rows[0]["class"]):
        for grouping, by in GROUPINGS.items():
            errors[f"refitted_{grouping}_left_out"] = left_out_errors(rows, refitted, by, FREE)
    fitted = fit(rows, kept)
    return {
        "rows": len(rows),
        "sources": len({row["source"] for row in rows}),
        "kept": kept,
        "kinds": [asdict(trial) for trial in trials],
        "errors": {name: error_statistics(values.tolist()) for name, values in errors.items()},
        "left_out": {grouping: _list_groups(rows, errors, grouping) for grouping in GROUPINGS},
        "effects": [
            {
                "kind": key[0], "family": key[1], "member": key[2] if len(key) > 2 else None,
                "value": value, "standard_error": fitted.errors[key],
            }
            for key, value in sorted(fitted.effects.items())
        ],
    }  # fmt: skip


def _list_groups(rows: Sequence[Row], errors: Mapping[str, np.ndarray], grouping: str) -> list[dict[str, Any]]:
    """Lists error statistics of every group with shipped coefficients, and with fits to all other groups."""
    by, names = GROUPINGS[grouping], ("shipped", f"refitted_{grouping}_left_out", f"all_{grouping}_left_out")
    groups = []
    for group in sorted({by(row) for row in rows}):
        of_group = np.array([by(row) == group for row in rows])
        statistics = {name: error_statistics(errors[name][of_group].tolist()) for name in names if name in errors}
        groups.append({"group": group, "rows": int(of_group.sum()), "errors": statistics})
    return groups


def list_fitted() -> list[dict[str, Any]]:
    """Lists the fitted coefficients that ship with meshcast: what each was fitted to, its value and its profiles."""
    coefficients: dict[tuple[str, str], dict[str, Any]] = {}
    for name in framework_names():
        profile = load_framework(name)
        for field, source in profile.fitted.items():
            value: Any = profile.model_dump()
            for key in field.split("."):
                value = value[key]
            entry = {"coefficient": field, "value": value, "fitted_to": source, "of": []}
            coefficients.setdefault((field, source), entry)["of"].append(name)
    for architecture, entries in Calibration.shipped().sections(STEPS).items():
        for field, entry in entries.items():
            if entry["rows"]:
                line = {"coefficient": field, "value": entry["value"], "fitted_to": entry["source"]}
                coefficients[field, architecture] = line | {"of": [architecture]}
    return list(coefficients.values())

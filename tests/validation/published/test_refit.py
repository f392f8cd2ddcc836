"""Coefficients fitted to runs: planted ones are found, useless ones dropped, and left-out sources judge them."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import Framework
from meshcast.validation.published.fit import refit
from meshcast.validation.published.fit.by_source import compare_sources
from meshcast.validation.published.fit.derivatives import RELATIVES, derive
from meshcast.validation.published.fit.refit import (
    FREE,
    choose_kinds,
    family_of,
    fit,
    in_sample_errors,
    left_out_errors,
    list_fitted,
    refit_class,
    source_of,
    source_weights,
)
from tests.validation.published.runs import row as published

Row = dict[str, Any]
SHARES = {"gemm": 0.0, "attention": 0.0, "memory_bound": 0.0, "communication": 0.0, "overhead": 0.0, "launch": 0.0}
NUMBERS = count()
GEMM, COMMUNICATION = "GEMMs in 16 bits", "communication"


def row(log_ratio: float, source: str = "a", stack: str = "nemo", gpu: str = "h100-sxm", **shares: float) -> Row:
    return {
        "id": f"{source}-{next(NUMBERS)}", "source": source, "stack": stack, "model": f"{stack}'s", "gpu": gpu,
        "architecture": "hopper", "format": "bf16", "class": "dense",
        "log_ratio": log_ratio, "shares": SHARES | shares,
        "residuals": [{"regime": "source", "log_ratio": log_ratio, "others": 0.0}],
    }  # fmt: skip


def planted(factor: float, noise: float = 0.01, sources: int = 8, each: int = 12) -> list[Row]:
    """Runs whose communication takes exp(factor) times as long as forecast; shares are drawn."""
    draw = np.random.default_rng(7)
    rows = []
    for source in range(sources):
        for _ in range(each):
            share = float(draw.uniform(0.1, 0.6))
            error = float(draw.normal(0.0, noise))
            rows.append(row(factor * share + error, str(source), gemm=0.9 - share, communication=share))
    return rows


def test_a_planted_coefficient_is_recovered_within_its_error() -> None:
    kinds, trials = choose_kinds(planted(0.3))
    assert kinds == [COMMUNICATION]
    assert {trial.kind: trial.kept for trial in trials} == {COMMUNICATION: True, GEMM: False}
    kept = next(trial for trial in trials if trial.kept)
    assert kept.without - kept.with_it > 2 * kept.standard_error > 0
    fitted = fit(planted(0.3), kinds)
    total = sum(fitted.effects.values())
    assert set(fitted.effects) == {(COMMUNICATION, "megatron-core"), (COMMUNICATION, "megatron-core", "nemo")}
    assert total == pytest.approx(0.3, abs=0.02)


def test_runs_that_are_forecast_well_need_no_coefficient() -> None:
    kinds, trials = choose_kinds(planted(0.0))
    assert kinds == [] and {trial.kind for trial in trials} == {GEMM, COMMUNICATION}
    result = refit_class(planted(0.0))
    assert result["effects"] == [] and result["kept"] == []
    assert result["errors"]["kept_source_left_out"] == result["errors"]["shipped"]


def test_a_coefficient_of_one_source_does_not_help_the_others() -> None:
    """Source 0 has slow communication, all others do not: in sample the fit gains, left out it loses."""
    rows = [run if run["source"] != "0" else run | {"log_ratio": run["log_ratio"] + 0.2} for run in planted(0.0)]
    held = [run["source"] == "0" for run in rows]
    shipped = np.expm1([-run["log_ratio"] for run in rows])
    inside, outside = in_sample_errors(rows, [COMMUNICATION]), left_out_errors(rows, [COMMUNICATION], source_of)
    assert np.abs(inside[held]).mean() < np.abs(shipped[held]).mean()
    assert np.abs(outside[held]).mean() == pytest.approx(np.abs(shipped[held]).mean(), rel=0.02)
    assert np.abs(inside[held]).mean() < np.abs(outside[held]).mean()
    assert choose_kinds(rows)[0] == []


def test_a_fit_without_the_family_has_no_coefficient_of_it() -> None:
    rows = planted(0.3)
    assert {family_of(run) for run in rows} == {"megatron-core"}
    shipped = np.expm1([-run["log_ratio"] for run in rows])
    assert left_out_errors(rows, [COMMUNICATION], family_of) == pytest.approx(shipped)


def test_ridge_shrinks_as_computed_by_hand() -> None:
    """One run, share 0.5, log ratio r: precision of the data w / 0.05^2, of the priors 1 / 0.10^2 and 1 / 0.05^2.

    The sum of both effects has prior variance 0.10^2 + 0.05^2 = 0.0125, the effect of the source 0.03^2 = 0.0009;
    errors have variance 0.0025 / w with the robust weight w = 5 / (4 + (left / 0.05)^2). The family has 0.01 / 0.0125 =
    80 % of the sum.
    """
    fitted = fit([row(0.1, communication=0.5)], [COMMUNICATION])
    family, member = (fitted.effects[COMMUNICATION, "megatron-core", *name] for name in ([], ["nemo"]))
    total = family + member
    source = total * 0.0009 / (0.0125 * 0.5)
    robust = 5 / (4 + ((0.1 - 0.5 * total - source) / 0.05) ** 2)
    noise = 0.0025 / robust
    assert total == pytest.approx(0.0125 * 0.5 * 0.1 / (0.25 * 0.0125 + 0.0009 + noise), rel=1e-6)
    assert family / total == pytest.approx(0.8)


def test_a_source_that_is_slow_throughout_says_little_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sources one takes exp(0.15) as long as forecast, whatever its shares; its effect is no correction."""
    rows = [row | {"log_ratio": row["log_ratio"] + 0.15 * (row["source"] == "0")} for row in planted(0.0, sources=2)]
    fitted = fit(rows, [COMMUNICATION], FREE)
    result = sum(fitted.effects.values())
    assert fitted.correction(rows[0], [COMMUNICATION]) == pytest.approx(rows[0]["shares"]["communication"] * result)
    monkeypatch.setattr(refit, "SOURCE", 1e-6)
    assert 0 < result < 0.6 * sum(fit(rows, [COMMUNICATION], FREE).effects.values())


def test_a_member_without_runs_has_the_effect_of_its_family() -> None:
    fitted = fit(planted(0.3), [COMMUNICATION])
    other = row(0.0, stack="primus", communication=0.5)
    stranger = row(0.0, stack="maxtext", communication=0.5)
    family = fitted.effects[COMMUNICATION, "megatron-core"]
    assert fitted.correction(other, [COMMUNICATION]) == pytest.approx(0.5 * family) and family > 0.2
    assert fitted.correction(stranger, [COMMUNICATION]) == 0.0


def test_a_fit_without_a_prior_forecasts_each_model_by_the_others() -> None:
    """The host of two models takes exp(0.3) as long as shipped, that of a third exp(0.6): the factor is forgotten."""
    rows = [
        row(factor * share, launch=share) | {"class": "experts", "model": model}
        for model, factor in (("one", 0.3), ("two", 0.3), ("three", 0.6))
        for share in np.linspace(0.2, 0.8, 30).tolist()
    ]
    groups = {run["group"]: run["errors"] for run in refit_class(rows)["left_out"]["model"]}
    # 0.3 too little of a host that half of the step waits for.
    assert groups["three"]["refitted_model_left_out"]["bias"] == pytest.approx(np.expm1(-0.15), abs=0.01)
    assert groups["three"]["shipped"]["bias"] == pytest.approx(np.expm1(-0.30), abs=0.01)
    assert abs(groups["one"]["refitted_model_left_out"]["bias"]) < abs(groups["one"]["shipped"]["bias"])


def test_a_source_counts_with_the_root_of_its_runs() -> None:
    weights = source_weights([row(0.0, "a")] * 4 + [row(0.0, "b")])
    assert weights[:4].sum() == pytest.approx(2 * weights[4]) and weights.mean() == pytest.approx(1.0)


def test_sources_are_compared_with_a_constant_of_the_others() -> None:
    """Source a reaches half of the efficiency of b, which its forecast knows and the constant does not."""
    rows = [row(0.05, "a") | {"efficiency": 0.2, "without_own": 0.1} for _ in range(10)]
    rows += [row(0.0, "b") | {"efficiency": 0.4, "without_own": 0.0} for _ in range(9)]
    (result,) = compare_sources(rows)
    assert (result["source"], result["rows"]) == ("a", 10)
    assert result["shipped"]["bias"] == pytest.approx(np.expm1(-0.05))
    assert result["without"]["bias"] == pytest.approx(np.expm1(-0.1))
    assert result["constant"]["bias"] == pytest.approx(-0.5)


def test_a_source_alone_has_no_constant() -> None:
    (result,) = compare_sources([row(0.0) | {"efficiency": 0.4, "without_own": 0.0} for _ in range(10)])
    assert result["constant"] is None


def test_fitted_coefficients_are_fields_of_their_profiles() -> None:
    result = list_fitted()
    fields = {run["coefficient"].split(".")[0] for run in result if "sustained" not in run["coefficient"]}
    assert fields == {"rates", "launch_s", "step_overhead_s", "memory"} <= set(Framework.model_fields)
    rate = next(entry for entry in result if entry["coefficient"] == "rates.memory_bound")
    assert rate["value"] == 1.2 and "20 published runs" in rate["fitted_to"] and "megatron-core" in rate["of"]
    assert {"ampere", "hopper"} <= {name for run in result for name in run["of"]}


def test_derivatives_of_a_run_say_what_its_step_consists_of() -> None:
    run = published(measured={"step_time_s": 10.0})
    result = derive(run, SharedWork())
    shares = result["shares"]
    assert result["class"] == "dense" and result["architecture"] == "hopper"
    assert 0.5 < shares["gemm"] < 1 and 0 < shares["communication"] < 0.3 and 0.8 < sum(shares.values()) < 1.1
    assert 0 < result["efficiency"] < 1
    (stranger,) = result["residuals"]  # no coefficient was fitted to a source of this name
    assert stranger["regime"] == "program" and stranger["others"] > 0
    assert derive(published(), SharedWork())["shares"] is None  # no measured step


def test_runs_of_a_fitted_profile_are_forecast_without_it_too() -> None:
    run = published(stack="megatron-lm-2021", gpu="a100-sxm-80", measured={"step_time_s": 10.0})
    result = derive(run, SharedWork())["residuals"]
    assert [run["regime"] for run in result] == ["program", "family", "unknown"]
    # That of its relative has a longer constant time, so the same measured step is less of a surprise.
    assert RELATIVES["megatron-lm-2021"] == "megatron-deepspeed" and result[1]["log_ratio"] < result[0]["log_ratio"]

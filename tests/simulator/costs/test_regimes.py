"""Regimes: how well the framework and the GPU of a job are known decides the width of its interval."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.regimes import CLASSES, REGIMES, least_known, residuals, step_class
from meshcast.simulator.report.metrics import Z90

JOB: dict[str, Any] = {
    "model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 8}, "batch": {"global": 8, "micro": 1},
    "precision": "bf16", "optimizer": "adam", "framework": "megatron-core", "plan": {"tp": 8},
}  # fmt: skip


def forecast(framework: Any = "megatron-core", gpu: str = "h100-sxm", **changes: Any) -> Report:
    return simulate({**JOB, "framework": framework, "cluster": {"gpu": gpu, "gpus": 8}, **changes})


@pytest.mark.parametrize(
    ("framework", "gpu", "regime"),
    [
        ("megatron-core", "h100-sxm", "program"),
        ("megatron-core", "h100-sxm-96-hbm2e", "family"),  # the calibration of another GPU of its architecture
        ("megatron-core", "mi300x", "unknown"),  # that of another architecture
        ("primus", "h100-sxm", "family"),  # coefficients of its base
        ("primus", "mi300x", "unknown"),
        ("nanotron", "h100-sxm", "unknown"),
    ],
)
def test_the_least_known_of_framework_and_gpu_decides(framework: str, gpu: str, regime: str) -> None:
    report = forecast(framework, gpu)
    assert report.regime == regime
    assert report.residual is residuals()[regime]  # type: ignore[index]
    assert report.to_dict()["interval"] == {"regime": regime, "widest": report.widest}


def test_the_regime_of_a_gpu_is_that_of_the_calibration_in_use() -> None:
    assert Calibration.shipped().lenders(forecast().job.cluster.gpu)[0] == ("h100-sxm", "")


@pytest.mark.parametrize("regime", REGIMES)
def test_the_interval_of_a_regime_has_the_documented_width(regime: str) -> None:
    """From exp(bias - 1.645 sigma) to exp(bias + 1.645 sigma) times the step."""
    report = forecast({"name": "megatron-core", "set": {"regime": regime}})
    residual = residuals()[regime]  # type: ignore[index]
    causes = {name: sigma for name, sigma in report.sigmas.items() if name != "regime"}
    others = math.hypot(*causes.values())
    low, high = (math.log(end / report.step_time) for end in report.interval_90)
    reach = Z90 * math.hypot(residual.sigma, others)
    assert (low, high) == pytest.approx((residual.bias - reach, residual.bias + reach)) and low < 0 < high
    kernels = (sigma for name, sigma in causes.items() if not name.startswith("sigmas."))
    assert math.hypot(*kernels) < 0.03  # they add little to what whole steps say


def test_stated_causes_widen_the_interval_as_independent_errors_do() -> None:
    plain, wider = forecast(), forecast({"name": "megatron-core", "set": {"sigmas": {"data loader": 0.3}}})
    assert wider.sigma**2 == pytest.approx(plain.sigma**2 + 0.3**2)
    assert next(iter(wider.widest)) == "sigmas.data loader" and wider.step_time == plain.step_time
    assert wider.interval_90[0] < plain.interval_90[0] and wider.interval_90[1] > plain.interval_90[1]


def test_classes_of_jobs() -> None:
    assert [step_class(*flags) for flags in ((False, False), (True, False), (False, True))] == [*CLASSES]


def test_the_least_known_regime() -> None:
    assert least_known("program", "unknown", "family") == "unknown" and least_known("source") == "source"


def test_a_less_known_regime_is_no_narrower() -> None:
    sigmas = [residuals()[regime].sigma for regime in REGIMES]
    assert sigmas == sorted(sigmas)

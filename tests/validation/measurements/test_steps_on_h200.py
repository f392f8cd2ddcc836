"""The measurements on an H200 (validation/measured/h200) against today's forecasts from the catalog.

Rows of their files hold the forecasts that were written before, some of them by older models.
"""

from collections import defaultdict
from importlib import resources
from pathlib import Path
from statistics import median

import pytest

from simulator.costs.costs import Costs
from validation.kernels.works import work_of
from validation.measurements.forecasts import Forecaster
from validation.measurements.measurement import Measurement, read
from validation.measurements.row_errors import WORK

FOLDER = Path(str(resources.files("validation"))) / "measured" / "h200"
DENSE = ("gpt2-1.5b", "gpt2-355m", *(f"llama3.2-1b{kind}" for kind in ("", "-full", "-selective", "-graph")))
KERNELS = sorted(FOLDER.glob("kernels-*.json"))


def measured(name: str) -> Measurement:
    return read(FOLDER / f"{name}.json")


@pytest.mark.parametrize("name", [*DENSE, "llama3.2-3b-full"])
def test_steps_of_dense_models_are_within_ten_percent(name: str) -> None:
    found = measured(f"step-{name}")
    assert Forecaster("catalog", found.job).step.value == pytest.approx(found.rows[0].median, rel=0.1)


def test_the_median_step_is_as_the_readme_says() -> None:
    files = [measured(f"step-{name}") for name in (*DENSE, "llama3.2-3b-full")]
    errors = [abs(Forecaster("catalog", one.job).step.value / one.rows[0].median - 1) for one in files]
    assert round(100 * median(errors), 1) == 0.5


def test_output_layers_with_unaligned_rows_are_within_ten_percent() -> None:
    found = measured("output-layers-in-steps")
    costs = Forecaster("catalog", measured("step-gpt2-355m").job).costs
    for row in found.rows:
        assert costs.estimate(work_of(row.shape[WORK])).seconds == pytest.approx(row.median, rel=0.1), row.name


def test_a_step_with_experts_waits_for_the_host_beyond_the_forecast() -> None:
    """Its kernels take 212 of 279 ms: the host launches 8,314 of them, more than the forecast counts."""
    found = measured("step-moe-1b")
    assert Forecaster("catalog", found.job).step.value == pytest.approx(found.rows[0].median, rel=0.2)


@pytest.mark.parametrize("name", [*DENSE, "llama3.2-3b-full", "moe-1b"])
def test_allocated_memory_is_within_two_percent(name: str) -> None:
    found = measured(f"step-{name}")
    row = next(row for row in found.rows if row.name == "rank 0 peak allocated")
    assert Forecaster("catalog", found.job).peak_memory(0, "allocated").value == pytest.approx(row.median, rel=0.02)


def test_kernels_of_every_kind_are_near_their_forecasts() -> None:
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for path in KERNELS:
        found = read(path)
        for row in found.rows:
            work = work_of(row.shape.get(WORK, {})) if row.group.endswith("eager") else None
            if work is not None and row.samples:
                kind = getattr(work, "what", "attention"), getattr(work, "backward", False)
                errors[kind].append(abs(costs_of(found).estimate(work).seconds / row.median - 1))
    medians = {kind: median(some) for kind, some in errors.items()}
    assert len(medians) >= 14
    within = {
        "linear": 0.05,
        "activation": 0.08,
        "rope": 0.08,
        "attention": 0.05,
        "cross-entropy": 0.05,
        "permute": 0.05,
    }
    assert {kind: one for kind, one in medians.items() if one > within.get(kind[0], 0.6)} == {}


def costs_of(found: Measurement) -> Costs:
    return Forecaster(
        "catalog", {**found.job, "plan": {"tp": 1, "zero": 0}, "cluster": {"gpu": "h200-sxm", "gpus": 1}}
    ).costs

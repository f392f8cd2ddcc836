"""The spread of peaks: planted ones are found, few runs are pulled to the others', and the shipped table is theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshcast.hardware.load import read_yaml
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.simulator.report.peak_errors import FILE, ROOM, STRANGER, PeakError
from meshcast.validation.published.fit.peak_spreads import (
    MIN_SCALE,
    LeftOutPeak,
    fit_spreads,
    forget_fits,
    measure_peaks,
)
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.rows import PublishedRun, read_files
from tests.validation.published.runs import row
from tools.data.peak_errors import write_table

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def draw(program: str, source: str, scale: float, count: int, seed: int = 1) -> list[LeftOutPeak]:
    """Peaks whose logarithms are drawn around 0, without fits twice as far, by a stranger four times."""
    ratios = scale * np.random.default_rng(seed).standard_t(4, count)
    return [LeftOutPeak(f"{source}-{i}", source, program, x, 2 * x, 4 * x) for i, x in enumerate(ratios.tolist())]


def test_planted_scales_are_found() -> None:
    peaks = draw("torchtitan", "a", 0.05, 1000) + draw("megatron-core", "b", 0.05, 1000, 2)
    found = fit_spreads(peaks)
    for name, factor in (("torchtitan", 1), ("nemo", 1), ("deepspeed", 2), (STRANGER, 4)):
        assert (found[name].below, found[name].above) == pytest.approx((factor * 0.05, factor * 0.05), rel=0.12)
    assert (found["nemo"].program, found["deepspeed"].program) == ("megatron-core", "others")
    assert set(found) == {*framework_names(), STRANGER}


def test_sides_are_fitted_apart() -> None:
    above = [replace(peak, log_ratio=abs(peak.log_ratio)) for peak in draw("torchtitan", "a", 0.1, 500)]
    found = fit_spreads(above)["torchtitan"]
    assert found.above == pytest.approx(0.1, rel=0.15) and found.below == MIN_SCALE


@pytest.mark.parametrize("better", [min, max])
def test_few_peaks_are_pulled_to_those_of_the_others(better: Callable[..., float]) -> None:
    """Between the scale of its own peaks and of the others', nearer to its own the more there are."""
    own, others = (0.01, 0.1) if better is min else (0.1, 0.01)
    rest = draw("megatron-core", "b", others, 500, 2)
    scales = [fit_spreads(draw("torchtitan", "a", own, count) + rest)["torchtitan"].above for count in (4, 400)]
    assert better(own, others) == own and abs(scales[1] - own) < abs(scales[0] - own) < abs(others - own)


def test_only_what_was_fitted_to_peaks_is_forgotten() -> None:
    for name in ("torchtitan", "megatron-core"):
        job = map_run(row(stack=name)).job
        job["framework"]["name"] = name
        changed = forget_fits(job)["framework"]["set"]
        fitted = any(field.startswith("memory") for field in load_framework(name).fitted)
        assert ("memory" in changed) == fitted and {**changed, "memory": 0} == {**job["framework"]["set"], "memory": 0}


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = fit_spreads(draw("torchtitan", "a", 0.05, 40) + draw("megatron-core", "b", 0.02, 40, 2))
    write_table(found, tmp_path / FILE)
    assert {name: PeakError(**entry) for name, entry in read_yaml(tmp_path / FILE).data.items()} == found


@pytest.mark.slow
def test_the_shipped_table_is_that_of_the_published_peaks() -> None:
    files = [SHARED / "published_runs.jsonl", SHARED / "published_runs_2.jsonl"]
    if not all(file.exists() for file in files):
        pytest.skip(f"there are no published runs in {SHARED}")
    runs = [run for run in read_files(files) if isinstance(run, PublishedRun)]
    shipped = {name: PeakError(**entry) for name, entry in read_yaml(ROOM / FILE).data.items()}
    assert fit_spreads(measure_peaks(runs)) == shipped, "make docs-peak-errors RUNS=... puts it right"

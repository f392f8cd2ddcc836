"""Calibrations from measurement files of collectives, measured here or imported."""

from pathlib import Path

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.check import check_folder
from meshcast.simulator.loading.load import load_job
from meshcast.validation.calibration.collectives.recorded import read_recorded
from meshcast.validation.measurements.forecasts import Forecaster
from meshcast.validation.measurements.measurement import Machine, Measurement, MeasurementRow
from tests.experiments.cli.test_app import run

JOB = {"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 16}, "plan": {"tp": 8}}
SIZES = [2**i for i in range(12, 31, 2)]


def file(path: Path, job: dict | None = JOB, rate: float = 300e9, kind: str = "collectives") -> Path:
    """All-reduces and all-gathers that take 30 us and their bytes at `rate`, in a node and between two."""
    rows = [
        MeasurementRow(
            name=f"{operation} {size}",
            samples=(3e-5 + size / (rate if members == 8 else rate / 4),),
            shape={"operation": operation, "bytes": size, "members": members},
        )
        for operation in ("all_reduce", "all_gather")
        for members in (8, 16)
        for size in SIZES
    ]
    return Measurement(
        kind=kind,  # type: ignore[arg-type]
        title="links",
        machine=Machine(device="cuda", name="NVIDIA H100 80GB HBM3", count=16),
        versions={},
        command="",
        job=load_job(job).to_dict() if job else {},
        forecast_written="then",
        measured="now",
        rows=tuple(rows),
    ).write(path)


def test_rows_become_samples_of_their_tiers(tmp_path: Path) -> None:
    found = read_recorded(file(tmp_path / "links.json"))
    assert {(one.operation, one.reach.members) for one in found.samples} == {("ring", 8), ("network", 16)}
    assert sum(len(one.index) for one in found.samples) == 4 * len(SIZES)
    assert "links.json" in found.source(found.samples[0])


def test_a_calibration_follows_the_measurements(tmp_path: Path) -> None:
    seconds = {}
    for rate in (150e9, 300e9):
        out = tmp_path / f"{rate:g}"
        result = run(
            "calibrate", "collectives", file(tmp_path / "links.json", rate=rate), "--out", out, "--no-leave-out"
        )
        assert result.exit_code == 0, result.stderr
        check_folder(out)
        assert (out / "nvlink4.yaml").is_file() and (out / "infiniband.yaml").is_file()
        tier = load_job(JOB).cluster.scale_up
        assert Calibration.from_folder(out).link_models(tier).model.ring.sigma > 0
        from meshcast.simulator.ir.ops import Collective

        plan = {
            "mesh": {"dp": 2, "tp": 8},
            "schemes": [{"use": "data/ddp", "over": "dp"}, {"use": "tensor/megatron", "over": "tp"}],
        }
        one = Forecaster("calibration", {**JOB, "plan": plan}, out)
        seconds[rate] = one.estimate_works([Collective("all_gather", 2**28, ("tp",))]).value
        assert seconds[rate] == pytest.approx(2**28 / rate, rel=0.25)
    assert seconds[150e9] > 1.6 * seconds[300e9]


def test_without_a_cluster_or_collectives_the_missing_part_is_named(tmp_path: Path) -> None:
    for path in (file(tmp_path / "a.json", job=None), file(tmp_path / "b.json", kind="kernels")):
        with pytest.raises(PlanError, match="the job whose cluster"):
            read_recorded(path)
    assert run("calibrate", "collectives", tmp_path / "absent.json", "--out", tmp_path / "o").exit_code == 2

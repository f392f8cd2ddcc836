"""Campaigns: every shipped job can be run, finished files are not measured again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.cli.campaign import _call_in_own_process
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements import campaign
from meshcast.validation.measurements.measurement import Measurement
from tests.jobs import change
from tests.validation.refused import CAMPAIGN, MEASUREMENT

FOLDER = Path(str(resources.files("meshcast.validation"))) / "campaigns"


def write_result(path: Path, kind: str, *notes: str) -> Measurement:
    """Writes the file of a finished measurement."""
    file = Measurement.model_validate({**MEASUREMENT, "kind": kind, "measured": "now", "notes": notes})
    file.write(path)
    return file


class Rooms:
    """Stands in for the measuring functions: records their calls, and writes a file, or fails with the errors."""

    def __init__(self, **errors: Exception) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.calibrated: list[Path] = []
        self.refreshed = 0
        self.errors = errors

    def measure_of(self, kind: str) -> Callable[..., Measurement]:
        def measure(job: Any, device: str, path: Path, **options: Any) -> Measurement:
            self.calls.append((path.stem, {"job": job, "device": device, **options}))
            if kind in self.errors:
                raise self.errors[kind]
            return write_result(path, kind)

        return measure

    def calibrate(self, device: str, folder: Path, processes: int) -> None:
        self.calibrated.append(folder)
        folder.mkdir(parents=True)
        (folder / "steps.yaml").write_text("", "utf-8")

    def refresh(self, *_: object) -> None:
        self.refreshed += 1

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


Go = Callable[..., list[Any]]


@pytest.fixture
def go(tmp_path: Path) -> Go:
    """Runs the campaign of two runs with changes."""

    def run(rooms: Rooms, changes: dict[str, Any] | None = None, out: str = "out", **options: Any) -> list[Any]:
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(change(CAMPAIGN, changes or {})), "utf-8")
        devices, minutes = options.get("devices"), options.get("minutes")
        tools = campaign.Tools(rooms.measure_of, rooms.calibrate, rooms.refresh, lambda folder: "h200-sxm", devices)
        return list(campaign.run_all(campaign.load(path), tmp_path / out, tools, "meshcast", minutes))

    return run


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.yaml")))
def test_shipped_campaigns_can_be_run(name: str) -> None:
    pytest.importorskip("torch")
    from meshcast.validation.distributed import trainer
    from meshcast.validation.reference.model import check

    shipped = campaign.load(FOLDER / name)
    for run in shipped.runs:
        plan = resolve_plan(load_job(shipped.job(run)))
        if run.measure == "distributed":
            trainer.check(plan)
            trainer.check_graphs(plan, shipped.device)
        elif run.measure != "collectives":
            check(plan)


def test_the_gpu_campaign_has_every_kind_of_parallelism() -> None:
    shipped = campaign.load(FOLDER / "gpu.yaml")
    plans = [run.set.get("plan", {}) for run in shipped.runs if run.measure == "distributed"]
    for axis in ("tp", "pp", "dp", "ep", "cp"):
        assert any(plan.get(axis, 1) > 1 for plan in plans), axis
    assert any(plan.get("fsdp") for plan in plans) and {plan.get("zero") for plan in plans} >= {0, 1}
    assert {1, 2, 4, 8} == {shipped.devices(run) for run in shipped.runs}
    assert all(run.minutes < 9 for run in shipped.runs)


def test_the_cpu_campaign_has_the_plans_that_were_asked_for() -> None:
    runs = campaign.load(FOLDER / "cpu.yaml").runs
    plans = [run.set["plan"] for run in runs if run.measure == "distributed"]
    assert len(plans) >= 12
    assert {plan.get("schedule") for plan in plans if plan.get("pp") == 2} >= {"gpipe", "1f1b"}
    assert any(plan.get("tp") == 2 for plan in plans) and any(plan.get("fsdp") for plan in plans)


def test_runs_replace_keys_of_their_job_and_pass_options_on(go: Go, tmp_path: Path) -> None:
    rooms = Rooms()
    assert [run.name for run, _ in go(rooms)] == ["first", "second"] == rooms.names
    second = rooms.calls[1][1]
    assert second["job"]["batch"] == {"global": 2} and second["steps"] == 3
    assert second["calibration"] == tmp_path / "out" / "calibration" == rooms.calibrated[0]


def test_the_speed_of_a_shared_machine_is_measured_again_before_each_step(go: Go) -> None:
    for changes, times in (({}, 0), ({"calibrate": {"processes": 2, "refresh": True}}, 1)):
        go(rooms := Rooms(), changes, out=f"out{times}")
        assert rooms.refreshed == times  # of a kernel and a step


def test_finished_runs_are_not_measured_again(go: Go, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_result(tmp_path / "out" / "first.json", "kernels")
    for note in ("interrupted", "not finished: a process failed"):
        write_result(tmp_path / "out" / "second.json", "distributed", note)
        go(rooms := Rooms())
        assert rooms.names == ["second"]
    assert len(go(again := Rooms())) == 2 and not again.calls and not again.calibrated


def test_a_run_that_fails_leaves_its_error_and_the_others_go_on(go: Go, tmp_path: Path) -> None:
    """An impossible one gives its reason; what the machine said is in a file."""
    (first, why), (_, second) = go(Rooms(kernels=PlanError("--device", "there is none", "Write cpu")))
    assert first.name == "first" and "there is none" in why.reason and why.failed and isinstance(second, Measurement)
    (_, why), (_, second) = go(Rooms(kernels=RuntimeError("CUDA error: device-side assert\nand more lines")), out="2")
    assert why.failed and why.reason.startswith("failed: RuntimeError: CUDA error: device-side assert (")
    assert "and more lines" in (tmp_path / "2" / "first.error.txt").read_text("utf-8")
    assert isinstance(second, Measurement)


def test_a_slice_starts_only_runs_that_end_in_time_and_the_next_one_resumes(go: Go) -> None:
    """The second run is expected to take 8 minutes: it does not fit behind the first one, and is the next slice."""
    for minutes, names in ((8.0, ["first"]), (9.0, ["second"]), (9.0, [])):
        go(rooms := Rooms(), {"runs": {1: {"minutes": 8}}}, minutes=minutes)
        assert rooms.names == names


def test_runs_that_need_more_devices_are_left_out_with_a_reason(go: Go) -> None:
    for device, end in (("cuda", "4 GPUs, and this machine has 2"), ("cpu", "4 cores, and this machine has 2; --yes")):
        change = {"device": device, "jobs": {"one": {"cluster": {"gpus": 4}}}}
        (_, kernels), (_, steps) = go(Rooms(), change, out=device, devices=2)
        assert isinstance(kernels, Measurement)
        assert steps.reason.startswith(f"not measured: it needs {end}") and not steps.failed


def test_auto_is_the_gpu_of_this_machine(go: Go) -> None:
    go(rooms := Rooms(), {"jobs": {"one": {"cluster": {"gpu": "auto"}}}})
    assert {call["job"]["cluster"]["gpu"] for _, call in rooms.calls} == {"h200-sxm"}


def test_options_of_runs_are_arguments_of_the_measuring_functions() -> None:
    pytest.importorskip("torch")
    from meshcast.experiments.cli.measuring import find_measuring

    for kind, options in campaign.OPTIONS.items():
        arguments = inspect.signature(find_measuring(kind)).parameters
        common = {"job", "device", "out", "calibration", "command", "progress", "crowded"}
        assert set(options) == set(arguments) - common, kind


def test_what_holds_memory_of_a_gpu_runs_in_a_process_of_its_own() -> None:
    assert _call_in_own_process(os.getpid) != os.getpid()
    with pytest.raises(PlanError, match="no such file"):
        _call_in_own_process(campaign.load, FOLDER / "none.yaml")

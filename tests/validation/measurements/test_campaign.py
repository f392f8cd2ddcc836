"""Campaigns: every shipped job can be run, finished files are not measured again."""

import inspect
import os
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements import campaign
from meshcast.validation.measurements.measurement import Machine, Measurement, MeasurementRow

FOLDER = Path(str(resources.files("meshcast.validation"))) / "campaigns"
SHIPPED = sorted(file.name for file in FOLDER.glob("*.yaml"))

SMALL = """
title: two runs
device: cpu
jobs:
  one: {model: gpt2-124m, cluster: {gpu: cpu-core, gpus: 1}, framework: reference, precision: fp32}
runs:
  - {name: first, measure: kernels, job: one}
  - {name: second, measure: distributed, job: one, set: {batch: {global: 2}}, options: {steps: 3}}
"""


def made(kind: str, notes: tuple[str, ...] = ()) -> Measurement:
    machine = Machine(device="cpu", name="a processor")
    fields = {
        "title": kind,
        "machine": machine,
        "versions": {},
        "command": "",
        "forecast_written": "then",
        "notes": notes,
    }
    return Measurement(kind=kind, rows=(MeasurementRow(name="step", samples=(1.0,)),), measured="now", **fields)  # type: ignore[arg-type]


class Rooms:
    """Stands in for the measuring functions: records their calls, and writes a file."""

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.calibrated: list[Path] = []
        self.refreshed = 0
        self.notes = notes

    def __call__(self, kind: str):
        def measure(job, device, path, **options):
            self.calls.append((path.stem, {"job": job, "device": device, **options}))
            found = made(kind, self.notes)
            found.write(path)
            return found

        return measure

    def calibrate(self, device: str, folder: Path, processes: int) -> None:
        self.calibrated.append(folder)
        folder.mkdir(parents=True)
        (folder / "steps.yaml").write_text("", "utf-8")

    def refresh(self, *_: object) -> None:
        self.refreshed += 1


def go(path: Path, out: Path, rooms: Rooms, devices: int | None = None, minutes: float | None = None) -> list:
    measure_of = getattr(rooms, "measure_of", rooms)
    tools = campaign.Tools(measure_of, rooms.calibrate, rooms.refresh, lambda folder: "h200-sxm", devices)
    return list(campaign.run_all(campaign.load(path), out, tools, "meshcast", minutes))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, "utf-8")
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_campaigns_can_be_run(name: str) -> None:
    pytest.importorskip("torch")
    from meshcast.validation.distributed.trainer import check as trained
    from meshcast.validation.distributed.trainer import check_graphs
    from meshcast.validation.reference.model import check

    found = campaign.load(FOLDER / name)
    for run in found.runs:
        plan = resolve_plan(load_job(found.job(run)))
        if run.measure == "distributed":
            trained(plan)
            check_graphs(plan, found.device)
        elif run.measure != "collectives":
            check(plan)


def test_the_gpu_campaign_has_every_kind_of_parallelism() -> None:
    found = campaign.load(FOLDER / "gpu.yaml")
    plans = [run.set.get("plan", {}) for run in found.runs if run.measure == "distributed"]
    for axis in ("tp", "pp", "dp", "ep", "cp"):
        assert any(plan.get(axis, 1) > 1 for plan in plans), axis
    assert any(plan.get("fsdp") for plan in plans) and {plan.get("zero") for plan in plans} >= {0, 1}
    assert {1, 2, 4, 8} == {found.devices(run) for run in found.runs}
    assert all(run.minutes < 9 for run in found.runs)


def test_the_cpu_campaign_has_the_plans_that_were_asked_for() -> None:
    found = campaign.load(FOLDER / "cpu.yaml")
    steps = [run for run in found.runs if run.measure == "distributed"]
    plans = [run.set["plan"] for run in steps]
    assert len(steps) >= 12
    assert {plan.get("schedule") for plan in plans if plan.get("pp") == 2} >= {"gpipe", "1f1b"}
    assert any(plan.get("tp") == 2 for plan in plans) and any(plan.get("fsdp") for plan in plans)


def test_runs_replace_keys_of_their_job_and_pass_options_on(small: Path, tmp_path: Path) -> None:
    rooms = Rooms()
    found = go(small, tmp_path / "out", rooms)
    assert [run.name for run, _ in found] == ["first", "second"] == [name for name, _ in rooms.calls]
    second = rooms.calls[1][1]
    assert second["job"]["batch"] == {"global": 2} and second["steps"] == 3
    assert second["calibration"] == tmp_path / "out" / "calibration" == rooms.calibrated[0]


def test_the_speed_of_a_shared_machine_is_measured_again_before_each_step(small: Path, tmp_path: Path) -> None:
    for words, times in (("device: cpu", 0), ("device: cpu\ncalibrate: {processes: 2, refresh: true}", 1)):
        small.write_text(SMALL.replace("device: cpu", words), "utf-8")
        rooms = Rooms()
        go(small, tmp_path / f"out{times}", rooms)
        assert rooms.refreshed == times  # of a kernel and a step


def test_finished_runs_are_not_measured_again(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    made("kernels").write(tmp_path / "out" / "first.json")
    for note in ("interrupted", "not finished: a process failed"):
        made("distributed", (note,)).write(tmp_path / "out" / "second.json")
        rooms = Rooms()
        go(small, tmp_path / "out", rooms)
        assert [name for name, _ in rooms.calls] == ["second"]
    again = Rooms()
    assert len(go(small, tmp_path / "out", again)) == 2 and not again.calls and not again.calibrated


def test_an_impossible_run_gives_its_reason_and_the_others_go_on(small: Path, tmp_path: Path) -> None:
    rooms = Rooms()

    def refusing(kind: str):
        if kind == "kernels":

            def refuse(*_, **__):
                raise PlanError("--device", "there is none", "Write cpu")

            return refuse
        return rooms(kind)

    rooms_that_refuse: Any = SimpleNamespace(
        __call__=refusing, calibrate=rooms.calibrate, refresh=rooms.refresh, measure_of=refusing
    )
    (first, why), (_, done) = go(small, tmp_path / "out", rooms_that_refuse)
    assert first.name == "first" and "there is none" in why.reason and why.failed and isinstance(done, Measurement)


def test_a_failed_run_leaves_its_error_in_a_file_and_the_others_go_on(small: Path, tmp_path: Path) -> None:
    class Failing(Rooms):
        def measure_of(self, kind: str):
            if kind == "kernels":
                raise RuntimeError("CUDA error: device-side assert\nand more lines")
            return self(kind)

    (_, why), (_, second) = go(small, tmp_path, Failing())
    assert why.failed and why.reason.startswith("failed: RuntimeError: CUDA error: device-side assert (")
    assert "and more lines" in (tmp_path / "first.error.txt").read_text("utf-8")
    assert isinstance(second, Measurement)


def test_a_slice_starts_only_runs_that_end_in_time_and_the_next_one_resumes(small: Path, tmp_path: Path) -> None:
    small.write_text(SMALL.replace("options: {steps: 3}", "options: {steps: 3}, minutes: 8"), "utf-8")
    for expected in (["first"], ["second"], []):
        rooms = Rooms()
        # The second run is expected to take 8 minutes: it does not fit behind the first one, and is the next slice.
        go(small, tmp_path / "out", rooms, minutes=8.0 if expected == ["first"] else 9.0)
        assert [name for name, _ in rooms.calls] == expected


def test_runs_that_need_more_gpus_are_left_out_with_a_reason(small: Path, tmp_path: Path) -> None:
    small.write_text(SMALL.replace("gpus: 1", "gpus: 4"), "utf-8")
    rooms = Rooms()
    (_, kernels), (_, steps) = go(small, tmp_path / "out", rooms, devices=2)
    assert isinstance(kernels, Measurement)
    assert steps == ("not measured: it needs 4 GPUs, and this machine has 2", False)


def test_auto_is_the_gpu_of_this_machine(small: Path, tmp_path: Path) -> None:
    small.write_text(SMALL.replace("gpu: cpu-core", "gpu: auto"), "utf-8")
    rooms = Rooms()
    go(small, tmp_path / "out", rooms)
    assert {call["job"]["cluster"]["gpu"] for _, call in rooms.calls} == {"h200-sxm"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("job: one}", "job: two}", "no job of this name"),
        ("name: second", "name: first", "two runs have the same name"),
        ("measure: kernels", "measure: nothing", "measure"),
        ("gpt2-124m", "gpt2-124", "model"),
        ("title: two runs", "titel: two runs", "titel"),
        ("options: {steps: 3}", "options: {step: 3}", "runs second options is 'step': .* Did you mean 'steps'"),
        ("options: {steps: 3}", "options: {out: /etc/passwd}", "runs second options is 'out'"),
    ],
)
def test_mistakes_are_reported_before_any_work(small: Path, old: str, new: str, message: str) -> None:
    small.write_text(SMALL.replace(old, new, 1), "utf-8")
    with pytest.raises(Exception, match=message):
        campaign.load(small)


def test_a_mistake_in_a_job_names_file_and_run(small: Path) -> None:
    small.write_text(SMALL.replace("precision: fp32", "precision: fp33"), "utf-8")
    with pytest.raises(PlanError) as refused:
        campaign.load(small)
    assert str(refused.value).startswith(f"{small} run first job.precision")


def test_options_of_runs_are_arguments_of_the_measuring_functions() -> None:
    pytest.importorskip("torch")
    from meshcast.experiments.cli.measuring import find_measuring

    for kind, options in campaign.OPTIONS.items():
        arguments = inspect.signature(find_measuring(kind)).parameters
        common = {"job", "device", "out", "calibration", "command", "progress"}
        assert set(options) == set(arguments) - common, kind


def test_what_holds_memory_of_a_gpu_runs_in_a_process_of_its_own() -> None:
    from meshcast.experiments.cli.campaign import _call_in_own_process

    assert _call_in_own_process(os.getpid) != os.getpid()
    with pytest.raises(PlanError, match="no such file"):
        _call_in_own_process(campaign.load, FOLDER / "none.yaml")

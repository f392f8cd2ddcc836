"""Written files, their time of writing, and the outcome of failing processes and interrupts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements.forecasts import forecasters
from meshcast.validation.measurements.measurement import Measurement, read, to_json
from tests.strategies import SHARE
from tests.validation.distributed.jobs import job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from meshcast.validation.distributed import launch, worker  # noqa: E402
from meshcast.validation.distributed.collectives import OPERATIONS, buffer_elements  # noqa: E402
from meshcast.validation.distributed.measure import _describe, _rows, measure, measure_collectives  # noqa: E402
from meshcast.validation.distributed.trainer import REHEARSALS, CapturedStep  # noqa: E402
from meshcast.validation.measurements.cuda import Cuda  # noqa: E402
from meshcast.validation.measurements.device import Device  # noqa: E402
from tests.validation.ranks import run_task  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def quiet(line: str) -> None:
    """Takes progress."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, Path, list[str]]:
    """Steps of two ranks: with `make test-all` torchrun's, otherwise forked, with torch imported."""
    folder, lines = tmp_path_factory.mktemp("measured"), []
    with pytest.MonkeyPatch.context() as patch:
        if SHARE > 1:
            patch.setattr(launch, "run", run_task)
        options: dict[str, Any] = {"trace": folder / "trace.json", "command": "typed", "progress": lines.append}
        return measure(job(pp=2), "cpu", folder / "steps.json", 3, 1, **options), folder, lines


def test_a_file_with_all_rows(measured: tuple[Measurement, Path, list[str]]) -> None:
    file, folder, _ = measured
    assert (folder / "steps.json").read_text("utf-8") == to_json(file)
    assert file.kind == "distributed" and file.machine.device == "cpu" and file.machine.count == 2
    assert file.command == "typed" and file.measured and file.measured >= file.forecast_written
    step, *peaks = file.rows
    assert (step.name, step.group, len(step.samples)) == ("step", "pp 2", 3) and min(step.samples) > 0
    assert [row.name for row in peaks] == ["rank 0 peak allocated", "rank 1 peak allocated"]
    assert any("sharded training equals serial training" in note for note in file.notes)
    assert file.job["plan"]["mesh"] == {"pp": 2, "dp": 1, "tp": 1}


def test_the_forecast_is_that_of_predict(measured: tuple[Measurement, Path, list[str]]) -> None:
    """Tokens and losses are in no forecast of memory, and are much of so small a model: one tenth."""
    answer = simulate(job(pp=2)).to_dict()
    step, *peaks = measured[0].rows
    forecast = step.forecasts["catalog"]
    assert (forecast.value, [forecast.low, forecast.high]) == (answer["step_time_s"], answer["interval_90_s"])
    for row, stage in zip(peaks, answer["memory"]["stages"], strict=True):
        assert row.forecasts["catalog"].value == pytest.approx(stage["peak_allocated_gib"] * GIB)
        assert row.error("catalog") == pytest.approx(0, abs=0.1)


def test_a_trace_and_progress(measured: tuple[Measurement, Path, list[str]]) -> None:
    _, folder, lines = measured
    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert names.count(worker.STEP_MARK) == 1 and "aten::addmm" in names
    assert lines[0].startswith("forecast written") and sum(line.startswith("step: ") for line in lines) == 3


def test_messages_are_told_with_their_units() -> None:
    sampled = {"operation": "all_reduce", "bytes": 65536, "seconds": [3e-6, 1e-6, 2e-6]}
    state = {"machine": {"states": {"during": {"sm_clock": 1980, "power": 650}}}}
    told = {
        "step: 1,500.0 ms": {"step": 1.5},
        "peak allocated: 1.0 MiB, 2.5 MiB": {"peaks": [{"allocated": 2**20}, {"allocated": 2.5 * 2**20}]},
        "all_reduce 65,536 bytes: 2.0 us": sampled,
        "GPU: 1980 MHz, 650 W": state,
        "no state of a GPU": {"machine": {"states": {}}},
        "trace written to t.json": {"trace": "t.json"},
    }
    assert {_describe(message): message for message in told.values()} == told


def test_the_forecast_is_written_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "steps.json"

    def interrupted(task: Any, world: int) -> Iterator[dict[str, Any]]:
        blind = read(out)
        assert blind.measured is None and all(row.forecasts and not row.samples for row in blind.rows)
        yield {"step": 0.25}
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(job(tp=2), "cpu", out, progress=quiet)
    kept = read(out)
    assert kept.rows[0].samples == (0.25,) and kept.notes[-1].startswith("interrupted") and kept.measured


def test_both_forecasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda task, world: (message for message in ()))
    (tmp_path / "own").mkdir()
    file = measure(job(tp=2), "cpu", tmp_path / "steps.json", calibration=tmp_path / "own", progress=quiet)
    assert all(set(row.forecasts) == {"catalog", "calibration"} for row in file.rows)
    assert file.calibration == str(tmp_path / "own")


@pytest.mark.parametrize("busy", [False, True])
def test_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    monkeypatch.setattr(launch, "run", run_task)
    monkeypatch.setattr("meshcast.validation.distributed.collectives.GEMM_SIZE", 8)
    options: dict[str, Any] = {"repeat": 2, "warmup": 1, "busy": busy, "progress": quiet}
    file = measure_collectives(job(), "cpu", tmp_path / "all.json", sizes := (1000, 65536), **options)
    assert (tmp_path / "all.json").read_text("utf-8") == to_json(file)
    assert [row.name for row in file.rows] == [f"{name} {size}" for name in OPERATIONS for size in sizes]
    for row in file.rows:
        assert len(row.samples) == 2 and min(row.samples) > 0 and row.forecasts["catalog"].value > 0
        assert row.shape["members"] == 2 and row.name == f"{row.shape['operation']} {row.shape['bytes']}"


def test_bytes_are_those_of_the_largest_buffer() -> None:
    assert buffer_elements(1024, 4) == 256
    assert buffer_elements(1000, 3) * 4 >= 1000 and buffer_elements(1000, 3) % 3 == 0


# ------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.slow
def test_a_failing_process_is_reported_in_one_sentence() -> None:
    with pytest.raises(PlanError, match=r"rank \d of cpu: the process failed with KeyError: 'nonsense'") as caught:
        list(launch.run({"what": "nonsense", "device": "cpu"}, 1))
    assert "\n" not in str(caught.value)


def test_the_first_error_is_reported(tmp_path: Path) -> None:
    """Ranks that lose their neighbour fail, too, a moment later."""
    mistake = {"where": "plan.tp", "rule": "a rule", "remedy": "Write 2", "value": 3}
    for rank, error in enumerate(({"when": 2.0, "line": "RuntimeError: connection lost"}, {"when": 1.0, **mistake})):
        (tmp_path / f"error.{rank}.json").write_text(json.dumps({"rank": rank, **error}), "utf-8")
    assert str(launch._error(tmp_path, "cpu")) == "plan.tp is 3: a rule. Write 2"


def test_the_cause_of_an_error_is_reported_in_one_line() -> None:
    cause, error = ValueError("what happened\nwhere in C++"), RuntimeError("\n  stage 0 failed\n")
    error.__cause__ = cause
    assert worker._line(error) == "ValueError: what happened" and worker._line(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("  exitcode  : -9 (pid: 7)\n", "killed by signal 9"),
        ("Traceback\nImportError: no such name\n exitcode : 1", "did not start: ImportError: no such name"),
        ("RuntimeError: the port is taken\n", "the port is taken"),
        ("", "they printed nothing"),
    ],
)
def test_processes_that_leave_no_word(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log, "utf-8")
    assert words in str(launch._error(tmp_path, "cpu"))


SCRIPT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
task = json.loads((folder / "task.json").read_text())
with (folder / "messages.jsonl").open("a") as file:
    file.write('{"first": 1}\\n{"second"')
    file.flush()
    time.sleep(task["seconds"])
    file.write(': 2}\\n')
if task["fails"]:
    (folder / "error.0.json").write_text(json.dumps({"when": 0, "rank": 0, "line": "KeyError: 'x'"}))
    sys.exit(1)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_messages_arrive_as_they_are_written(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the place of torchrun writes half a message, and the rest later; then it ends, or fails."""
    monkeypatch.setattr(launch, "_command", lambda world, folder: [sys.executable, "-c", SCRIPT, str(folder)])
    reports = launch.run({"device": "cpu", "seconds": 0.2, "fails": fails}, 1)
    assert [next(reports), next(reports)] == [{"first": 1}, {"second": 2}]
    if fails:
        with pytest.raises(PlanError, match="rank 0 of cpu: the process failed with KeyError"):
            next(reports)
    else:
        assert next(reports, None) is None


def test_processes_end_with_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen

    def keep(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", keep)
    monkeypatch.setattr(launch, "_command", lambda world, folder: [sys.executable, "-c", SCRIPT, str(folder)])
    reports = launch.run({"device": "cpu", "seconds": 600, "fails": False}, 1)
    assert next(reports) == {"first": 1}
    reports.close()
    assert started[0].poll() is not None
    for _ in range(100):  # whoever was killed is gone when its parent has looked
        try:
            os.killpg(started[0].pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("processes are left")


def test_the_environment_of_processes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread each, freed memory kept, gloo over the loopback device; what the user has set stays."""
    for name in ("GLIBC_TUNABLES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    variables = launch.environment("cpu")
    assert variables["OMP_NUM_THREADS"] == "3" and variables["GLIBC_TUNABLES"] == launch.MALLOC_TUNABLES
    assert variables["GLOO_SOCKET_IFNAME"] == "lo" or not Path("/sys/class/net/lo").exists()
    assert (variables["PYTHONSAFEPATH"], variables["PYTHONPATH"].split(os.pathsep)[0]) == ("1", str(ROOT))
    assert not {"GLIBC_TUNABLES", "GLOO_SOCKET_IFNAME"} & set(launch.environment("cuda"))


def test_a_trace_without_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "none.json"
    with pytest.raises(PlanError, match="--trace"):
        measure(job(), "cpu", out, trace=tmp_path / "nowhere" / "trace.json")
    assert not out.exists()


# ---------------------------------------------------------------------------- torchrun, and devices


@pytest.mark.slow
def test_under_torchrun_only_rank_0_writes(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    words = (
        "import json, sys\nfrom pathlib import Path\nfrom validation.distributed.measure import measure\n"
        "out = Path(sys.argv[1])\nmeasure(json.loads(sys.argv[2]), 'cpu', out / 'steps.json', 2, 1)\n"
    )
    script.write_text(words, "utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    environment = {name: value for name, value in launch.environment("cpu").items() if name != "GLIBC_TUNABLES"}
    command = [*torchrun, "--nproc-per-node=2", str(script), str(tmp_path), json.dumps(job(dp=2))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    file = read(tmp_path / "steps.json")
    assert len(file.rows[0].samples) == 2 and done.stderr.count("forecast written") == 1
    assert any("GLIBC_TUNABLES" in note for note in file.notes)


def test_a_world_of_another_size_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.under_torchrun() and not launch.is_rank_zero()
    with pytest.raises(PlanError, match="Start 4 processes"):
        launch.check_world_size(4, "cpu")


def test_a_cpu_without_room_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes beyond the cores, or tensors beyond the memory."""
    machine = Device.of("cpu").machine()
    for field, words in (("processors", "takes a core, and this machine has 1"), ("memory", "by the forecast")):
        smaller = machine.model_copy(update={"processors": 2, field: 1})
        monkeypatch.setattr(Device, "machine", lambda device, count=1, smaller=smaller: smaller)
        with pytest.raises(PlanError, match=words):
            measure(job(pp=2), "cpu", tmp_path / "none.json", crowded=False)
    assert not [*tmp_path.iterdir()]


def test_gpus_are_counted_before_processes_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_cuda: Any
) -> None:
    fake_cuda.gpus = 2
    launch.check_world_size(2, "cuda")
    with pytest.raises(PlanError, match="this machine has 2 GPUs"):
        launch.check_world_size(4, "cuda")
    monkeypatch.setattr(fake_cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="torch finds no CUDA device"):
        measure(job(), "cuda", tmp_path / "none.json")


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there: the index that is asked for, and the device passed to NCCL."""
    asked: list[Any] = []

    def of(kind: str, index: int) -> Any:
        return SimpleNamespace(cuda=Cuda(index), backend="nccl", torch=torch.device(kind, index))

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(worker, "Device", SimpleNamespace(of=of))
    monkeypatch.setattr(worker.dist, "init_process_group", lambda *args, **options: asked.append((args, options)))
    monkeypatch.setattr(worker.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(worker.dist, "destroy_process_group", lambda: asked.append("destroyed"))
    monkeypatch.setitem(worker.TASKS, "place", lambda task, device: iter([{"device": str(device.torch)}]))
    assert list(worker.run({"what": "place", "device": "cuda"})) == [{"device": "cuda:3"}]
    ((backend,), options), last = asked
    assert (backend, options["device_id"], last) == ("nccl", torch.device("cuda", 3), "destroyed")


def test_reserved_memory_of_devices_that_report_it() -> None:
    counts = {"allocated": 10, "reserved": 20, "device": 30}
    peaks = [{"instrument": "counter", **{kind: n + rank for kind, n in counts.items()}} for rank in range(4)]
    plan = resolve_plan(load_job(job(4, pp=2, tp=2)))
    rows = {row.name: row for row in _rows(plan, forecasters(job(4, pp=2, tp=2), None), "cuda", [1.0], peaks)}
    assert {name: row.samples for name, row in rows.items() if "peak" in name} == {
        f"rank {rank} peak {kind}": (n + rank,) for rank in range(4) for kind, n in counts.items()
    }
    assert [rows[f"rank {rank} peak reserved"].shape["pipeline device"] for rank in range(4)] == [0, 0, 1, 1]
    memory = plan.job.framework.memory
    allocated, reserved, device = (rows[f"rank 0 peak {kind}"].forecasts["catalog"].value for kind in counts)
    assert reserved == pytest.approx(allocated * memory.reserved_share)
    assert device == pytest.approx(reserved + memory.context_gib * GIB)


def test_steps_that_cannot_be_captured_are_refused(tmp_path: Path, fake_cuda: Any) -> None:
    graphs = {"framework": {"name": "reference", "set": {"cuda_graphs": True}}}
    with pytest.raises(PlanError, match="without pipeline and data parallelism"):
        measure({**job(pp=2), **graphs}, "cuda", tmp_path / "none.json")


def test_a_captured_step_follows_its_rehearsals(fake_cuda: Any) -> None:
    """The first steps run on a stream of their own; a replayed one reads the tokens of its own step."""
    device, seen = Device.of("cuda"), []

    def step(inputs: Any) -> None:
        assert device.cuda is not None
        seen.append((device.cuda.current_stream().name, inputs[0]))

    trainer: Any = SimpleNamespace(place=SimpleNamespace(device=device), step=step)
    run_step = CapturedStep(trainer)
    for number in range(REHEARSALS + 3):
        run_step((torch.full((2,), number), None))
    assert [stream for stream, _ in seen] == ["stream 1"] * REHEARSALS + ["compute"]
    (graph,) = fake_cuda.graphs
    assert graph.replays == 3 and seen[-1][1].tolist() == [REHEARSALS + 2] * 2

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
from meshcast.validation.measurements.measurement import Measurement, read, to_json
from tests.strategies import SHARE
from tests.validation.distributed.jobs import job
from tests.validation.distributed.processes import run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from meshcast.validation.distributed.worker import STEP_MARK  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def quiet(line: str) -> None:
    """Takes progress."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, Path, list[str]]:
    """Steps of two ranks: with `make test-all` torchrun's, otherwise forked, with torch imported."""
    from meshcast.validation.distributed import launch
    from meshcast.validation.distributed.measure import measure

    folder, lines = tmp_path_factory.mktemp("measured"), []
    with pytest.MonkeyPatch.context() as patch:
        if SHARE > 1:
            patch.setattr(launch, "run", run)
        found = measure(
            job(pp=2),
            "cpu",
            folder / "steps.json",
            3,
            1,
            trace=folder / "trace.json",
            command="typed",
            progress=lines.append,
        )
    return found, folder, lines


def test_a_file_with_all_rows(measured: tuple[Measurement, Path, list[str]]) -> None:
    found, folder, _ = measured
    assert (folder / "steps.json").read_text("utf-8") == to_json(found)
    assert found.kind == "distributed" and found.machine.device == "cpu" and found.machine.count == 2
    assert found.command == "typed" and found.measured and found.measured >= found.forecast_written
    step, *peaks = found.rows
    assert (step.name, step.group, len(step.samples)) == ("step", "pp 2", 3) and min(step.samples) > 0
    assert [row.name for row in peaks] == ["rank 0 peak allocated", "rank 1 peak allocated"]
    assert any("sharded training equals serial training" in note for note in found.notes)
    assert found.job["plan"]["mesh"] == {"pp": 2, "dp": 1, "tp": 1}


def test_the_forecast_is_that_of_predict(measured: tuple[Measurement, Path, list[str]]) -> None:
    found, _, _ = measured
    answer = simulate(job(pp=2)).to_dict()
    step, *peaks = found.rows
    forecast = step.forecasts["catalog"]
    assert (forecast.value, [forecast.low, forecast.high]) == (answer["step_time_s"], answer["interval_90_s"])
    for row, stage in zip(peaks, answer["memory"]["stages"], strict=True):
        assert row.forecasts["catalog"].value == pytest.approx(stage["peak_allocated_gib"] * GIB)


def test_memory_is_that_of_the_forecast(measured: tuple[Measurement, Path, list[str]]) -> None:
    """Tokens and losses are in no forecast, and are much of so small a model: one tenth."""
    for row in measured[0].rows[1:]:
        error = row.error("catalog")
        assert error is not None and abs(error) < 0.1


def test_a_trace_and_progress(measured: tuple[Measurement, Path, list[str]]) -> None:
    _, folder, lines = measured
    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert names.count(STEP_MARK) == 1 and "aten::addmm" in names
    assert lines[0].startswith("forecast written") and sum(line.startswith("step: ") for line in lines) == 3


def test_the_forecast_is_written_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshcast.validation.distributed import launch
    from meshcast.validation.distributed.measure import measure

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
    from meshcast.validation.distributed import launch
    from meshcast.validation.distributed.measure import measure

    monkeypatch.setattr(launch, "run", lambda task, world: (one for one in ()))
    (tmp_path / "own").mkdir()
    found = measure(job(tp=2), "cpu", tmp_path / "steps.json", calibration=tmp_path / "own", progress=quiet)
    assert all(set(row.forecasts) == {"catalog", "calibration"} for row in found.rows)
    assert found.calibration == str(tmp_path / "own")


@pytest.mark.slow
def test_collectives(tmp_path: Path) -> None:
    from meshcast.validation.distributed.collectives import OPERATIONS
    from meshcast.validation.distributed.measure import measure_collectives

    sizes = (1000, 65536)
    found = measure_collectives(job(), "cpu", tmp_path / "all.json", sizes, repeat=3, warmup=1, progress=quiet)
    assert (tmp_path / "all.json").read_text("utf-8") == to_json(found)
    assert [row.name for row in found.rows] == [f"{name} {size}" for name in OPERATIONS for size in sizes]
    for row in found.rows:
        assert len(row.samples) == 3 and min(row.samples) > 0 and row.forecasts["catalog"].value > 0
        assert row.shape["members"] == 2 and row.name == f"{row.shape['operation']} {row.shape['bytes']}"


def test_bytes_are_those_of_the_largest_buffer() -> None:
    from meshcast.validation.distributed.collectives import buffer_elements

    assert buffer_elements(1024, 4) == 256
    assert buffer_elements(1000, 3) * 4 >= 1000 and buffer_elements(1000, 3) % 3 == 0


# ------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.slow
def test_a_failing_process_is_reported_in_one_sentence() -> None:
    from meshcast.validation.distributed import launch

    with pytest.raises(PlanError, match=r"rank \d of cpu: the process failed with KeyError: 'nonsense'") as caught:
        list(launch.run({"what": "nonsense", "device": "cpu"}, 1))
    assert "\n" not in str(caught.value)


def test_the_first_error_is_reported(tmp_path: Path) -> None:
    """Ranks that lose their neighbour fail, too, a moment later."""
    from meshcast.validation.distributed.launch import _error

    mistake = {"where": "plan.tp", "rule": "a rule", "remedy": "Write 2", "value": 3}
    for rank, error in enumerate(({"when": 2.0, "line": "RuntimeError: connection lost"}, {"when": 1.0, **mistake})):
        (tmp_path / f"error.{rank}.json").write_text(json.dumps({"rank": rank, **error}), "utf-8")
    assert str(_error(tmp_path, "cpu")) == "plan.tp is 3: a rule. Write 2"


def test_the_cause_of_an_error_is_reported_in_one_line() -> None:
    from meshcast.validation.distributed.worker import _line

    cause, error = ValueError("what happened\nwhere in C++"), RuntimeError("\n  stage 0 failed\n")
    error.__cause__ = cause
    assert _line(error) == "ValueError: what happened" and _line(KeyError()) == "KeyError"


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
    from meshcast.validation.distributed.launch import _error

    (tmp_path / "log").write_text(log, "utf-8")
    assert words in str(_error(tmp_path, "cpu"))


@pytest.mark.slow
def test_processes_end_with_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshcast.validation.distributed import launch

    started: list[Any] = []
    start = subprocess.Popen

    def keep(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", keep)
    task = {"what": "steps", "job": job(1), "device": "cpu", "steps": 10**6, "warmup": 1, "check": False}
    reports = launch.run(task | {"trace": None}, 1)
    assert "warmup" in next(reports)
    reports.close()
    assert started[0].poll() is not None
    for _ in range(100):  # whoever was killed is gone when its parent has looked
        try:
            os.killpg(started[0].pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("processes are left")


def test_refusals(tmp_path: Path) -> None:
    from meshcast.validation.distributed.measure import measure, measure_collectives

    out = tmp_path / "none.json"
    with pytest.raises(PlanError, match="--steps is 0"):
        measure(job(), "cpu", out, steps=0)
    with pytest.raises(PlanError, match="Did you mean 'all_reduce'"):
        measure_collectives(job(), "cpu", out, operations=["allreduce"])
    with pytest.raises(PlanError, match="at least two ranks"):
        measure_collectives(job(1), "cpu", out)
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
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    from meshcast.validation.distributed import launch

    environment = {name: value for name, value in launch.environment("cpu").items() if name != "GLIBC_TUNABLES"}
    command = [*run, "--nproc-per-node=2", str(script), str(tmp_path), json.dumps(job(dp=2))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    found = read(tmp_path / "steps.json")
    assert len(found.rows[0].samples) == 2 and done.stderr.count("forecast written") == 1
    assert any("GLIBC_TUNABLES" in note for note in found.notes)


def test_a_world_of_another_size_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshcast.validation.distributed import launch

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.under_torchrun() and not launch.is_rank_zero()
    with pytest.raises(PlanError, match="Start 4 processes"):
        launch.check_world_size(4, "cpu")


def test_gpus_are_counted_before_processes_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_cuda: Any
) -> None:
    from meshcast.validation.distributed import launch
    from meshcast.validation.distributed.measure import measure

    fake_cuda.gpus = 2
    launch.check_world_size(2, "cuda")
    with pytest.raises(PlanError, match="this machine has 2 GPUs"):
        launch.check_world_size(4, "cuda")
    assert "GLIBC_TUNABLES" not in set(launch.environment("cuda")) - set(os.environ)
    monkeypatch.setattr(fake_cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="torch finds no CUDA device"):
        measure(job(), "cuda", tmp_path / "none.json")


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there: the index that is asked for, and the device passed to NCCL."""
    from meshcast.validation.distributed import worker
    from meshcast.validation.measurements.cuda import Cuda

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
    from meshcast.simulator.loading.load import load_job
    from meshcast.validation.distributed.measure import _rows
    from meshcast.validation.measurements.forecasts import forecasters

    peaks = [
        {"instrument": "counter", "allocated": 10 + rank, "reserved": 20 + rank, "device": 30 + rank}
        for rank in range(4)
    ]
    plan = resolve_plan(load_job(job(4, pp=2, tp=2)))
    rows = {row.name: row for row in _rows(plan, forecasters(job(4, pp=2, tp=2), None), "cuda", [1.0], peaks)}
    assert rows["rank 3 peak allocated"].samples == (13,) and rows["rank 2 peak reserved"].samples == (22,)
    assert [rows[f"rank {rank} peak reserved"].shape["pipeline device"] for rank in range(4)] == [0, 0, 1, 1]
    share = plan.job.framework.memory.reserved_share
    allocated, reserved = (rows[f"rank 0 peak {kind}"].forecasts["catalog"].value for kind in ("allocated", "reserved"))
    assert reserved == pytest.approx(allocated * share)
    assert rows["rank 1 peak device"].samples == (31,)
    context = plan.job.framework.memory.context_gib * 2**30
    assert rows["rank 1 peak device"].forecasts["catalog"].value == pytest.approx(reserved + context)


def test_steps_that_cannot_be_captured_are_refused(tmp_path: Path, fake_cuda: Any) -> None:
    from meshcast.validation.distributed.measure import measure

    graphs = {"framework": {"name": "reference", "set": {"cuda_graphs": True}}}
    with pytest.raises(PlanError, match="only CUDA devices have graphs"):
        measure({**job(), **graphs}, "cpu", tmp_path / "none.json")
    with pytest.raises(PlanError, match="without pipeline and data parallelism"):
        measure({**job(pp=2), **graphs}, "cuda", tmp_path / "none.json")


def test_a_captured_step_follows_its_rehearsals(fake_cuda: Any) -> None:
    """The first steps run on a stream of their own; a replayed one reads the tokens of its own step."""
    from types import SimpleNamespace

    from meshcast.validation.distributed.trainer import REHEARSALS, CapturedStep
    from meshcast.validation.measurements.device import Device

    device, seen = Device.of("cuda"), []

    def step(inputs: Any) -> None:
        assert device.cuda is not None
        seen.append((device.cuda.current_stream().name, inputs[0]))

    trainer: Any = SimpleNamespace(place=SimpleNamespace(device=device), step=step)
    run = CapturedStep(trainer)
    for number in range(REHEARSALS + 3):
        run((torch.full((2,), number), None))
    assert [stream for stream, _ in seen] == ["stream 1"] * REHEARSALS + ["compute"]
    (graph,) = fake_cuda.graphs
    assert graph.replays == 3 and seen[-1][1].tolist() == [REHEARSALS + 2] * 2

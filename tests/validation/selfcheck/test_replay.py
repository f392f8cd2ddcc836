"""`predict --verify` and `check JOB`: replays on SimPy and on ranks catch a wrong engine; what SimPy did is drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshcast.experiments.cli import predict as command_line
from meshcast.simulator import simulate
from meshcast.simulator.engine import play, simpy_engine
from meshcast.simulator.engine.maxplus import Coordinates
from meshcast.simulator.engine.per_rank import Pace
from meshcast.simulator.engine.play import ByMatrices, ByOps
from meshcast.validation.selfcheck import replay as module
from meshcast.validation.selfcheck.replay import replay, replay_on_simpy
from tests.experiments.cli.samples import run

JOB = """\
model: {layers: 4, hidden: 256, heads: 4, vocab: 1024, seq: 128}
cluster: dgx-h100:1
batch: {global: 8}
plan: {tp: 2, pp: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, "utf-8")
    return path


def slow_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the last GEMM of a projection 1 % longer on SimPy."""
    play_ops = simpy_engine.play

    def play_slower(flat: Any, *arguments: Any, **options: Any) -> Any:
        seconds = [*flat.seconds]
        seconds[max(number for number, op in enumerate(flat.ops) if op.name == "qkv")] *= 1.01
        return play_ops(replace(flat, seconds=seconds), *arguments, **options)

    monkeypatch.setattr(simpy_engine, "play", play_slower)


def slow_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every matrix say that its task takes a microsecond longer."""
    matrix = Coordinates.matrix
    monkeypatch.setattr(Coordinates, "matrix", lambda self, task: matrix(self, task) + 1e-6)


def slow_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the timeline of the sweep late at its begin alone."""
    sweep = play.longest_path

    def sweep_late(*arguments: Any) -> Any:
        times = sweep(*arguments)
        return replace(times, begin=[times.begin[0] + 1e-6, *times.begin[1:]])

    monkeypatch.setattr(play, "longest_path", sweep_late)


def slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives every rank a pace of its own."""
    monkeypatch.setattr(module, "Pace", lambda: Pace(jitter=1e-4))


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "SimPy": slow_simpy,
    "matrices": slow_matrices,
    "sweep": slow_sweep,
    "ranks": slow_rank,
}


@pytest.mark.parametrize("engine", WRONG)
def test_a_wrong_engine_is_caught(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[engine](monkeypatch)
    _, (simpy, ranks) = replay(simulate(yaml.safe_load(JOB)))
    assert simpy.agrees == (engine == "ranks") and ranks.agrees == (engine in ("SimPy", "sweep"))
    assert all(played.agrees or 1e-9 < played.difference < 0.01 for played in (simpy, ranks))


def test_commands_say_that_an_engine_is_wrong(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_simpy(monkeypatch)
    for words in (("predict", job, "--verify"), ("check", job)):
        done = run(*words)
        assert done.exit_code == 1, done.output
        text = " ".join(done.stdout.split())
        assert "the largest difference of" in text and "of the step: " in text and "the forecast is" in text
    answer = json.loads(run("check", job, "--json").stdout)
    assert answer["violations"] == 1 and [played["agrees"] for played in answer["replays"]] == [False, True]
    assert {row["jobs"] for row in answer["checks"]} == {1}
    assert run("predict", job).exit_code == 0


def test_a_forecast_that_agrees_says_so(job: Path) -> None:
    text = " ".join((done := run("predict", job, "--verify")).stdout.split())
    assert done.exit_code == 0 and "verified SimPy, op by op: the same step" in text, done.output
    assert "verified 8 ranks, each by itself: the same step" in text
    answer = json.loads(run("predict", job, "--verify", "--json").stdout)
    replays = answer.pop("replays")
    assert answer == json.loads(run("predict", job, "--json").stdout)
    for played in replays:
        assert played["agrees"] and played["difference"] < 1e-9 and played["figures"] > 100
        assert played["step_time_s"] == pytest.approx(answer["step_time_s"], rel=1e-9)
    held = run("check", job)
    assert held.exit_code == 0 and "SimPy, op by op: the same step" in held.stdout, held.output


# ------------------------------------------------------------------------------------- what is drawn


def kernels(path: Path) -> list[tuple[str, float, float]]:
    """Name, begin and length of all slices of a trace [us]."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]


def test_a_trace_of_a_replay_has_the_events_of_simpy(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast, same, slower = (job.parent / f"{name}.json" for name in ("forecast", "same", "slower"))
    assert run("predict", job, "--trace", forecast).exit_code == 0
    assert run("predict", job, "--verify", "--trace", same).exit_code == 0
    assert kernels(same) == kernels(forecast)
    slow_simpy(monkeypatch)
    assert run("predict", job, "--verify", "--trace", slower).exit_code == 1
    changed = [
        (ours, theirs) for ours, theirs in zip(kernels(forecast), kernels(slower), strict=True) if ours != theirs
    ]
    assert any("gemm(qkv)" in ours[0] and theirs[2] > ours[2] for ours, theirs in changed)


@pytest.mark.parametrize("words", [("--plot", "timeline.png"), ("--trace", "trace.json")])
def test_files_are_made_of_simpys_report(job: Path, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(command_line, "draw", lambda report, *_: drawn.append(report))
    monkeypatch.setattr(command_line.traces, "write_files", lambda report, *_: drawn.append(report))
    for verify in ((), ("--verify",)):
        assert run("predict", job, words[0], job.parent / words[1], *verify).exit_code == 0
    assert [type(report.play.step) for report in drawn] == [ByMatrices, ByMatrices, ByOps, ByOps]


# ----------------------------------------------------------------------------------------- edges


def test_steps_of_several_kinds_are_all_replayed() -> None:
    local = {
        "model": "gpt2-124m",
        "cluster": "dgx-h100:1",
        "batch": {"global": 16},
        "plan": {"mesh": {"dp": 8}, "schemes": [{"use": "data/local-sgd", "over": "dp", "period": 4}]},
    }
    report = simulate(local)
    on_simpy, replays = replay(report)
    assert len(on_simpy.step_kinds) == len(report.step_kinds) == 2
    assert all(played.agrees for played in replays)
    assert on_simpy.step_time == pytest.approx(report.step_time, rel=1e-9)


def test_no_number_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    report = simulate({"model": "gpt2-124m", "cluster": "dgx-h100:1"})
    times = report.play.step.times
    monkeypatch.setitem(report.play.step.__dict__, "times", replace(times, end=[math.nan, *times.end[1:]]))
    _, replayed = replay_on_simpy(report)
    assert not replayed.agrees and replayed.place.startswith("the end of ")


def test_the_progress_is_shown_over_the_step_and_what_is_played_at_once() -> None:
    shown: dict[str, list[Any]] = {}

    def track(items: Iterable[Any], label: str) -> Iterable[Any]:
        shown[label] = [*items]
        return shown[label]

    report = simulate({"model": "gpt2-124m", "cluster": "dgx-h100:1", "plan": {"tp": 4}})
    _, replays = replay(report, track)
    moments, waves = shown["playing on SimPy"], shown["playing 8 ranks"]
    assert all(played.agrees for played in replays)
    assert moments[-1] == report.play.step.span and np.all(np.diff(moments) > 0)
    ops = sum(piece.stop - piece.start for wave in waves for piece, _ in wave)
    assert ops == len(report.play.step.flat.ops)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--engine", "shared"), "only SimPy plays contention"),
        (("--engine", "simpy"), "it holds another engine against SimPy"),
    ],
)
def test_what_cannot_be_held_against_simpy_is_refused(job: Path, words: tuple[str, str], text: str) -> None:
    done = run("predict", job, "--verify", *words)
    assert done.exit_code == 2 and text in done.stderr and done.stdout == ""
    assert run("check", job, "--jobs", "3").exit_code == 2


def test_an_interruption_inside_a_process_of_simpy_ends_the_command(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("simpy.Environment.timeout", interrupt)
    assert run("predict", job, "--verify").exit_code == 130

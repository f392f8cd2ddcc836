"""Sweeps on a Dask cluster: the same bytes as on this machine, also after workers were killed; what is refused."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.sweeps import cluster
from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.fingerprint import SweepInputs
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.store import Shard
from meshcast.hardware.errors import PlanError
from tests.experiments.sweeps.sweeps import GRID, Lazy

pytestmark = pytest.mark.usefixtures("known_forecasts")


def on(scheduler: Any) -> str:
    return scheduler.scheduler_address.replace("tcp://", "dask://")


IN_THIS_PROCESS: dict[str, Any] = {
    "processes": False,
    "protocol": "tcp://",
    "host": "127.0.0.1",
    "dashboard_address": None,
    "worker_dashboard_address": None,
}
"""Options of a cluster whose workers are threads."""


@pytest.fixture(scope="module")
def threads() -> Iterator[Any]:
    """A cluster of one worker with two threads, in this process."""
    distributed = pytest.importorskip("distributed", reason="needs distributed: pip install -e '.[cluster]'")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, **IN_THIS_PROCESS) as scheduler:
        yield scheduler


def test_a_cluster_gives_the_same_bytes_and_goes_on_from_stored_rows(
    threads: Any, reference: Path, small_chunks: None, tmp_path: Path
) -> None:
    out, seen = tmp_path / "rows.parquet", list[int]()

    def stop(done: int, points: int) -> None:
        seen.append(done)
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, on=on(threads), watch=stop)
    assert seen == [0, 4, 8, 12] and len(list(parts_folder(out).glob("0*.parquet"))) == 3
    run(load_sweep(GRID), out, on=on(threads), watch=lambda done, points: seen.append(done))
    assert seen[4:] == [12, 16, 20, 24, 28, 32]
    assert out.read_bytes() == reference.read_bytes() and not parts_folder(out).exists()


@pytest.mark.slow
def test_chunks_are_submitted_as_others_finish(
    threads: Any, reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "AHEAD", 3)
    run(load_sweep(GRID), tmp_path / "rows.parquet", on=on(threads))
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


def test_rows_that_arrived_before_their_worker_died_are_kept(
    threads: Any, reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    class LostAfterwards(distributed.as_completed):  # type: ignore[misc]
        """Chunks whose results the scheduler loses once they were gathered."""

        def __next__(self) -> Any:
            future, rows = super().__next__()
            future._state.lose()
            return future, rows

    monkeypatch.setattr(distributed, "as_completed", LostAfterwards)
    run(load_sweep(GRID), tmp_path / "rows.parquet", on=on(threads))
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


def test_a_cluster_without_workers_is_told_of_and_waited_for(
    reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed", reason="needs distributed: pip install -e '.[cluster]'")
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    told = list[str]()
    with distributed.LocalCluster(n_workers=0, **IN_THIS_PROCESS) as empty:

        def start_worker(sentence: str) -> None:
            told.append(sentence)
            empty.scale(1)

        run(load_sweep(GRID), tmp_path / "rows.parquet", on=on(empty), tell=start_worker)
    assert told == ["the cluster has no worker; the sweep goes on as soon as it has one"]
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


@pytest.mark.slow
def test_a_shard_on_a_cluster(threads: Any, small_chunks: None, tmp_path: Path) -> None:
    run(load_sweep(GRID), tmp_path / "here.parquet", Lazy(), part=Shard(2, 3))
    run(load_sweep(GRID), tmp_path / "there.parquet", on=on(threads), part=Shard(2, 3))
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()


def test_a_worker_with_other_inputs_is_refused(
    threads: Any, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def differ(sweep: Any, chunk: int) -> SweepInputs:
        made = SweepInputs(sweep, chunk)
        if not asked:  # the first is that of the command
            made.fingerprint = {**made.fingerprint, "code": "other", "calibration": "other"}
        asked.append("inputs")
        return made

    monkeypatch.setattr(cluster, "SweepInputs", differ)
    with pytest.raises(PlanError, match=r"--on: worker tcp://\S+ on \S+ has another code, calibration than this comm"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", on=on(threads))
    assert not (tmp_path / "rows.parquet").exists()


def test_a_worker_that_cannot_forecast_is_one_message(
    threads: Any, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sweep: Any, number: int, size: int) -> Any:
        raise ModuleNotFoundError("No module named 'simulator'")

    monkeypatch.setattr(sweeps, "forecast_numbered", fail)
    with pytest.raises(PlanError, match=r"cannot run meshcast \(ModuleNotFoundError: No module named 'simulator'\)"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", on=on(threads))


def test_a_scheduler_that_does_not_answer_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs distributed: pip install -e '.[cluster]'")
    monkeypatch.setattr(cluster, "CONNECT_S", 0.1)
    with pytest.raises(PlanError, match=r"--on is 'dask://127\.0\.0\.1:1': no Dask scheduler answers"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", on="dask://127.0.0.1:1")


def test_a_missing_package_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(PlanError, match=r"distributed, which is not installed\. pip install 'meshcast\[cluster\]'"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", on="dask://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills workers by a signal of POSIX")
def test_killed_workers_lose_no_row_and_double_none(
    reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills both workers of a cluster while each is at work on a chunk; their nannies start others."""
    distributed = pytest.importorskip("distributed", reason="needs distributed: pip install -e '.[cluster]'")
    out, gate, stored, forecast = tmp_path / "rows.parquet", tmp_path / "gate", list[int](), sweeps.forecast_numbered
    killed = dict[str, int]()
    gate.mkdir()

    def forecast_after_the_kill(sweep: Any, number: int, size: int) -> Any:
        import time
        from contextlib import suppress

        with suppress(FileExistsError):  # the first chunk of all goes on
            (gate / "first").touch(exist_ok=False)
            return forecast(sweep, number, size)
        while not (gate / "open").exists():
            time.sleep(0.01)
        return forecast(sweep, number, size)

    def kill(done: int, points: int) -> None:
        stored.append(done)
        if done == 4:
            while not all(made.scheduler.workers[address].processing for address in killed):
                time.sleep(0.01)
            for pid in killed.values():
                os.kill(pid, signal.SIGKILL)
            (gate / "open").touch()

    monkeypatch.setattr(sweeps, "forecast_numbered", forecast_after_the_kill)
    options = {"host": "127.0.0.1", "dashboard_address": None, "worker_dashboard_address": None}
    workers = distributed.LocalCluster(n_workers=2, threads_per_worker=1, **options)
    with workers as made, distributed.Client(made) as client:
        killed.update(client.run(os.getpid))
        run(load_sweep(GRID), out, on=on(made), watch=kill)
        left = client.run(os.getpid)
    assert len(killed) == 2 and not set(killed.values()) & set(left.values())
    assert stored == list(range(0, 33, 4))  # every chunk once
    assert out.read_bytes() == reference.read_bytes() and not parts_folder(out).exists()

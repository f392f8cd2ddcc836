"""Sweeps that are stopped: interrupted, out of room; they go on where they were. Kills: `tests.fuzz.kills`."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps import fingerprint as inputs
from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import Sweep, load_sweep, run
from meshcast.hardware.errors import PlanError
from tests.experiments.cli.samples import unprivileged
from tests.experiments.sweeps.sweeps import GRID, ROOT, Lazy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals of POSIX")


# --------------------------------------------------------------------------- what stops a real process

KILLED = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets tests in its background ignore it
import sys
from meshcast.experiments.sweeps import fingerprint as inputs
from meshcast.experiments.sweeps import run as sweeps
sweeps.CHUNK = 4
from meshcast.experiments.cli.start import main
main()
"""


SLOW = """\
import time
from meshcast.experiments.sweeps.store import Store
keep = Store.keep
def kept(*args):
    keep(*args)
    time.sleep(0.5)
Store.keep = kept
"""
"""So much time after every part that nobody is too late to stop it."""


def process(folder: Path, *words: str, slow: bool = False) -> subprocess.Popen[bytes]:
    (folder / "sweep.json").write_text(json.dumps(GRID))
    script = SLOW * slow + KILLED
    command = [sys.executable, "-c", script, "sweep", str(folder / "sweep.json"), "--out", str(folder / "rows.parquet")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(folder: Path, parts: int, at_work: subprocess.Popen[bytes]) -> None:
    """Until so many parts are there, or the process has ended."""
    while at_work.poll() is None and len(list(folder.glob("rows.parquet.parts/0*"))) < parts:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_no_worker_outlives_its_killed_parent(tmp_path: Path) -> None:
    at_work = process(tmp_path, "--workers", "2", slow=True)
    wait_for(tmp_path, 1, at_work)
    workers = Path(f"/proc/{at_work.pid}/task/{at_work.pid}/children").read_text().split()
    at_work.kill()
    at_work.communicate()
    for _ in range(1000):
        if not any(_alive(worker) for worker in workers):
            break
        time.sleep(0.01)
    assert len(workers) == 2 and not any(_alive(worker) for worker in workers)


def _alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_prints_how_to_resume(
    reference: Path, known_forecasts: None, small_chunks: None, tmp_path: Path
) -> None:
    at_work = process(tmp_path, "--workers", "2", slow=True)
    wait_for(tmp_path, 2, at_work)
    at_work.send_signal(signal.SIGINT)
    _, stderr = at_work.communicate(timeout=300)
    assert at_work.returncode == 130
    assert stderr.decode().startswith("meshcast: interrupted, ") and "the same command resumes it" in stderr.decode()
    assert len(stderr.splitlines()) == 1 and not (tmp_path / "rows.parquet").exists()
    words = ["sweep", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "rows.parquet"), "--workers", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


@pytest.mark.slow
def test_two_processes_do_not_write_the_same_file(reference: Path, tmp_path: Path) -> None:
    first = process(tmp_path, "--workers", "1")
    wait_for(tmp_path, 1, first)
    second = process(tmp_path, "--workers", "1")
    _, stderr = second.communicate(timeout=300)
    assert first.wait(timeout=300) == 0
    # Whichever came late: refused while the other was at work, or answered from what it had made.
    assert second.returncode in (0, 2) and (second.returncode == 0 or f"process {first.pid} on ".encode() in stderr)
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


@pytest.mark.parametrize(
    ("flushes", "kept"), [(1, ""), pytest.param(2, "", marks=pytest.mark.slow), (4, "; 4 of 32 "), (18, "; 32 of 32 ")]
)
def test_a_full_disk_ends_in_one_message_and_keeps_the_rows(
    flushes: int,
    kept: str,
    reference: Path,
    known_forecasts: None,
    small_chunks: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(GRID))
    out = tmp_path / "rows.parquet"
    room, flush = [flushes], os.fsync

    def fsync(file: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(os, "fsync", fsync)
    words = ["sweep", str(tmp_path / "sweep.json"), "--out", str(out), "--workers", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"cannot be written (No space left on device){kept}" in result.stderr
    assert ("points are kept" in result.stderr) == bool(kept) and not out.exists()
    room[0] = 1000
    assert CliRunner().invoke(app, words).exit_code == 0
    assert out.read_bytes() == reference.read_bytes()


def test_a_read_only_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = load_sweep(GRID)
    run(of, tmp_path / "others.parquet", Lazy())  # writable so far, and by then all that it takes is imported
    tmp_path.chmod(0o500)
    monkeypatch.setattr(sweeps, "forecast_chunk", None)
    with unprivileged(), pytest.raises(PlanError, match="Permission denied"):
        run(of, tmp_path / "rows.parquet", Lazy())


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    parts = parts_folder(tmp_path / "rows.parquet")
    parts.mkdir()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
    hold += "print('process 7 on a node', file=file, flush=True); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, parts / "_lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout and holder.stdout.readline()
        with pytest.raises(PlanError, match=r"process 7 on a node.* is writing .*rows\.parquet\. Wait for it"):
            run(load_sweep(GRID), tmp_path / "rows.parquet", Lazy())
        holder.communicate()
    assert not (tmp_path / "rows.parquet").exists()


class Dying:
    """An object whose unpickling ends the process."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_worker_that_dies_ends_in_one_message(small_chunks: None, tmp_path: Path) -> None:
    of = load_sweep(GRID)
    deadly = Sweep({**of.job, "id": Dying()}, of.base, of.axes, of.where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "fingerprint", lambda *_: {"job": "same"})
        with pytest.raises(PlanError, match="a worker was killed"):
            run(deadly, tmp_path / "rows.parquet", workers=2)

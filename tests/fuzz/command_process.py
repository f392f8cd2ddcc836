"""A running command of meshcast, which `tests.fuzz.kills` stops at a moment, hits, and looks after."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

VICTIM = Path(__file__).with_name("victim.py")
ROOT = VICTIM.parents[2]

SECONDS = 120
"""Most seconds that a sweep may take, without those in which the machine had no core for it; see `Patience`."""

SAMPLE = 0.5
"""Seconds between two looks at what processes wait for."""

GRACE = 5
"""Most seconds that workers may outlive their parent, counted likewise."""

NAMED = "meshcast: "
"""Begin of every line on stderr."""


UNRAISABLE = re.compile(r"^Exception ignored in.*?^KeyboardInterrupt: *\n", re.MULTILINE | re.DOTALL)
"""What Python itself writes when Ctrl-C comes while it removes an object, where nothing can be raised."""

WAITS = "meshcast: the cluster has no worker"
"""Begin of the line of a sweep that waits for a worker to be started again, as on a busy machine."""


class Moment(NamedTuple):
    """When a sweep is hit.

    Attributes:
        operation: its n-th operation on the files of its output, or 0 for its begin; see `tests.fuzz.victim`.
        seconds: after that; with 0 it is hit while it is stopped there.
    """

    operation: int
    seconds: float = 0.0


class Ended(NamedTuple):
    """How a sweep ended.

    Attributes:
        code: its exit code; negative for a signal.
        stderr: its lines.
    """

    code: int
    stderr: list[str]


class Patience:
    """Counts seconds, but for those in which a thread of this process or of its descendants waited for a core: on a
    busy machine all take long, and a command that hangs waits for something else.

    Attributes:
        most: seconds after which it is over.
        seconds: counted so far.
    """

    def __init__(self, most: float = SECONDS) -> None:
        self.most, self.seconds, self._looked, self._waits = most, 0.0, time.monotonic(), self._read_waits()

    def is_over(self) -> bool:
        """Whether more seconds are counted than it has."""
        now = time.monotonic()
        if (passed := now - self._looked) >= SAMPLE:
            waits = self._read_waits()
            waited = sum(max(0.0, wait - self._waits.get(thread, 0.0)) for thread, wait in waits.items())
            self.seconds += max(0.0, passed - waited)
            self._looked, self._waits = now, waits
        return self.seconds > self.most

    @staticmethod
    def _read_waits() -> dict[str, float]:
        """The seconds for which every thread has waited for a core, but for the one that asks."""
        parents = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with suppress(OSError):  # it has ended
                    parents[path.name] = (path / "stat").read_text().rpartition(")")[2].split()[1]
        ours, new = set[str](), {str(os.getpid())}
        while new:
            ours |= new
            new = {process for process, parent in parents.items() if parent in new}
        waits = {}
        for path in (file for process in ours for file in Path(f"/proc/{process}/task").glob("*/schedstat")):
            if path.parent.name != str(threading.get_native_id()):
                with suppress(OSError, ValueError, IndexError):
                    waits[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        return waits


class CommandProcess:
    """A command of meshcast in a session of its own."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        words: Sequence[str],
        stop: Moment | None = None,
        root: Path = ROOT,
        nbytes: int | None = None,
    ) -> None:
        """folder: where it runs. out: begin of the absolute paths whose operations are counted. words: the command.
        root: folder of the packages of meshcast. nbytes: largest file that it may write."""

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets processes in its background ignore it
            if nbytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

        self.stop, self.stopped = stop, False
        operation = "-" if stop is None else str(stop.operation)
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        command = [sys.executable, str(VICTIM), str(out), operation, *words]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *paths])},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def reach(self) -> bool:
        """Waits for the moment at which it is to be hit; False if it ended before."""
        assert self.stop is not None
        self.stopped = self._wait_for_stop()
        if self.stopped and self.stop.seconds:
            self.go_on()
            deadline = time.monotonic() + self.stop.seconds
            while time.monotonic() < deadline and self.process.poll() is None:
                time.sleep(0.002)
        return self.process.poll() is None

    def _wait_for_stop(self) -> bool:
        patience = Patience()
        while not patience.is_over():
            options = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self.pid, options)
            if found is not None:
                return found.si_code == os.CLD_STOPPED
            time.sleep(0.002)
        self.remove()
        raise AssertionError(f"neither at operation {self.stop} nor at its end after {SECONDS} s")

    def go_on(self) -> None:
        """Lets it run after a stop."""
        if self.stopped:
            os.kill(self.pid, signal.SIGCONT)
            self.stopped = False

    def end(self, talks: bool = False) -> Ended:
        """Lets it run to its end. Raises AssertionError if it hangs, leaves processes, has a traceback, or says more
        than one line. talks: it may say more, as of what it assumes."""
        self.go_on()
        try:
            code = self._wait_for_end()
            patience = Patience(GRACE)
            while (left := self.processes()) and not patience.is_over():
                time.sleep(0.005)
            assert not left, f"{len(left)} processes run {GRACE} s after it ended"
        finally:
            self.remove()
        assert self.process.stderr is not None
        with self.process.stderr as file:
            lines = UNRAISABLE.sub("", file.read().decode()).splitlines()
        lines = [line for line in lines if not line.startswith(WAITS)]
        shown = f"stderr: {lines[:9]} ... {lines[-3:]}"
        assert not any(line.startswith("Traceback") for line in lines), shown
        assert talks or (len(lines) <= 1 and all(line.startswith(NAMED) for line in lines)), shown
        return Ended(code, lines)

    def _wait_for_end(self) -> int:
        patience = Patience()
        while not patience.is_over():
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(SAMPLE)
        raise AssertionError(f"no end after {SECONDS} s in which it could run")

    def remove(self) -> None:
        """Kills what is left of it."""
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """Its processes that run, workers included."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:  # it has ended
                    continue
                if int(session) == self.pid and state != "Z":
                    found.append(int(path.name))
        return sorted(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, if it still runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ---------------------------------------------------------------------------------------------- blows


def _kill_worker(victim: CommandProcess, rng: random.Random) -> None:
    workers = [pid for pid in victim.processes() if pid != victim.pid]
    send(rng.choice(workers) if workers else victim.pid, signal.SIGKILL)


def _to_parent(number: int) -> Callable[[CommandProcess, random.Random], None]:
    return lambda victim, rng: send(victim.pid, number)


def _to_group(number: int) -> Callable[[CommandProcess, random.Random], None]:
    return lambda victim, rng: send(-victim.pid, number)


def _interrupt_twice(victim: CommandProcess, rng: random.Random) -> None:
    send(-victim.pid, signal.SIGINT)
    victim.go_on()
    time.sleep(rng.random() * rng.choice((0.01, 0.3)))
    if victim.process.poll() is None:
        send(-victim.pid, signal.SIGINT)


BLOWS: dict[str, Callable[[CommandProcess, random.Random], None]] = {
    "kill parent": _to_parent(signal.SIGKILL),
    "kill worker": _kill_worker,
    "kill group": _to_group(signal.SIGKILL),
    "terminate parent": _to_parent(signal.SIGTERM),
    "terminate group": _to_group(signal.SIGTERM),
    "interrupt parent": _to_parent(signal.SIGINT),
    "interrupt group": _to_group(signal.SIGINT),
    "interrupt twice": _interrupt_twice,
}
"""What hits a sweep; Ctrl-C in a terminal is SIGINT to the group."""

CODES = {"kill": (-signal.SIGKILL, 2), "terminate": (-signal.SIGTERM,), "interrupt": (130, -signal.SIGINT)}
"""Exit codes after a blow by its first word; 0 is right too, for a sweep that was about to end. Python itself ends by
SIGINT, which is 130 in a shell, where no handler is in place yet or any more."""


def check_end(blow: str, ended: Ended) -> None:
    """Raises AssertionError for an exit code that a blow does not explain, or a message that does not speak of it."""
    word = blow.split()[0]
    assert ended.code == 0 or ended.code in CODES[word], f"exit code {ended.code} after {blow}: {ended.stderr}"
    if ended.code == 2:
        assert blow == "kill worker" and "a worker was killed" in ended.stderr[0], f"after {blow}: {ended.stderr}"
    elif ended.stderr:
        assert word == "interrupt" and "interrupted" in ended.stderr[0], f"after {blow}: {ended.stderr}"

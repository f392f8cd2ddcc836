"""Starting the processes of a measurement: torchrun on this node, or joining those that torchrun has started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hardware.errors import PlanError

FRUGAL = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"
    ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"
)
"""glibc gives large blocks back to the system as soon as they are free, and the kernel zeroes each new one page by
page: longer than many a layer takes. So told, it keeps them, as the caching allocator of a GPU does."""

PAUSE = 0.1
"""Between looks at what the processes have told [s]."""

GRACE = 5.0
"""How long processes may take to end when they are asked to [s]."""


def joined() -> bool:
    """Whether this process is one of those that torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first() -> bool:
    """Whether this process writes files and speaks: rank 0, or the only one."""
    return not joined() or os.environ["RANK"] == "0"


def check(world: int, device: str) -> None:
    """Raises PlanError where so many processes cannot be had."""
    if joined():
        if int(os.environ["WORLD_SIZE"]) != world:
            rule = f"the plan has {world} ranks"
            raise PlanError("torchrun", rule, f"Start {world} processes", int(os.environ["WORLD_SIZE"]))
    elif device == "cuda" and world > torch.cuda.device_count():
        rule = f"this machine has {torch.cuda.device_count()} GPUs, and a process takes one"
        raise PlanError("plan.mesh", rule, "Plan for as many, or run this command under torchrun on all nodes", world)


def run(task: Mapping[str, Any], world: int) -> Generator[dict[str, Any]]:
    """Has `world` processes do a task (see `worker`), and yields what rank 0 tells while they are at it.

    Where torchrun started this process, it does its own part and ranks other than 0 yield nothing. Raises PlanError
    where a process fails, and stops all of them when the caller stops listening.
    """
    check(world, task["device"])
    if joined():
        from validation.distributed import worker

        yield from worker.run(task)
        return
    with tempfile.TemporaryDirectory(prefix="meshcast-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task), "utf-8")
        (folder / "told.jsonl").touch()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(world, folder), env=environment(task["device"]), stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield from _told(process, folder / "told.jsonl")
        finally:
            _stop(process)
        if process.returncode:
            raise _error(folder, task["device"])


def _command(world: int, folder: Path) -> list[str]:
    """torchrun for one node, at a free port."""
    run = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}"]
    return [sys.executable, *run, "-m", "validation.distributed.worker", str(folder)]


def environment(device: str) -> dict[str, str]:
    """Of the processes: one thread each, and on a CPU memory that stays with them."""
    found = dict(os.environ)
    ours = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, found.get("PYTHONPATH", "")]))
    found.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        found.setdefault("GLIBC_TUNABLES", FRUGAL)
        if Path("/sys/class/net/lo").exists():
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not lead anywhere
    return found


def _told(process: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `path` as they come, until the process has ended."""
    with path.open(encoding="utf-8") as file:
        rest = ""
        while True:
            ended = process.poll() is not None
            rest += file.read()
            *lines, rest = rest.split("\n")
            yield from map(json.loads, lines)
            if ended:
                return
            time.sleep(PAUSE)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which ends its processes; then whatever is left of them."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except (ProcessLookupError, PermissionError):
            break
        time.sleep(PAUSE)
    process.wait()


def _error(folder: Path, device: str) -> PlanError:
    """The error of the process that failed first."""
    errors = [json.loads(path.read_text("utf-8")) for path in folder.glob("error.*.json")]
    if errors:
        told = min(errors, key=lambda one: one["when"])
        if "rule" in told:
            return PlanError(told["where"], told["rule"], told["remedy"], told["value"])
        remedy = "Lower the batch or the model if it ran out of memory; otherwise report it"
        return PlanError(f"rank {told['rank']} of {device}", f"the process failed with {told['line']}", remedy)
    log = (folder / "log").read_text("utf-8", "replace")
    if found := re.search(r"exitcode\s*:\s*-(\d+)", log):
        rule = f"a process was killed by signal {found[1]}"
        return PlanError(f"--device {device}", rule, "Lower the batch or the model if the host ran out of memory")
    named = re.findall(r"^(?:\[\w+\]:)?(\w+(?:\.\w+)*(?:Error|Exception): .*)$", log, re.MULTILINE)
    lines = named or [line.strip() for line in log.splitlines() if line.strip()] or ["nothing was said"]
    rule = f"the processes did not start: {lines[0 if named else -1]}"
    return PlanError(f"--device {device}", rule, "Check that torch.distributed.run works on this machine")

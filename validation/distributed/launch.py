"""Starts the processes of a measurement with torchrun on this node, or joins those that torchrun has started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import GIB
from meshcast.validation.measurements.cuda import Cuda
from meshcast.validation.measurements.measurement import Machine

MALLOC_TUNABLES = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"
    ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"
)
"""Makes glibc keep freed memory, as the caching allocator of a GPU does. By default it returns large blocks to the
kernel, which zeroes each new block page by page: longer than many a layer computes."""

PAUSE = 0.1
"""Interval between reads of the processes' messages [s]."""

GRACE = 5.0
"""Time between SIGTERM and SIGKILL [s]."""


def under_torchrun() -> bool:
    """Returns whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Returns whether this process is rank 0, which writes files and prints, or the only process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def check_world_size(world: int, device: str) -> None:
    """Raises PlanError if this machine cannot run `world` processes."""
    if under_torchrun():
        if int(os.environ["WORLD_SIZE"]) != world:
            rule = f"the plan has {world} ranks"
            raise PlanError("torchrun", rule, f"Start {world} processes", int(os.environ["WORLD_SIZE"]))
    elif device == "cuda" and world > Cuda.count():
        rule = f"this machine has {Cuda.count()} GPUs, and each process needs one"
        raise PlanError("plan.mesh", rule, "Use a smaller mesh, or run this command under torchrun on all nodes", world)


def check_room(world: int, machine: Machine, needed: float = 0.0) -> None:
    """Raises PlanError if `world` processes on a CPU are more than its cores, or `needed` bytes more than its memory:
    they would wait for each other, which no forecast counts, or take the machine down."""
    if machine.device != "cpu" or under_torchrun():
        return
    remedy = "Use a smaller mesh or model, or add --yes to start them all the same"
    if machine.processors is not None and world > machine.processors:
        rule = f"each process takes a core, and this machine has {machine.processors}"
        raise PlanError("plan.mesh", rule, remedy, world)
    if machine.memory is not None and needed > machine.memory:
        sizes = (
            f"they take {needed / GIB:,.1f} GiB by the forecast, and this machine has {machine.memory / GIB:,.1f} GiB"
        )
        raise PlanError("plan.mesh", sizes, remedy, world)


def run_all(tasks: Sequence[Mapping[str, Any]], world: int) -> Generator[dict[str, Any]]:
    """Runs tasks in turn, each in separate processes; see `run`.

    Under torchrun the same processes run all of them, in the same process group: a second would find the addresses of
    the first in torchrun's store, and wait for it forever.
    """
    if under_torchrun():
        from meshcast.validation.distributed import worker

        for task in tasks:
            check_world_size(world, task["device"])
        yield from worker.run(*tasks)
        return
    for task in tasks:
        yield from run(task, world)


def run(task: Mapping[str, Any], world: int) -> Generator[dict[str, Any]]:
    """Runs a task (see `worker`) on `world` new processes and yields rank 0's messages as they arrive.

    Raises PlanError if a process fails; closing the generator stops all processes.
    """
    check_world_size(world, task["device"])
    with tempfile.TemporaryDirectory(prefix="meshcast-") as name:
        folder = Path(name)
        write_file(folder / "task.json", json.dumps(task))
        (folder / "messages.jsonl").touch()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(world, folder), env=environment(task["device"]), stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield from _read_messages(process, folder / "messages.jsonl")
        finally:
            _stop(process)
        if process.returncode:
            raise _error(folder, task["device"])


def _command(world: int, folder: Path) -> list[str]:
    """Returns the command line of torchrun for a node, on a free port."""
    run = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}"]
    return [sys.executable, *run, "-m", "meshcast.validation.distributed.worker", str(folder)]


def environment(device: str) -> dict[str, str]:
    """Returns the environment of the processes: a thread each; on a CPU `MALLOC_TUNABLES` and gloo over the loopback
    device."""
    variables = dict(os.environ)
    ours = str(Path(str(resources.files("meshcast"))).resolve().parent)
    # Without the working directory, where a torch.py of the user may lie; an empty entry stands for it, too.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, *variables.get("PYTHONPATH", "").split(os.pathsep)]))
    variables["PYTHONSAFEPATH"] = "1"
    variables.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        variables.setdefault("GLIBC_TUNABLES", MALLOC_TUNABLES)
        if Path("/sys/class/net/lo").exists():
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    return variables


def _read_messages(process: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yields messages in the file at `path` as they are written, until the process ends."""
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
    """Terminates torchrun, which terminates its processes, then any process that is left."""
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
    """Returns the error of the process that failed first."""
    errors = [json.loads(path.read_text("utf-8")) for path in folder.glob("error.*.json")]
    if errors:
        first = min(errors, key=lambda error: error["when"])
        if "rule" in first:
            return PlanError(first["where"], first["rule"], first["remedy"], first["value"])
        remedy = "Lower the batch or the model if it ran out of memory; otherwise report it"
        return PlanError(f"rank {first['rank']} of {device}", f"the process failed with {first['line']}", remedy)
    log = (folder / "log").read_text("utf-8", "replace")
    if killed := re.search(r"exitcode\s*:\s*-(\d+)", log):
        rule = f"a process was killed by signal {killed[1]}"
        return PlanError(f"--device {device}", rule, "Lower the batch or the model if the host ran out of memory")
    named = re.findall(r"^(?:\[\w+\]:)?(\w+(?:\.\w+)*(?:Error|Exception): .*)$", log, re.MULTILINE)
    lines = named or [line.strip() for line in log.splitlines() if line.strip()] or ["they printed nothing"]
    rule = f"the processes did not start: {lines[0 if named else -1]}"
    return PlanError(f"--device {device}", rule, "Check that torch.distributed.run works on this machine")

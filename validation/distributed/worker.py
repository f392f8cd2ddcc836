"""One process of a distributed measurement: `run` does a task with all others and tells piece by piece what comes out.

A task is plain data: what (``steps``, ``checks``, ``collectives``), on which device, and that task's own settings.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hardware.errors import MeshcastError
from simulator.forecast.planning import resolve_plan
from simulator.job.load import load_job
from validation.distributed import collectives, serial
from validation.distributed.groups import stand
from validation.distributed.memory import peaks
from validation.distributed.trainer import Trainer
from validation.measurements.device import Device

PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other: for rank 0's serial step, too."""


SPAN = "ProfilerStep#0"
"""The name of the step in a trace, as torch's own profiler gives it."""


def run(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """This process's part; torchrun's environment says which rank it is. Rank 0 yields what is told, others nothing.

    Raises what goes wrong.
    """
    device = Device.of(task["device"], int(os.environ.get("LOCAL_RANK", "0")) if task["device"] == "cuda" else 0)
    dist.init_process_group(device.backend, timeout=PATIENCE, device_id=device.torch if device.kind == "cuda" else None)
    try:
        for told in TASKS[task["what"]](task, device):
            if dist.get_rank() == 0:
                yield told
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------- tasks


def checks(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Of each of the `jobs`, whether it equals serial training."""
    for job in task["jobs"]:
        plan = resolve_plan(load_job(job))
        trainer = Trainer(plan, stand(plan, device))
        yield {"check": vars(serial.compare(trainer))}


def steps(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Steps of one `job`: compared with serial training if `check`, `warmup` ones, one whose memory is watched, `steps`
    timed ones, one written to `trace`."""
    plan = resolve_plan(load_job(task["job"]))
    trainer = Trainer(plan, stand(plan, device))
    numbers = count(1)
    if task["check"]:
        yield {"check": vars(serial.compare(trainer))}
    for _ in range(task["warmup"]):
        yield {"warmup": _timed(trainer, next(numbers))}
    yield {"peaks": peaks(trainer, next(numbers))}
    for _ in range(task["steps"]):
        yield {"step": _timed(trainer, next(numbers))}
    if task["trace"]:
        _traced(trainer, next(numbers), Path(task["trace"]))
        yield {"trace": task["trace"]}


TASKS: dict[str, Callable[[Mapping[str, Any], Device], Iterator[dict[str, Any]]]] = {
    "checks": checks,
    "steps": steps,
    "collectives": collectives.timed,
}


def _timed(trainer: Trainer, number: int) -> float:
    """Seconds of a step from a barrier to its end on the slowest rank. The tokens are there before it."""
    device, given = trainer.place.device, trainer.given(number)
    device.sync()
    dist.barrier()
    device.sync()  # NCCL's barrier is a kernel, too
    begin = time.perf_counter()
    trainer.step(given)
    device.sync()
    return slowest(time.perf_counter() - begin, device)


def slowest(seconds: float, device: Device) -> float:
    """The most of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device.torch)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _traced(trainer: Trainer, number: int, path: Path) -> None:
    """Writes rank 0's Kineto trace of a step, which lies in the span `SPAN`, behind a barrier."""
    given, device = trainer.given(number), trainer.place.device
    if dist.get_rank():
        dist.barrier()
        trainer.step(given)
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        dist.barrier()
        with torch.profiler.record_function(SPAN):
            trainer.step(given)
            device.sync()
    profile.export_chrome_trace(str(path))


# ----------------------------------------------------------------------------------- as a process


@contextmanager
def _failing(folder: Path) -> Iterator[None]:
    """Leaves an error for the launcher, as one line, in place of a traceback among those of all other ranks."""
    try:
        yield
    except Exception as error:
        told: dict[str, Any] = {"when": time.time(), "rank": int(os.environ["RANK"])}
        if isinstance(error, MeshcastError):
            told |= {
                "where": error.where,
                "rule": error.rule,
                "remedy": error.remedy,
                "value": error.to_dict()["value"],
            }
        else:
            told["line"] = _line(error)
        (folder / f"error.{told['rank']}.json").write_text(json.dumps(told), "utf-8")
        sys.stderr.flush()
        os._exit(1)  # other ranks are gone or wait for this one: nothing can be shut down in order


def _line(error: BaseException) -> str:
    """What went wrong at first, in a line: torch wraps errors, and hangs stacks of C++ on them."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def main(folder: Path) -> None:
    """Does the task that the launcher has put into `folder`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears it, and stops us
    task = json.loads((folder / "task.json").read_text("utf-8"))
    with _failing(folder), (folder / "told.jsonl").open("a", encoding="utf-8") as file:
        for told in run(task):
            file.write(json.dumps(told) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is told: threads of gloo's that still end must not meet an interpreter that is taken down

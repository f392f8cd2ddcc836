"""One process of a distributed measurement: runs a task together with the others and yields its results as messages.

A task is plain data: its kind under ``what`` (a key of `TASKS`), the device, further settings.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.validation.distributed import collectives, serial_check
from meshcast.validation.distributed.layouts.executor import compare_layouts
from meshcast.validation.distributed.process_groups import make_process_groups
from meshcast.validation.distributed.trainer import CapturedStep, Inputs, Trainer
from meshcast.validation.measurements.device import Device
from meshcast.validation.reference.optimizer import gradient

TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives; rank 0's serial step has to end within it."""


STEP_MARK = "ProfilerStep#0"
"""Event that marks the step in a trace, named as torch's profiler schedule names it."""


def run(*tasks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs this rank's part of some tasks; rank 0 yields the messages, other ranks nothing. Errors propagate."""
    kind = tasks[0]["device"]
    device = Device.of(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else 0)
    options = device.cuda.process_group_options if device.cuda else {}
    dist.init_process_group(device.backend, timeout=TIMEOUT, **options)
    try:
        for task in tasks:
            for message in TASKS[task["what"]](task, device):
                if dist.get_rank() == 0:
                    yield message
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------- tasks


def checks(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Compares each of the task's `jobs` with serial training."""
    for job in task["jobs"]:
        plan = resolve_plan(load_job(job))
        trainer = Trainer(plan, make_process_groups(plan, device))
        yield {"check": vars(serial_check.compare_with_serial(trainer))}


def layouts(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Compares each of the task's `jobs` with serial training, executed by the layouts of its operators."""
    for job in task["jobs"]:
        yield {"layouts": compare_layouts(job)}


def steps(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Yields the steps of the task's `job`.

    In this order: at least `warmup` steps, on a GPU until its clock is steady; a step whose memory is watched; `steps`
    timed steps; the states of rank 0's GPU; a step that is traced (if `trace` names a file).
    """
    plan = resolve_plan(load_job(task["job"]))
    trainer = Trainer(plan, make_process_groups(plan, device))
    # Under torchrun the comparison with serial training has run in this process, and building the model needs more
    # memory for a moment: what is reserved from here on is what the steps need.
    device.release_cache()
    numbers = count(1)
    run_step = CapturedStep(trainer) if plan.job.framework.cuda_graphs is True else trainer.step
    with device.monitor() as add_states:
        for _ in device.warm_up(task["warmup"], lambda go_on: decision_of_rank_zero(go_on, device)):
            yield {"warmup": _time_step(trainer, run_step, next(numbers))}
        yield {"peaks": measure_peaks(trainer, next(numbers))}
        for _ in range(task["steps"]):
            yield {"step": _time_step(trainer, run_step, next(numbers))}
        yield {"machine": add_states(device.machine(plan.mesh.world)).model_dump(mode="json")}
    if task["trace"]:
        _trace_step(trainer, next(numbers), Path(task["trace"]))
        yield {"trace": task["trace"]}


TASKS: dict[str, Callable[[Mapping[str, Any], Device], Iterator[dict[str, Any]]]] = {
    "checks": checks,
    "layouts": layouts,
    "steps": steps,
    "collectives": collectives.time_collectives,
}


def _time_step(trainer: Trainer, run_step: Callable[[Inputs], Any], number: int) -> float:
    """Returns the seconds of a step from a barrier to its end on the slowest rank; drawing the tokens is not
    included."""
    device, inputs = trainer.place.device, trainer.make_inputs(number)
    device.sync()
    dist.barrier()
    # NCCL's barrier is a kernel, too: the device is idle once it has run.
    _, seconds = device.run_timed(partial(run_step, inputs))
    return slowest_rank(seconds, device)


def decision_of_rank_zero(decision: bool, device: Device) -> bool:
    """Returns rank 0's decision, on all ranks."""
    agreed = torch.tensor(float(decision), device=device.torch)
    dist.broadcast(agreed, 0)
    return bool(agreed)


def slowest_rank(seconds: float, device: Device) -> float:
    """Returns the maximum over all ranks."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device.torch)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _trace_step(trainer: Trainer, number: int, path: Path) -> None:
    """Writes rank 0's Kineto trace of a step, marked as `STEP_MARK`; a barrier precedes it."""
    inputs, device = trainer.make_inputs(number), trainer.place.device
    if dist.get_rank():
        dist.barrier()
        trainer.step(inputs)
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        dist.barrier()
        with torch.profiler.record_function(STEP_MARK):
            trainer.step(inputs)
            device.sync()
    with tempfile.TemporaryDirectory(prefix="meshcast-") as folder:  # torch writes by name only
        trace = Path(folder) / path.name
        profile.export_chrome_trace(str(trace))
        write_file(path, trace.read_bytes())


# --------------------------------------------------------------------------------------- peak memory

COLLECTIVES = (
    *("allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
"""Methods of `ProcessGroup` (newer and older names) whose buffers gloo's threads may free."""

PAUSE = 1e-3
"""Pause after a collective in which gloo's thread drops its reference to the buffer [s]."""


def measure_peaks(trainer: Trainer, number: int) -> list[dict[str, Any]]:
    """Runs step `number` untimed and returns the peak memory of each rank (`MemoryPeak` as plain data)."""
    inputs = trainer.make_inputs(number)
    # A CPU's tensors are counted by their Python objects; gradients from autograd have an object only once they are
    # accessed.
    held = [gradient(param) for param in trainer.parameters().values()]
    dist.barrier()
    with (
        _hold_gloo_buffers() if trainer.place.device.backend == "gloo" else nullcontext(),
        trainer.place.device.peak() as peak,
    ):
        trainer.step(inputs)
    del held
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, asdict(peak))
    return peaks


@contextmanager
def _hold_gloo_buffers() -> Iterator[None]:
    """Makes the calling thread free the buffers of gloo's collectives inside the block.

    gloo's threads drop their reference to a buffer shortly after the call has returned. If the caller has dropped its
    reference by then, the buffer is freed in a thread that torch's profiler does not watch, and counts as allocated for
    good.
    """
    before = {name: method for name, method in vars(dist.ProcessGroup).items() if name in COLLECTIVES}
    for name, method in before.items():
        setattr(dist.ProcessGroup, name, _wait_and_pause(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _wait_and_pause(method: Any) -> Callable[..., Any]:
    """Wraps a collective: waits for its completion, then pauses while its buffers stay referenced."""

    def call(group: Any, *args: Any, **options: Any) -> Any:
        work = method.__get__(group)(*args, **options)
        work.wait()
        time.sleep(PAUSE)
        return work

    return call


# ----------------------------------------------------------------------------------- as a process


@contextmanager
def _report_failure(folder: Path) -> Iterator[None]:
    """Writes an error as a file for the launcher, instead of a traceback per rank."""
    try:
        yield
    except Exception as error:
        report: dict[str, Any] = {"when": time.time(), "rank": int(os.environ["RANK"])}
        if isinstance(error, MeshcastError):
            report |= {
                "where": error.where,
                "rule": error.rule,
                "remedy": error.remedy,
                "value": error.to_dict()["value"],
            }
        else:
            report["line"] = _line(error)
        write_file(folder / f"error.{report['rank']}.json", json.dumps(report))
        sys.stderr.flush()
        os._exit(1)  # other ranks may have failed or be waiting, so an orderly shutdown could hang


def _line(error: BaseException) -> str:
    """Returns the original error in a single line: torch wraps errors and appends C++ stacks."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def main(folder: Path) -> None:
    """Runs the task in the launcher's `folder`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles it and stops its workers
    task = json.loads((folder / "task.json").read_text("utf-8"))
    with _report_failure(folder), (folder / "messages.jsonl").open("a", encoding="utf-8") as file:
        for message in run(task):
            file.write(json.dumps(message) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may still be running and would crash the interpreter's shutdown

"""Times single collectives and messages over a list of sizes; a size in bytes is that of nccl-tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcast.validation.measurements.device import MIN_SPIN, SPIN_MARGIN, Device
from meshcast.validation.reference.tensor_parallel import all_gather_into, reduce_scatter_into

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
"""send_recv is a ping-pong between rank 0 and the last rank; half of it is a message."""

SIZES = tuple(4**i for i in range(5, 14))
"""Default sizes [bytes of the largest buffer on a rank]: 1 KiB to 64 MiB."""

CALLS_PER_SAMPLE = {"cpu": 5, "cuda": 20}
"""Calls in a row that are averaged in a sample, by kind of device. Ranks leave a barrier about a small call apart,
which no longer shows over 20 calls, as in nccl-tests (``-n 20``)."""

GEMM_SIZE = 512
"""Rows and columns of the GEMMs between calls: a few ms on a CPU core, as between the collectives of a layer."""


def buffer_elements(nbytes: int, world: int) -> int:
    """Counts the fp32 elements of the largest buffer, rounded up to a multiple of the number of ranks."""
    return -(-nbytes // (4 * world)) * world


def make_call(operation: str, count: int, device: torch.device) -> Callable[[], Any]:
    """Returns a function that runs the collective once, with `count` fp32 elements in its largest buffer."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // world, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if operation == "all_gather":
        return lambda: all_gather_into(whole, part, None)
    if operation == "reduce_scatter":
        return lambda: reduce_scatter_into(part, whole, None)
    if operation == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    return lambda: _ping_pong(whole, rank, world - 1)


def _ping_pong(whole: Tensor, rank: int, last: int) -> None:
    if rank == 0:
        dist.send(whole, last)
        dist.recv(whole, last)
    elif rank == last:
        dist.recv(whole, 0)
        dist.send(whole, 0)


def time_collectives(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Yields samples of every operation and size of a task [s per call], averaged over the ranks as in nccl-tests, then
    the machine with the states of rank 0's GPU.

    A sample is the mean over consecutive calls (`CALLS_PER_SAMPLE`). In a `busy` task it is a single call after GEMMs
    on each rank: as in a training step, ranks arrive at different times and wait.
    """
    with device.monitor() as add_states:
        for operation in task["operations"]:
            for nbytes in task["sizes"]:
                yield {"operation": operation, "bytes": nbytes, "seconds": _samples(task, device, operation, nbytes)}
        yield {"machine": add_states(device.machine(dist.get_world_size())).model_dump(mode="json")}


def _samples(task: Mapping[str, Any], device: Device, operation: str, nbytes: int) -> list[float]:
    """Returns the samples of an operation and size [s per call]."""
    busy, world = task["busy"], dist.get_world_size()
    calls = 1 if busy else CALLS_PER_SAMPLE[device.kind]
    once = make_call(operation, buffer_elements(nbytes, world), device.torch)
    for _ in range(task["warmup"]):
        once()
    spin = _issue_seconds(once, calls, device)
    sample = _time_after_own_work if busy else partial(_time_in_a_row, calls=calls, spin=spin)
    seconds = torch.tensor([sample(once, device) for _ in range(task["repeat"])], dtype=torch.float64)
    # Two ranks exchange messages, there and back.
    takes_part = operation != "send_recv" or dist.get_rank() in (0, world - 1)
    seconds = seconds.to(device.torch) * takes_part
    dist.all_reduce(seconds)
    share = 1 / (calls * (4 if operation == "send_recv" else world))
    return [share * total for total in seconds.tolist()]


def _issue_seconds(once: Callable[[], Any], calls: int, device: Device) -> float:
    """Measures how long hosts take to issue some calls [s], with a margin: the maximum over all ranks."""
    device.sync()
    begin = time.perf_counter()
    for _ in range(calls):
        once()
    seconds = torch.tensor(SPIN_MARGIN * (time.perf_counter() - begin), dtype=torch.float64, device=device.torch)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return max(float(seconds), MIN_SPIN)


def _time_after_own_work(once: Callable[[], Any], device: Device) -> float:
    """Times a call on this rank after a barrier and GEMMs of the rank [s]."""
    x = torch.ones(GEMM_SIZE, GEMM_SIZE, device=device.torch)
    device.sync()
    dist.barrier()
    for _ in range(3):
        x @ x
    device.sync()
    return device.time_once(once)[0]


def _time_in_a_row(once: Callable[[], Any], device: Device, calls: int, spin: float) -> float:
    """Times consecutive calls on this rank after a barrier [s in total]."""

    def repeat_call() -> None:
        for _ in range(calls):
            once()

    device.sync()
    dist.barrier()
    return device.time_once(repeat_call, spin)[0]

"""Collectives and messages alone, over a list of sizes, with bytes counted as nccl-tests counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from validation.measurements.device import Device
from validation.reference.tensor_parallel import all_gather_into, reduce_scatter_into

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
"""send_recv: from rank 0 to the last one, back and forth; half of that is one message."""

SIZES = tuple(4**i for i in range(5, 14))
"""Bytes of the largest buffer on one rank: 1 KiB to 64 MiB."""

CALLS = 5
"""In a row as one sample, as nccl-tests does: ranks leave a barrier one after another, which takes as long as a small
call."""


WORK = 512
"""Rows and columns of products between calls: some milliseconds on a core, as between the collectives of a layer."""


def elements(nbytes: int, world: int) -> int:
    """Numbers of 4 bytes in the largest buffer, rounded up to a multiple of the ranks."""
    return -(-nbytes // (4 * world)) * world


def work(operation: str, count: int, device: torch.device) -> Callable[[], Any]:
    """What makes the operation happen once; `count` numbers in its largest buffer."""
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
    return lambda: _back_and_forth(whole, rank, world - 1)


def _back_and_forth(whole: Tensor, rank: int, last: int) -> None:
    if rank == 0:
        dist.send(whole, last)
        dist.recv(whole, last)
    elif rank == last:
        dist.recv(whole, 0)
        dist.send(whole, 0)


def timed(task: Mapping[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    """Samples of every operation and size of a task.

    Seconds of one of `CALLS` in a row, of the slowest rank; of a `busy` task those of one call after some work of each
    rank's own, on average over the ranks: they come late, and wait for each other, as in a training step.
    """
    busy, world = task["busy"], dist.get_world_size()
    for operation in task["operations"]:
        for nbytes in task["sizes"]:
            once = work(operation, elements(nbytes, world), device.torch)
            for _ in range(task["warmup"]):
                once()
            sample = _late if busy else _seconds
            seconds = torch.tensor([sample(once, device) for _ in range(task["repeat"])], dtype=torch.float64)
            seconds = seconds.to(device.torch)
            dist.all_reduce(seconds, dist.ReduceOp.SUM if busy else dist.ReduceOp.MAX)
            share = (0.5 if operation == "send_recv" else 1.0) / (world if busy else CALLS)
            yield {"operation": operation, "bytes": nbytes, "seconds": [share * one for one in seconds.tolist()]}


def _late(once: Callable[[], Any], device: Device) -> float:
    """Seconds of one call on this rank, from when it has done some work of its own."""
    x = torch.ones(WORK, WORK, device=device.torch)
    device.sync()
    dist.barrier()
    for _ in range(3):
        x @ x
    device.sync()
    return device.seconds(once, warmup=0, repeat=1)[0]


def _seconds(once: Callable[[], Any], device: Device) -> float:
    """Seconds of `CALLS` calls on this rank, from a barrier on."""

    def calls() -> None:
        for _ in range(CALLS):
            once()

    device.sync()
    dist.barrier()
    return device.seconds(calls, warmup=0, repeat=1)[0]

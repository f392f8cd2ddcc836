"""Measures the peak memory of every rank in a training step of the reference trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from meshcast.validation.distributed.trainer import Trainer
from meshcast.validation.reference.optimizer import gradient

COLLECTIVES = (
    *("allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
"""Methods of `ProcessGroup` (newer and older names) whose buffers gloo's threads may free."""

PAUSE = 1e-3
"""Pause after a collective in which gloo's thread drops its reference to the buffer [s]."""


def measure_peaks(trainer: Trainer, number: int) -> list[dict[str, Any]]:
    """Runs step `number` untimed and returns the peak memory of each rank (`MemoryPeak` as plain data)."""
    given = trainer.make_inputs(number)
    # A CPU's tensors are counted by their Python objects; gradients from autograd have one only once they are accessed.
    held = [gradient(param) for param in trainer.parameters().values()]
    dist.barrier()
    with (
        _hold_gloo_buffers() if trainer.place.device.backend == "gloo" else nullcontext(),
        trainer.place.device.peak() as peak,
    ):
        trainer.step(given)
    del held
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, asdict(peak))
    return found


@contextmanager
def _hold_gloo_buffers() -> Iterator[None]:
    """Makes the calling thread free the buffers of gloo's collectives inside the block.

    gloo's threads drop their reference to a buffer shortly after the call has returned. If the caller has dropped its
    own by then, the buffer is freed in a thread that torch's profiler does not watch, and counts as allocated for good.
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

"""The memory of every rank at its peak in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from validation.distributed.trainer import Trainer
from validation.reference.optimizer import gradient

COLLECTIVES = ("allreduce", "all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base")
"""Methods of process groups whose buffers gloo's threads may be the last to hold, by their newer and older names."""

PAUSE = 1e-3
"""In which a thread of gloo's has let go of what it sent [s]."""


def peaks(trainer: Trainer, number: int) -> list[dict[str, Any]]:
    """`validation.measurements.device.MemoryPeak` of each rank, as plain data, in a step that nobody times."""
    given = trainer.given(number)
    # A gradient that autograd made has no Python object until somebody asks for it; what counts tensors counts objects.
    held = [gradient(param) for param in trainer.parameters().values()]
    dist.barrier()
    with _seen() if trainer.place.device.backend == "gloo" else nullcontext(), trainer.place.device.peak() as peak:
        trainer.step(given)
    del held
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, asdict(peak))
    return found


@contextmanager
def _seen() -> Iterator[None]:
    """While it lasts, buffers of gloo's collectives are freed by the thread that asked for these.

    gloo's threads let go of a buffer a moment after the call for it has returned. If the caller has dropped it by then,
    it is freed in a thread that torch's profiler does not watch, and counts as allocated ever after.
    """
    before = {name: method for name, method in vars(dist.ProcessGroup).items() if name in COLLECTIVES}
    for name, method in before.items():
        setattr(dist.ProcessGroup, name, _held(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _held(method: Any) -> Callable[..., Any]:
    """The same, but its work, which holds all its buffers, is done and then held for a pause."""

    def call(group: Any, *args: Any, **told: Any) -> Any:
        work = method.__get__(group)(*args, **told)
        work.wait()
        time.sleep(PAUSE)
        return work

    return call

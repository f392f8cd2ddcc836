"""Ranks of a distributed task over gloo: rank 0 is this process, the others are forked from it with torch imported."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshcast.validation.distributed import worker

TIMEOUT = timedelta(minutes=1)


def on_ranks(work: Callable[[int], Any], world: int = 2) -> list[Any]:
    """Returns the results of `work(rank)`, which joins the group of the environment, on so many ranks.

    Processes of torchrun import torch and FSDP one by one: five seconds a rank.
    """
    forks, receivers, processes = multiprocessing.get_context("fork"), [], []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        place = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "LOCAL_RANK": 0}
        for name, value in place.items():
            patch.setenv(name, str(value))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # the store is this process's
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
        patch.setattr(worker, "TIMEOUT", TIMEOUT)
        for rank in range(1, world):
            receiver, sender = forks.Pipe(duplex=False)
            receivers.append(receiver)
            processes.append(forks.Process(target=_send_result, args=(work, rank, sender)))
            processes[-1].start()
            sender.close()
        try:
            # EOFError: the rank has failed, and its traceback is on stderr.
            return [work(0), *(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False) for pipe in receivers)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _send_result(work: Callable[[int], Any], rank: int, sender: Any) -> None:
    gc.freeze()  # process groups of the parent wait for its threads when they are freed
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.save(work(rank), result := io.BytesIO())
    sender.send_bytes(result.getvalue())
    os._exit(0)  # gloo's threads may still be running and would crash the interpreter's shutdown


def run_task(task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Returns the messages of rank 0 from `worker.run(task)`, as `launch.run` does with processes of torchrun."""
    messages: list[dict[str, Any]] = on_ranks(lambda rank: list(worker.run(task)), world)[0]
    return messages

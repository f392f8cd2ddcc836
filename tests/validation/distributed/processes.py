"""Ranks of a distributed task, forked from this process, which has imported torch: those of torchrun import it each."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


def run(task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Messages of rank 0 from `worker.run(task)` on `world` ranks that talk over gloo.

    `launch.run` does the same with torchrun, whose processes import torch and FSDP one by one: five seconds a rank.
    """
    import torch.distributed as dist

    from meshcast.validation.distributed import worker  # noqa: F401  imported once, before the ranks are forked

    forks = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=5), wait_for_workers=False)
    ranks, messages = {}, {}
    for rank in range(world):
        receiver, sender = forks.Pipe(duplex=False)
        ranks[receiver] = forks.Process(target=play, args=(task, rank, world, store.port, sender))
        ranks[receiver].start()
        sender.close()
    try:
        waiting = list(ranks)
        while waiting:
            for one in wait(waiting):
                assert isinstance(one, Connection)
                messages[one] = one.recv()  # EOFError: the rank has failed, and its traceback is on stderr
                waiting.remove(one)
    finally:
        for process in ranks.values():
            process.kill()
            process.join()
    return messages[next(iter(ranks))]  # type: ignore[no-any-return]


def play(task: dict[str, Any], rank: int, world: int, port: int, sender: Any) -> None:
    """One rank of `run`: sends its messages and ends."""
    from meshcast.validation.distributed import worker

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the starting process's
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    sender.send(list(worker.run(task)))
    sender.close()
    os._exit(0)  # gloo's threads may still be running and would crash the interpreter's shutdown

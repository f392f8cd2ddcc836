"""Forecasts the chunks of a sweep on an existing Dask cluster: ``--on dask://host:8786``.

Dask distributes the chunks, runs those of a worker that died again elsewhere, and drops what is left when the
client goes away. A worker refuses chunks unless it computes the fingerprint of the sweep that this process computes, so
rows of another code, catalog, calibration or file are never mixed in.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from meshcast.experiments.sweeps.fingerprint import Fingerprint, SweepInputs
from meshcast.experiments.sweeps.grid import Sweep
from meshcast.experiments.sweeps.output import tell_changes
from meshcast.hardware.errors import MeshcastError, PlanError, cut_middle

if TYPE_CHECKING:
    from distributed import Client, as_completed

CONNECT_S = 10
"""Seconds until a scheduler that does not answer is given up, and until one that has no worker is told of."""

AHEAD = 2_000
"""Chunks that are submitted and not yet stored: more than a cluster has cores, few enough for its memory."""

LOGGERS = ("distributed", "distributed.client", "distributed.core", "distributed.batched", "asyncio")
"""Logs of a lost connection or of cancelled work, of which one message of our own tells."""

Rows = list[dict[str, Any]]
Work = Callable[[Sweep, int, int], Rows]
"""Forecasts chunk `number` of a sweep in chunks of `size` points."""


class ClusterSweep(NamedTuple):
    """What a worker needs to know of a sweep, once."""

    sweep: Sweep
    size: int
    fingerprint: Fingerprint


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Yields a client of the scheduler at ``dask://host:port``; at the end the work that is left is cancelled. Raises
    PlanError without `distributed`, and if no scheduler answers."""
    try:
        from distributed import Client
    except ImportError:
        rule = "sweeps on a cluster need distributed, which is not installed"
        raise PlanError("--on", rule, "pip install 'meshcast[cluster]'") from None
    with _quiet_logs():
        try:
            client = Client(address.replace("dask://", "tcp://"), timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            rule = f"no Dask scheduler answers ({str(error).splitlines()[0]})"
            raise PlanError("--on", rule, "Start one with `dask scheduler`, or correct the address", address) from None
        with client:
            yield client


def forecast_on(
    client: Client,
    work: Work,
    sweep: Sweep,
    size: int,
    numbers: Sequence[int],
    tell_kept: Callable[[], str],
    tell: Callable[[str], object],
) -> Iterator[tuple[int, Rows]]:
    """Yields chunks, by number, with their rows, in the order in which they finish.

    numbers: chunks to forecast.
    tell_kept: says how many points are stored, for error messages.
    tell: called with a sentence if the cluster has no worker for a while.
    Raises PlanError if a worker has other inputs, if a chunk fails on all workers, or if the scheduler goes away.
    """
    from distributed import as_completed

    absolute = replace(sweep, base=sweep.base.absolute())
    about = ClusterSweep(absolute, size, SweepInputs(sweep, size).fingerprint)
    # The result of a task, which Dask sends to each worker once; unlike scattered data, it is made again if lost.
    options: dict[str, Any] = {"work": work, "about": client.submit(_pass_on, about, pure=False), "pure": False}
    left = iter(numbers)
    first = list(islice(left, AHEAD))
    number_of = dict(zip(client.map(forecast_on_worker, first, **options), first, strict=True))
    finished = as_completed(list(number_of), loop=client.loop, with_results=True, raise_errors=False)
    while not finished.is_empty():
        _wait_for_chunk(client, finished, tell)
        future, rows = next(finished)
        number = number_of.pop(future)
        # Rows that arrived are good, also if the worker died since, whose future is "lost" then; without rows this is
        # the error.
        if not isinstance(rows, list):
            raise _explain_failure(future, number, tell_kept())
        yield number, rows
        for following in islice(left, 1):
            submitted = client.submit(forecast_on_worker, following, **options)
            number_of[submitted] = following
            finished.add(submitted)


def _wait_for_chunk(client: Client, finished: as_completed, tell: Callable[[str], object]) -> None:
    """Waits until a chunk is there, and tells if meanwhile no worker is: chunks wait for one without end."""
    look = time.monotonic() + CONNECT_S
    while not finished.has_ready():
        with finished.thread_condition:
            finished.thread_condition.wait(0.1)
        if time.monotonic() > look:
            look += CONNECT_S
            if not client.nthreads():
                tell("the cluster has no worker; the sweep goes on as soon as it has one")
                look = math.inf


def _explain_failure(future: Any, number: int, kept: str) -> MeshcastError:
    error = future.exception() if future.status == "error" else None
    again = "run the same command again: stored rows are kept"
    if isinstance(error, MeshcastError):
        return type(error)(error.where, error.rule + kept, error.remedy, error.value)
    if error is None:
        rule = f"the connection to the scheduler was lost, or the work was cancelled there{kept}"
        return PlanError("--on", rule, f"See to the cluster, then {again}")
    if type(error).__name__ == "KilledWorker":
        rule = f"chunk {number} ended every worker that it was given to, most likely for lack of memory{kept}"
        return PlanError("--on", rule, f"Start workers with more memory, then {again}")
    said = cut_middle(" ".join(f"{type(error).__name__}: {error}".split()), 200)
    rule = f"a worker or the scheduler cannot run meshcast ({said}){kept}"
    return PlanError("--on", rule, f"Install the same Python, packages and meshcast on all of them, then {again}")


@contextmanager
def _quiet_logs() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        yield
    finally:
        gc.collect()  # of a future whose error nobody asks for asyncio tells when it is removed
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# ------------------------------------------------------------------------------------------- on a worker

_same: dict[str, SweepInputs] = {}
"""Sweeps whose inputs are the same in this process, by fingerprint."""

_same_lock = threading.Lock()


def _pass_on(about: ClusterSweep) -> ClusterSweep:
    return about


def forecast_on_worker(number: int, work: Work, about: ClusterSweep) -> Rows:
    """Forecasts a chunk in a worker. Raises PlanError, before and after, if the worker has other inputs."""
    refuse_other_inputs(about)
    rows = work(about.sweep, number, about.size)
    refuse_other_inputs(about)
    return rows


def refuse_other_inputs(about: ClusterSweep) -> None:
    """Raises PlanError if this process has other inputs of the rows than that which submits them."""
    key = json.dumps(about.fingerprint)
    with _same_lock:  # a worker may have threads
        inputs = _same.get(key) or SweepInputs(about.sweep, about.size)
        changed = tell_changes(about.fingerprint, inputs.fingerprint) or ", ".join(inputs.find_changes())
        if not changed:
            _same[key] = inputs
            return
    import socket

    from distributed import get_worker

    rule = f"worker {get_worker().address} on {socket.gethostname()} has another {changed} than this command"
    remedy = "Install the same meshcast there, with the files of the job at the same paths, and restart the worker"
    raise PlanError("--on", rule, remedy)

"""A search on several processes, which tell each other of the plans that they meet.

Groups of layers with equal degrees share lowered layers and prices, so they share a process. Every process has a
queue and ends when no bound in it is better than the best plans of all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import numpy as np

from meshcast.experiments.runs.seeds import open_simulator
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import COUNTS, Certificate
from meshcast.experiments.search.frontier.clusters import SearchedCluster
from meshcast.experiments.search.frontier.plan_search import CountInterrupted, ForecastPlan, PlanSearch
from meshcast.experiments.search.space.space import LayerGroup
from meshcast.hardware.errors import Defect, MeshcastError
from meshcast.simulator.forecast.workers import count_cores

Groups = list[tuple[SearchedCluster, LayerGroup]]

PLANS_OF_A_PROCESS = 20_000
"""Points below which a further process is not worth its start."""


def run_search(search: PlanSearch, workers: int | None, progress: Callable[[Certificate], None]) -> Certificate:
    """Runs a search. workers: processes, as many as cores if None; a search of heterogeneous plans has a single one."""
    if isinstance(search, Search):
        return run_on_workers(search, workers or count_cores(), progress)
    return search.run(progress)


def run_on_workers(search: Search, workers: int, progress: Callable[[Certificate], None]) -> Certificate:
    """Runs a search on several processes, if it is large enough; by runs, a single process searches, all simulate."""
    if search.certificate.runs is not None:  # the order of the simulated plans decides which ones are simulated
        with open_simulator(workers) as search.simulator:
            return search.run(progress)
    began = time.process_time()
    try:
        search.begin(progress)
        search.count(progress)
        shares = share_groups(search, min(workers, 1 + search.certificate.plans // PLANS_OF_A_PROCESS))
    except KeyboardInterrupt:
        raise CountInterrupted from None
    search.certificate.cpu = time.process_time() - began
    if len(shares) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return search.run(progress)
    with _note_interrupts() as interrupts, _start_processes(search, shares) as processes:
        return _Parent(search, processes, progress).run(interrupts)


def share_groups(search: Search, workers: int) -> list[Groups]:
    """Returns the groups of every process: those of equal tensor-parallel degree together. Most work is where bounds
    are smallest, so the degrees are dealt out in the order of these, back and forth."""
    by_degree = defaultdict[tuple[int, int], Groups](list)
    for cluster, group in search.list_groups():
        by_degree[id(cluster), group.tp].append((cluster, group))
    if workers == 1:
        return [[pair for groups in by_degree.values() for pair in groups]]
    shares = [Groups() for _ in range(workers)]
    for number, groups in enumerate(sorted(by_degree.values(), key=partial(_least_value, search))):
        turn, at = divmod(number, workers)
        shares[workers - 1 - at if turn % 2 else at] += groups
    return [share for share in shares if share]


def _least_value(search: Search, groups: Groups) -> float:
    """Returns the smallest bound of groups that differ in micro-batches alone from the first, by their operators."""
    cluster, first = groups[0]
    same = [group for other, group in groups if group == first._replace(micro=group.micro)]
    return min(search.incumbents.bounds(cluster.groups.bound_operators(group), 0.0, cluster.use)[0] for group in same)


@contextmanager
def _start_processes(search: Search, shares: Sequence[Groups]) -> Iterator[dict[Connection, BaseProcess]]:
    context = multiprocessing.get_context("fork")
    pairs = [context.Pipe() for _ in shares]
    processes = []
    for (_, theirs), groups in zip(pairs, shares, strict=True):
        process = context.Process(target=_run_share, args=(search, groups, theirs, pairs), daemon=True)
        process.start()
        processes.append(process)
    for _, theirs in pairs:
        theirs.close()
    try:
        yield {ours: process for (ours, _), process in zip(pairs, processes, strict=True)}
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()


def _run_share(search: Search, groups: Groups, connection: Connection, pairs: Sequence[Any]) -> None:
    """Runs the share of a process of the search, with messages to the first process."""
    link = _Link(connection)
    for ours, theirs in pairs:
        ours.close()
        if theirs is not connection:
            theirs.close()
    search.certificate = replace(search.certificate, excluded=dict.fromkeys(search.certificate.excluded, 0), cpu=0.0)
    with suppress(OSError, EOFError):  # the first process is gone
        try:
            search.run(link.report, groups, link)
            connection.send(("end", (search.certificate, search.forecasts, search.open_bounds)))
        except (OSError, EOFError):
            raise
        except MeshcastError as error:
            connection.send(("error", error))
        except Exception as error:
            connection.send(("error", Defect.of(error, "search")))


@contextmanager
def _note_interrupts() -> Iterator[list[bool]]:
    """Notes Ctrl-C in a list, where it would end the process in the middle of a message."""
    noted: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(True)
        if callable(previous):  # it may count interrupts itself
            with suppress(KeyboardInterrupt):
                previous(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)


class _Link:
    """The connection of a process to the first process, and to Ctrl-C, which each of them receives, or the first
    process passes on."""

    EVERY = 0.1
    """CPU time between two reports of progress [s]."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self._reported = connection, 0.0
        self._hears, self._interrupted = False, False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._raise_once()

    def _raise_once(self) -> None:
        if self._interrupted and self._hears:
            self._hears = False
            raise KeyboardInterrupt

    @contextmanager
    def hearing_interrupts(self) -> Iterator[None]:
        self._hears = True
        try:
            self._raise_once()
            yield
        finally:
            self._hears = False

    @contextmanager
    def _passing_whole(self) -> Iterator[None]:
        """Lets Ctrl-C wait for the end of a message."""
        hears, self._hears = self._hears, False
        try:
            yield
        finally:
            self._hears = hears
        self._raise_once()

    def send(self, values: tuple[float, ...]) -> None:
        with self._passing_whole():
            self.connection.send(("found", values))

    def receive(self) -> Iterator[tuple[float, ...]]:
        while self.connection.poll():
            with self._passing_whole():
                values = self.connection.recv()
            yield values

    def report(self, certificate: Certificate) -> None:
        """Tells the first process how far the search is."""
        if certificate.cpu - self._reported >= self.EVERY:
            self._reported = certificate.cpu
            with self._passing_whole():
                self.connection.send(("progress", replace(certificate, ratios=[], fields={})))


class _Parent:
    """The first process: joins the plans of the others."""

    def __init__(
        self, search: Search, processes: dict[Connection, BaseProcess], progress: Callable[[Certificate], None]
    ) -> None:
        self.search, self.processes, self.progress = search, processes, progress
        self.whole = search.certificate
        self.parts: dict[Connection, Certificate | None] = dict.fromkeys(processes)
        self.ended: dict[Connection, tuple[list[ForecastPlan], np.ndarray]] = {}

    def run(self, interrupts: list[bool]) -> Certificate:
        """Takes messages until all processes have ended. interrupts: grows at every Ctrl-C."""
        while len(self.ended) < len(self.parts):
            self._take_messages()
            try:
                if not interrupts:
                    self.progress(self._sum())
            except KeyboardInterrupt:
                interrupts.append(True)
            if interrupts:  # a process that has only begun may hear the next one
                self._interrupt_all()
        return self._end()

    def _interrupt_all(self) -> None:
        """Interrupts all processes that run."""
        for connection, process in self.processes.items():
            if connection not in self.ended and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)

    def _tell(self, values: tuple[float, ...], but: Connection) -> None:
        """Tells all processes that run, but for `but`, of a plan."""
        for connection in self.parts:
            if connection is not but and connection not in self.ended:
                with suppress(OSError):  # it has ended a moment ago
                    connection.send(values)

    def _take_messages(self) -> None:
        waiting = [connection for connection in self.parts if connection not in self.ended]
        for connection in wait(waiting, timeout=0.2):
            assert isinstance(connection, Connection)
            try:
                kind, content = connection.recv()
            except EOFError:
                raise Defect("search", "a process of the search ended early", "Try again with --workers 1") from None
            if kind == "error":
                raise content
            if kind == "found":
                self.search.incumbents.add(content)
                self._tell(content, connection)
            elif kind == "progress":
                self.parts[connection] = content
            else:
                self.parts[connection], *rest = content
                self.ended[connection] = rest[0], rest[1]

    def _sum(self) -> Certificate:
        """Returns the certificate of all processes so far."""
        parts, whole = [part for part in self.parts.values() if part is not None], self.whole
        counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
        excluded = {name: count + sum(part.excluded[name] for part in parts) for name, count in whole.excluded.items()}
        best = min(parts, key=lambda part: part.incumbent, default=whole)
        return replace(
            whole,
            **counts,
            excluded=excluded,
            step=min((part.step for part in parts), default=whole.step),
            incumbent=best.incumbent,
            # Nothing is known of a process that has not reported yet.
            open_bound=min(part.open_bound for part in parts) if len(parts) == len(self.parts) else 0.0,
            ratios=[ratio for part in parts for ratio in part.ratios],
            cpu=whole.cpu + sum(part.cpu for part in parts),
            complete=all(part.complete for part in parts) and len(self.ended) == len(self.parts),
        )

    def _end(self) -> Certificate:
        """Joins the plans of all processes, and what they leave open."""
        search, certificate = self.search, self._sum()
        search.forecasts = [plan for plans, _ in self.ended.values() for plan in plans]
        search.certificate = certificate
        if search.best:
            certificate.step = search.best[0].forecast.step_time
        if len(certificate.objectives) > 1:
            certificate.front_gap = search.incumbents.gap(np.concatenate([bounds for _, bounds in self.ended.values()]))
        if certificate.complete and certificate.invalid and certificate.invalid == certificate.admitted:
            search.explain_rule()
        return certificate

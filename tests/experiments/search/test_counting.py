"""Counting the plans of a search: against the points themselves, its effort, and its interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

import meshcast
from meshcast.experiments.search.frontier import workers
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.plan_search import CountInterrupted
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.limits import LimitedSpace, Limits
from meshcast.experiments.search.space.space import Space
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY, interrupt, open_space

MANY: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 6},
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": [1, 2], "sequence": 4096},
    "plan": {
        **{"tp": [1, 2, 4], "ep": [1, 2], "pp": "auto", "chunks": "auto", "partition": "auto", "order": "auto"},
        **{"schedule": ["1f1b", "interleaved-1f1b", "zb-v", "hanayo"], "recompute": ["none", "full"]},
        **{"recompute_layers": "auto", "zero": [0, 1], "shard": "auto"},
    },
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"where": ["plan.chunks * plan.pp <= 4", "plan.dp > 1 or plan.zero == 0"]},
        {"where": ["plan.order == 'pp-dp-cp-tp'", "plan.recompute_layers != 2"]},
        {"near_measured": True},
        {"where": ["plan.partition == 'even'"], "near_measured": True},
    ],
)
def test_counts_are_those_of_the_points(options: dict[str, Any]) -> None:
    limits = SearchOptions(**options).limits
    space, plans = LimitedSpace(MANY, Path("."), limits), 0
    measured = space._measured
    for group in space.groups():
        admitted, excluded = 0, {"where": 0, "program": 0, "near_measured": 0}
        for pipeline in space.pipelines(group):
            every, kept = space.steps(group, *pipeline.place), space._choices_by_constraints(group, pipeline)
            excluded["where"] += len(every) - len(kept)
            is_measured = measured is None or measured.may_admit(group, pipeline)
            admitted += len(kept) * is_measured
            excluded["near_measured"] += len(kept) * (not is_measured)
        assert space.size(group) == admitted and space.count_excluded(group) == excluded
        plans += admitted + sum(excluded.values())
    search = open_search(MANY, limits=limits)
    search.count()
    assert search.certificate.plans == plans > 2_000


def test_pipelines_are_distinct_and_valid() -> None:
    space = open_space(MANY)
    for group in space.groups():
        pipelines = space.pipelines(group)
        assert len({*pipelines}) == len(pipelines)
        for pipeline in pipelines:
            ranks = group.tp * group.cp * pipeline.pp
            assert 16 % ranks == 0 and 32 % (group.micro * 16 // ranks) == 0
            assert pipeline.mesh_order == "pp-dp-cp-tp" or 1 < pipeline.pp < 16 // (group.tp * group.cp)
            assert pipeline.recomputed is None or group.recompute == "full"


def test_the_watch_sees_the_count() -> None:
    seen = list[tuple[bool, int, int, float]]()

    def watch(found: Certificate) -> None:
        seen.append((found.counting, found.plans, found.opened, found.cpu))

    certificate = meshcast.search(TINY, top=1, watch=watch, workers=1).certificate
    counted = [report for report in seen if report[0]]
    assert counted and seen[: len(counted)] == counted and not any(opened for *_, opened, _ in counted)
    plans = [report[1] for report in counted]
    assert plans == sorted(plans) and plans[-1] == certificate.plans
    assert not certificate.counting and certificate.cpu >= counted[-1][3]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_count_is_part_of_the_effort(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)
    clock, spent, size = time.process_time, [0.0], Space.size

    def take_a_minute(self: Space, group: Any) -> int:
        spent[0] += 60.0
        return size(self, group)

    monkeypatch.setattr(Space, "size", take_a_minute)
    monkeypatch.setattr(time, "process_time", lambda: clock() + spent[0])
    search = open_search({**TINY, "plan": {"tp": [1, 2], "zero": [0, 1]}})
    certificate = workers.run_on_workers(search, processes, lambda _: None)
    counting = 60.0 * sum(len(cluster.space.groups()) for cluster in search.clusters)
    assert certificate.complete and counting <= certificate.cpu < counting + 60.0


def test_an_interrupted_count_proves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY), "utf-8")
    words = "meshcast: interrupted before the search began, while its plans were counted; nothing is proven yet"
    for place in (
        "meshcast.experiments.search.space.space.Space.size",
        "meshcast.experiments.search.frontier.workers.share_groups",
        "meshcast.experiments.search.search_job.HeterogeneousFields",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, interrupt)
            heterogeneous = ["--heterogeneous"] if "Heterogeneous" in place else []
            result = run("search", job, "--json", *heterogeneous)
            assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", words)
            with pytest.raises(CountInterrupted):
                meshcast.search(TINY, heterogeneous=bool(heterogeneous))


def test_a_count_that_was_interrupted_can_be_made_again() -> None:
    search, again = open_search(TINY, limits=Limits()), open_search(TINY)
    with pytest.raises(CountInterrupted):
        search.count(interrupt)
    assert search.certificate.counting
    search.count()
    again.count()
    assert search.certificate.plans == again.certificate.plans and not search.certificate.counting
    assert search.certificate.groups == again.certificate.groups == len(search.list_groups())


# ------------------------------------------------------------------------------------------- repeated interrupts


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler receives that raises KeyboardInterrupt."""
    received = list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    yield received
    signal.signal(signal.SIGINT, previous)


def test_the_command_knows_of_an_interrupt_of_processes(handled: list[int]) -> None:
    with workers._note_interrupts() as noted:
        os.kill(os.getpid(), signal.SIGINT)
    assert noted == [True] and handled == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("apart", "raised"), [(60.0, 1), (0.0, 3)])
def test_an_interrupt_at_once_after_another_is_the_same(apart: float, raised: int) -> None:
    code = (
        "import atexit, os, signal, sys, time\n"
        "import meshcast.__main__ as command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"  # called last
        f"command.REPEATED = {apart}\n"
        "received, raised = command.record_interrupts(), 0\n"
        "for _ in range(3):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        raised += 1\n"
        "print(raised, len(received))\n"
        "sys.exit(command.INTERRUPTED)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "") and done.stdout.split() == [f"{raised}", f"{raised}", "True"]


def test_an_interrupt_that_a_callback_of_a_library_loses_is_raised_again() -> None:
    code = (
        "import ctypes, os, signal, sys, time\n"
        "import meshcast.__main__ as command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "command.record_interrupts()\n"
        "@ctypes.CFUNCTYPE(None)\n"
        "def notify():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.01)\n"
        "try:\n    notify()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    sys.exit(command.INTERRUPTED)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")

"""A job that is changed by controls: what they offer, refuse and answer, without a browser; and the page over its
websocket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from meshcast.experiments.explorer.controls import REPLICAS
from meshcast.experiments.explorer.explored_job import ExploredJob
from meshcast.experiments.explorer.server import ExplorerServer
from meshcast.simulator import load_job, simulate

if TYPE_CHECKING:
    from bokeh.client import ClientSession

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2, "dp": 2},
}


def test_an_offered_value_is_forecast_as_a_job_that_states_it_and_a_refused_value_changes_nothing() -> None:
    """Replicas that the plan states as the GPUs leave them follow the other degrees."""
    explored = ExploredJob(load_job(JOB))
    for control in explored.list_controls():
        for value in control.values:
            now, job = explored.get(control.field), explored.job
            refusal = explored.find_refusal(control, value)
            explored.change(control.field, value)
            assert explored.refusal == refusal
            if refusal:
                assert explored.job is job and explored.get(control.field) == now
            elif value is not None and control.field != REPLICAS:
                assert explored.get(control.field) == value or explored.get(control.field) is None
            explored = ExploredJob(load_job(JOB))
    explored.change("plan.tp", 8)
    stated = load_job({**JOB, "plan": {"tp": 8, "pp": 2}})
    assert explored.forecast().step_time == simulate(stated).step_time


@contextmanager
def serve() -> Iterator[ExplorerServer]:
    """Serves the page of `JOB` in a thread."""
    opened, ready = list[ExplorerServer](), threading.Event()

    def run() -> None:
        opened.append(ExplorerServer(load_job(JOB), 0))
        opened[0].serve(lambda _: ready.set())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield opened[0]
    finally:
        opened[0].loop.add_callback(opened[0].loop.stop)
        thread.join(10)
    assert not thread.is_alive()


def test_the_page_answers_over_its_websocket() -> None:
    """The client of Bokeh drops what comes while it waits for a reply: what the session shows is pulled anew."""
    client = pytest.importorskip("bokeh.client", reason="bokeh is not installed (pip install 'meshcast[report]')")

    def read_summary(session: ClientSession) -> list[str]:
        return [part.text for part in session.document.select({"name": "summary"})]

    with serve() as server:
        session = client.pull_session(url=server.address)
        session.document.select_one({"title": "tp"}).value = "2"
        session.force_roundtrip()
        changed = client.pull_session(url=server.address, session_id=session.id)
        assert read_summary(session) and read_summary(changed)[0] not in read_summary(session)
        for opened in (session, changed):
            opened.close()

"""A job that is changed by controls: what they offer, refuse and answer, without a browser; and the page over its
websocket."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from meshcast.experiments.explorer.controls import REPLICAS
from meshcast.experiments.explorer.explored_job import ExploredJob
from meshcast.simulator import load_job, simulate

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


def test_the_page_answers_over_its_websocket() -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")
    from bokeh.client import pull_session

    from meshcast.experiments.explorer.server import open_server

    opened, ready = [], threading.Event()

    def run() -> None:
        opened.append(open_server(load_job(JOB), 0))
        ready.set()
        opened[0].io_loop.start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    server, loop = opened[0], opened[0].io_loop
    try:
        session = pull_session(url=f"http://localhost:{server.port}/")
        select = next(s for s in session.document.select({"title": "tp"}))
        shown = lambda: [part.text for part in session.document.select({"name": "summary"})]  # noqa: E731
        before = shown()
        select.value = "2"
        for _ in range(100):
            session.force_roundtrip()
            if shown() != before:
                break
            time.sleep(0.05)
        assert before and shown() and shown() != before
        session.close()
    finally:
        loop.add_callback(server.stop, wait=False)
        loop.add_callback(loop.stop)
        thread.join(10)
    assert not thread.is_alive()

"""Serves the page on this machine alone, until it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from meshcast.hardware.errors import PlanError
from meshcast.simulator.job.job import Job

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.server.server import Server

HOST = "localhost"


def open_server(job: Job, port: int) -> Server:
    """Returns the server of the page, which answers once its loop runs. port: 0: any that is free.

    Raises PlanError for a port that is taken.
    """
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.server import Server

    application = Application(FunctionHandler(partial(_make_page, job)))
    try:
        server = Server({"/": application}, port=port, address="127.0.0.1")
    except OSError as error:
        rule = f"the port cannot be opened ({error.strerror or error})"
        raise PlanError("--port", rule, "Name another one, or leave it out", port) from None
    for name in (HOST, "127.0.0.1"):
        server._tornado._websocket_origins.add(f"{name}:{server.port}")
    server.start()
    return server


def _make_page(job: Job, document: Document) -> None:
    from meshcast.experiments.explorer.page import ExplorerPage

    ExplorerPage(job, document)


def serve(server: Server, show: Callable[[str], object]) -> None:
    """Serves the page until Ctrl-C. show: is told its address."""
    show(f"http://{HOST}:{server.port}/")
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        pass
    finally:
        server.unlisten()
        server.stop(wait=False)

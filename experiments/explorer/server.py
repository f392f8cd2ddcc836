"""Serves the page on this machine alone, until it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

from meshcast.experiments.explorer.explored_job import ExploredJob
from meshcast.experiments.explorer.page import ExplorerPage
from meshcast.hardware.errors import PlanError
from meshcast.simulator.job.job import Job

if TYPE_CHECKING:
    from bokeh.document import Document

NAME, ADDRESS = "localhost", "127.0.0.1"
"""Of this machine, to itself."""


class ExplorerServer:
    """The server of the page, which answers once its loop runs; every browser window has a job of its own.

    address: of the page.
    """

    def __init__(self, job: Job, port: int) -> None:
        """port: 0: any that is free. Raises PlanError for one that is taken, and for a job that has no controls."""
        from bokeh.application import Application
        from bokeh.application.handlers.function import FunctionHandler
        from bokeh.server.server import BaseServer
        from bokeh.server.tornado import BokehTornado
        from bokeh.server.util import bind_sockets
        from tornado.httpserver import HTTPServer
        from tornado.ioloop import IOLoop

        ExploredJob(job)  # a page that refuses the job would have nothing to show
        self._job, self._pages = job, WeakSet[ExplorerPage]()
        try:
            sockets, port = bind_sockets(ADDRESS, port)
        except OSError as error:
            rule = f"the port cannot be opened ({error.strerror or error})"
            raise PlanError("--port", rule, "Name another one, or leave it out", port) from None
        origins = [f"{name}:{port}" for name in (NAME, ADDRESS)]  # other sites' pages may not talk to this one
        application = Application(FunctionHandler(self._make_page))
        tornado = BokehTornado({"/": application}, extra_websocket_origins=origins)
        http = HTTPServer(tornado)
        http.add_sockets(sockets)
        self.loop, self.address = IOLoop.current(), f"http://{NAME}:{port}/"
        self._server = BaseServer(self.loop, tornado, http)
        self._server.start()

    def _make_page(self, document: Document) -> None:
        self._pages.add(ExplorerPage(self._job, document))

    def serve(self, show: Callable[[str], object]) -> None:
        """Serves the page until Ctrl-C, which ends searches too. show: is told its address."""
        try:
            show(self.address)
            self.loop.start()
        except KeyboardInterrupt:
            pass
        finally:
            for page in self._pages:
                page.cancel_search()
            self._server.unlisten()
            self._server.stop(wait=False)

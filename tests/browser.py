"""Opens a page in a headless browser and says what it did: errors, requests, widths, how much every figure shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-unsafe-swiftshader", "--hide-scrollbars"),
)

LISTEN = """<script>
window.found = [];
for (const level of ['error', 'warn']) {
  const say = console[level].bind(console);
  console[level] = (...words) => { found.push(words.join(' ')); say(...words) };
}
for (const name of ['alert', 'confirm', 'prompt', 'open', 'print']) window[name] = () => found.push(name);
addEventListener('beforeunload', () => found.push('left'));
addEventListener('error', event => found.push(String(event.message)));
addEventListener('unhandledrejection', event => found.push(String(event.reason)));
addEventListener('securitypolicyviolation', event => found.push('blocked ' + event.blockedURI));
</script>"""

TOOLS = """
const done = arguments[arguments.length - 1];
const pause = seconds => new Promise(next => setTimeout(next, 1000 * seconds));
const frames = async () => { for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame) };
function* below(node) {
  for (const one of node.querySelectorAll('*')) { yield one; if (one.shadowRoot) yield* below(one.shadowRoot) }
}
const drawn = () => window.Bokeh && Bokeh.documents.length && Bokeh.documents.every(one => one.is_idle);
async function wait() {
  for (let i = 0; i < 600 && !drawn(); i++) await pause(0.1);
  await frames();
}
"""

LOOK = (
    TOOLS
    + """
(async () => {
  await pause(2);
  const every = [...below(document)];
  for (const kind of ['mouseover', 'focus', 'toggle', 'load']) every.forEach(one => one.dispatchEvent(new Event(kind)));
  const handled = one => [...one.attributes].some(attribute => attribute.name.startsWith('on'));
  const handlers = every.filter(handled).map(one => one.outerHTML);
  const scripts = every.filter(one => one.matches('[href^="javascript:"], [src^="javascript:"]')).length;
  const names = performance.getEntriesByType('resource').map(one => one.name);
  const requests = names.filter(name => /^https?:/.test(name));
  done({title: document.title, scripts, handlers, requests, errors: found});
})();
"""
)
"""Sends events to all elements of a page; says which have a handler or the address of a script, and what it loads."""

TOUCH = (
    TOOLS
    + """
const tips = new Set();
async function hover(figure) {
  const box = figure.getBoundingClientRect();
  for (let j = 1; j < 8; j++) for (let i = 1; i < 12; i++) {
    const place = {clientX: box.left + box.width * i / 12, clientY: box.top + box.height * j / 8};
    const mouse = {pointerType: 'mouse', pointerId: 1, isPrimary: true, bubbles: true};
    figure.dispatchEvent(new PointerEvent('pointermove', {...place, ...mouse}));
    await new Promise(requestAnimationFrame);
    for (const tip of below(document.body)) if (tip.matches('[data-value]')) tips.add(tip.textContent);
  }
}
(async () => {
  await wait();
  const every = [...below(document.body)];
  for (const one of every) for (const kind of ['mouseenter', 'mouseover', 'mouseout', 'focus', 'toggle', 'load'])
    one.dispatchEvent(new Event(kind));
  for (const figure of every.filter(one => one.matches('.bk-events'))) await hover(figure);
  for (const head of every.filter(one => one.matches('.slick-header-column'))) { head.click(); await frames() }
  for (const fold of document.querySelectorAll('details')) fold.open = true;
  const kinds = [...new Set([...below(document)].map(one => one.tagName.toLowerCase()))].sort();
  const heads = [...below(document)].filter(one => one.matches('.slick-column-name')).map(one => one.textContent);
  const requests = performance.getEntriesByType('resource').map(one => one.name);
  done({idle: !!drawn(), title: document.title, tips: [...tips], kinds, heads, requests, errors: window.found});
})();
"""
)
"""Points at everything, clicks on heads of tables; says what was shown, and which kinds of elements there are."""

ANSWER = (
    TOOLS
    + """
function coloured(root) {
  let most = 0;
  for (const one of below(root)) {
    if (one.tagName !== 'CANVAS' || !one.width || !one.height) continue;
    const pixels = one.getContext('2d', {willReadFrequently: true}).getImageData(0, 0, one.width, one.height).data;
    let count = 0;
    for (let i = 0; i < pixels.length; i += 4)
      if (pixels[i + 3] > 40 && Math.max(pixels[i], pixels[i + 1], pixels[i + 2])
          - Math.min(pixels[i], pixels[i + 1], pixels[i + 2]) > 25) count++;
    most = Math.max(most, count / (pixels.length / 4));
  }
  return most;
}
const shares = () => Object.fromEntries([...document.querySelectorAll('[id^="figure-"]')].map(
  (one, i) => [one.closest('section').id + i, coloured(one)]));
function timeline() {
  for (const one of Bokeh.documents) for (const model of one._all_models.values())
    if (model.type === 'Figure' && model.x_range.min_interval) return model;
}
(async () => {
  await wait();
  const found = {idle: !!drawn(), shares: shares(), inner: innerWidth, zoomed: {}, before: [], after: []};
  found.scroll = document.documentElement.scrollWidth;
  found.requests = performance.getEntriesByType('resource').map(one => one.name);
  if (timeline()) {
    const range = timeline().x_range;
    range.setv({start: range.end * 0.5, end: range.end * 0.501});
    await frames();
    found.zoomed = shares();
  }
  const cell = [...below(document)].find(one => one.classList.contains('slick-header-column'));
  if (cell) {
    const column = () => [...below(document)].filter(one => one.matches('.slick-row .l0')).map(one => one.textContent);
    found.before = column(); cell.click(); await frames(); found.after = column();
  }
  found.errors = window.found;
  done(found);
})();
"""
)


@dataclass(frozen=True)
class OpenedPage:
    """What a browser saw.

    errors: messages of the console, of scripts, and of what the policy forbade.
    requests: addresses that were loaded.
    shares: by figure, the share of its pixels that are coloured; zoomed: with the timeline zoomed in.
    scroll, inner: width of the page and of the window [pixels].
    idle: whether all figures were drawn.
    before, after: the first column of a table, and after a click on its heading.
    """

    errors: list[str]
    requests: list[str]
    shares: dict[str, float]
    zoomed: dict[str, float]
    scroll: int
    inner: int
    idle: bool
    before: list[str]
    after: list[str]


class Browser:
    """A headless browser that is driven over HTTP, as WebDriver has it; skips the test where there is none."""

    def __init__(self, folder: Path) -> None:
        browser = next(filter(None, map(shutil.which, NAMES)), None)
        driver = shutil.which("chromedriver")
        if browser is None or driver is None:
            pytest.skip(f"no headless browser here: it takes one of {', '.join(NAMES)}, and chromedriver")
        self.folder, self.browser = folder, browser
        self._driver = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        port = next(
            found[1] for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy to this machine
        self._address = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self._driver.terminate()
        self._driver.wait(30)

    def open(self, html: str, width: int) -> OpenedPage:
        """Opens a page in a window of `width` pixels."""
        return OpenedPage(**self.run(self._write(html), width, ANSWER))

    def touch(self, html: str) -> dict[str, Any]:
        """Opens a page, points at all of it and clicks on its tables; returns what `TOUCH` says."""
        return dict(self.run(self._write(html), 1280, TOUCH))

    def _write(self, html: str) -> str:
        """Writes a page that listens to what happens in it; returns its address."""
        file = self.folder / "page.html"
        file.write_text(html.replace("<head>", f"<head>{LISTEN}", 1), "utf-8")
        return file.as_uri()

    def run(self, address: str, width: int, script: str, *arguments: Any) -> Any:
        """Opens an address in a window of `width` pixels and runs a script there, which calls its last argument with
        its answer."""
        options = [*OPTIONS, f"--user-data-dir={self.folder / f'profile{width}'}"]
        wanted = {"goog:chromeOptions": {"binary": self.browser, "args": options}, "timeouts": {"script": 240_000}}
        session = f"/session/{self._ask('/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        try:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
            self._ask(f"{session}/goog/cdp/execute", command)
            self._ask(f"{session}/url", {"url": address})
            return self._ask(f"{session}/execute/async", {"script": script, "args": arguments})
        finally:
            self._ask(session, None, "DELETE")

    def _ask(self, path: str, data: Any, method: str = "POST") -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            self._address + path, body, {"Content-Type": "application/json"}, method=method
        )
        with self._opener.open(request, timeout=300) as answer:
            return json.load(answer)["value"]

"""What a browser opens: texts of a user change neither the elements nor the scripts of a page, whatever they hold."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from markdown_it import MarkdownIt

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")

import meshcast
from meshcast.experiments.explain import sensitivity
from meshcast.experiments.render import markdown
from meshcast.experiments.render.bokeh.html import (
    BarPiece,
    Html,
    KeyFigure,
    bar,
    details,
    key_figures,
    legend,
    listing,
    table,
)
from meshcast.experiments.render.bokeh.job_report import report_job
from meshcast.experiments.render.bokeh.load import load_plans
from meshcast.experiments.render.bokeh.page import PageSection, render_page
from meshcast.experiments.render.bokeh.results import summary
from meshcast.experiments.render.bokeh.results_report import report_results
from meshcast.hardware.documents.document import read_yaml
from meshcast.hardware.errors import escape_controls
from meshcast.simulator import load_job, simulate
from tests.browser import LISTEN, LOOK, Browser
from tests.draws import drawn
from tests.payloads import FILE_NAMES, HARMLESS, PAYLOADS
from tools.pages import catalog as catalog_page

ROOT = Path(__file__).parents[1]
CATALOG, EXPERIMENTS = ROOT / "hardware" / "catalog", ROOT / "experiments"

EVERY = " ".join(PAYLOADS.values())
"""All payloads in one text."""

ORDER = [*dict.fromkeys((EVERY, PAYLOADS["formula of a page"], *PAYLOADS.values()))]
"""Texts by the number of their place."""

Texts = Callable[[int], str]
"""The text of a place, by the number of the place."""


class Outline(HTMLParser):
    """What a browser makes of a page besides its texts.

    Attributes:
        parts: elements with their attributes, and comments. Left out are values of tooltips (`title`) and the class of
            cells with numbers, as some texts are numbers.
        scripts: scripts and styles; of JSON its shape.
        text: all texts.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts, self.scripts, self.text = list[Any](), list[Any](), ""
        self._kind = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        shown = ((name, value) for name, value in attrs if (name, value) != ("class", "number"))
        self.parts.append((tag, *((name, "" if name == "title" else value) for name, value in shown)))
        self.text += " ".join(value or "" for name, value in attrs if name == "title")
        self._kind = {"script": dict(attrs).get("type") or "script", "style": "style"}.get(tag, "")

    def handle_endtag(self, tag: str) -> None:
        self.parts.append(f"/{tag}")
        self._kind = ""

    def handle_data(self, data: str) -> None:
        if self._kind:
            self.scripts.append(describe_shape(json.loads(data)) if self._kind == "application/json" else data)
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.parts.append(("comment", data))

    def handle_decl(self, decl: str) -> None:
        self.parts.append(("declaration", decl))

    unknown_decl = handle_pi = handle_comment


def describe_shape(data: Any) -> Any:
    """Returns JSON with its keys and the kinds of models and columns of Bokeh, but without its texts and numbers.

    Of texts that Bokeh takes for more than text it says what Bokeh makes of them: elements of heads of tables, formulas
    in labels of axes.
    """
    if isinstance(data, dict):
        if data.get("name") == "TableColumn":
            return [data["attributes"]["field"], Outline(data["attributes"]["title"]).parts]
        named = {key: value for key, value in data.items() if key in ("type", "name", "id", "field")}
        shape = {key: named[key] if key in named else describe_shape(value) for key, value in data.items()}
        labels = data.get("major_label_overrides", {"entries": []})["entries"]
        return shape | {"formulas": [label for _, label in labels if isinstance(label, str) and "$$" in label]}
    return [describe_shape(value) for value in data] if isinstance(data, list) else type(data).__name__


def assert_same_pages(make: Callable[[Texts], str]) -> Outline:
    """Asserts that a page has the same outline with harmless texts and with payloads; returns the latter."""
    plain = Outline(make(lambda number: f"{HARMLESS}{number}"))
    odd = Outline(make(lambda number: ORDER[number]))
    assert odd.parts == plain.parts
    assert odd.scripts == plain.scripts
    return odd


# --------------------------------------------------------------------------------------------------- inputs with texts


def plant(data: Any, text: str) -> Any:
    """Returns an entry of the catalog with a text in every place that holds any."""
    if not isinstance(data, dict):
        return data
    return {
        key: text if key in ("name", "title", "note", "source") else plant(value, text) for key, value in data.items()
    }


def read_catalog(kind: str, name: str, text: str) -> dict[str, Any]:
    """Returns an entry of the catalog with a text in every place that holds any."""
    return dict(plant({"name": "", **read_yaml(CATALOG / kind / f"{name}.yaml").data}, text))


def describe_job(text: str) -> dict[str, Any]:
    """Returns a job with a text in every place that holds any, the entries of its hardware among them."""
    node = read_catalog("nodes", "dgx-h100", text) | {"gpu": read_catalog("gpus", "h100-sxm", text)}
    node["scale_up"]["link"] = read_catalog("links", "nvlink4", text)
    node["nics"]["link"] = read_catalog("links", "infiniband-ndr", text)
    return {
        "id": text,
        "model": {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128, "name": text},
        "cluster": {"name": text, "title": text, "source": text, "node": node, "nodes": 1},
        "framework": {"name": "megatron-core", "set": {"sigmas": {text: 0.5}}},
        "batch": {"global": 16, "micro": 1},
        "plan": {"tp": 2, "pp": 2},
        "published": {"step_time_s": 1.0, "source": text},
    }


def describe_plans(texts: Texts, fields: int) -> list[dict[str, Any]]:
    """Returns values of fields with texts as names, and as values, in four plans that differ in all of them."""
    return [
        {"plan.tp": 2**plan} | {texts(place): f"{texts(place)} {plan}" for place in range(fields)} for plan in range(4)
    ]


def write_answer(folder: Path, texts: Texts, name: str = "answer") -> Path:
    """Writes an answer of a search with texts in every place that holds any."""
    best = [
        {"plan": plan, "step_time_s": 1.0 + number, "tokens_per_s_per_gpu": 100.0 - number, "cost": None,
         "peak_device_gib": 10.0 + number % 3, "mfu": {"palm": 0.4}, "interval_90_s": [0.9, 1.1]}
        for number, plan in enumerate(describe_plans(texts, 3))
    ]  # fmt: skip
    space = {"plans": texts(0), "fields": {texts(0): [texts(0), 1]}}
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"best": best, "certificate": {"space": space, "cut": {texts(0): 1}, texts(1): texts(2)}})
    )
    return path


def write_rows(folder: Path, texts: Texts, name: str = "rows", fields: int = 3) -> Path:
    """Writes rows of a sweep with texts in every place that holds any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number, plan in enumerate(describe_plans(texts, fields)):
        status = ("fits", "fits", "does-not-fit", "invalid")[number]
        figures = {"step_time_s": 1.0 + number, "tokens_per_s_per_gpu": 9.0 - number, "peak_device_gib": 8.0 + number}
        rows.append({"index": number, **plan, "status": status, "reason": texts(0), "limits": texts(0), **figures})
    about = json.dumps({"job": {"model": texts(0), "cluster": {"name": texts(0)}}, "points": 9, "certificate": None})
    path = folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata({"meshcast": about}), path)
    return path


# --------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("what", drawn(PAYLOADS, keep=3))
def test_a_text_stays_a_text(what: str) -> None:
    """In texts, attributes, titles and contents of a page, alone and behind all others."""

    def make(texts: Texts) -> str:
        text = texts(ORDER.index(PAYLOADS[what]))
        pieces = (
            table([text], [[text], [text]], foot=[text]),
            details(text, listing([text])),
            key_figures([KeyFigure(text, text, text)]),
            legend([(text, "#000000")]),
            bar([BarPiece(0.0, 1.0, "#000000", text)]),
        )
        return render_page(text, Html("<p>{}</p>").format(text), [PageSection("one", text, pieces)])

    page = assert_same_pages(make)
    shown = escape_controls(PAYLOADS[what])
    assert page.text.count(shown) == 16 and not re.search(r"[\x00-\x09\x0b-\x1f\u2028-\u202e]", page.text)


def test_the_report_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = sensitivity.hardware_figures
    monkeypatch.setattr(sensitivity, "hardware_figures", lambda *given: figures(*given)[:3])
    monkeypatch.setattr(sensitivity, "assumed_fields", lambda *given: [])

    def make(texts: Texts) -> str:
        job = load_job(describe_job(texts(0)))
        return report_job(job, simulate(job))

    page = assert_same_pages(make)
    assert page.text.count(escape_controls(EVERY)) > 25


@pytest.mark.parametrize("write", [write_answer, write_rows])
def test_the_report_of_many_plans(write: Callable[[Path, Texts], Path], tmp_path: Path) -> None:
    def make(texts: Texts) -> str:
        plans = load_plans(write(tmp_path, texts))
        assert plans is not None
        return report_results(plans)

    page = assert_same_pages(make)
    assert page.text.count(escape_controls(EVERY)) >= 5


@pytest.mark.parametrize("name", drawn(FILE_NAMES.values(), keep=3))
def test_names_of_files(name: str, tmp_path: Path) -> None:
    def make(texts: Texts) -> str:
        plans = load_plans(write_answer(tmp_path, lambda number: f"{HARMLESS}{number}", name))
        assert plans is not None
        return render_page(summary.make_title(plans), summary.make_lead(plans), [summary.make_section(plans)])

    assert escape_controls(name) in assert_same_pages(make).text


def summarize_elements(page: str) -> set[Any]:
    """Returns the kinds of elements of a page of text, with the names of their attributes: texts break its lines."""
    return {
        part if isinstance(part, str) else (part[0], *(name for name, _ in part[1:])) for part in Outline(page).parts
    }


def test_pages_in_notebooks() -> None:
    pages = []
    for text in (HARMLESS, EVERY):
        job, field = describe_job(text), f"framework.set.sigmas.{text.replace('.', '')}"
        rows = meshcast.sweep({"job": job, "vary": {field: [0.1, 0.2]}}, workers=1)
        pages.append([meshcast.simulate(job)._repr_html_(), rows._repr_html_()])
    for plain, odd in zip(*pages, strict=True):
        assert summarize_elements(odd) == summarize_elements(plain)
        assert "PWNED" in Outline(odd).text


@pytest.mark.filterwarnings("ignore:Glyph")
def test_figures_as_images_of_xml(tmp_path: Path) -> None:
    """An SVG image is well-formed, and its elements are those of harmless texts."""
    kinds = []
    for text in (HARMLESS, escape_controls(EVERY)):
        meshcast.simulate(describe_job(text)).memory().savefig(tmp_path / "memory.svg")
        elements = ElementTree.parse(tmp_path / "memory.svg").iter()
        kinds.append({(element.tag, *sorted(element.attrib)) for element in elements})
    assert kinds[0] == kinds[1]


def test_only_literals_are_html() -> None:
    """Text becomes `Html` by its escaping alone: what else is called HTML is a literal of the program."""
    calls = [
        (path.name, ast.unparse(call))
        for path in (EXPERIMENTS / "render/bokeh").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Html", "cls", "Markup", "Html.unescape")
        if not (len(call.args) == 1 and isinstance(call.args[0], ast.Constant))
    ]
    ours = ["Html(describe_figures(figures))", "Html(policy)", "Html(style)", "Html(text)"]
    assert sorted(words for name, words in calls if name == "page.py") == ours
    assert {name for name, _ in calls} == {"page.py", "html.py"}


@pytest.mark.parametrize("what", drawn(PAYLOADS, keep=3))
def test_texts_on_pages_of_the_docs(what: str) -> None:
    """In cells, lists of points and numbered ones."""

    def make(texts: Texts) -> str:
        text = markdown.escape_text(texts(ORDER.index(PAYLOADS[what])))
        return render_markdown(f"| a | b |\n| --- | --- |\n| {text} | {text} |\n\n- `x`: {text}\n\n1. peak: {text}\n")

    assert assert_same_pages(make).text.count(" ".join(escape_controls(PAYLOADS[what]).split())) == 4


@pytest.mark.slow
def test_the_page_of_the_catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read, files = catalog_page.load, dict[tuple[str, str], Path]()
    monkeypatch.setattr(catalog_page, "load", lambda kind, name: read(kind, str(files.get((kind, name), name))))

    def make(texts: Texts) -> str:
        for kind, name in (("gpus", "h100-sxm"), ("links", "nvlink4"), ("nodes", "dgx-h100")):
            path = files[kind, name] = tmp_path / f"{name}-{len(texts(0))}.yaml"
            path.write_text(yaml.safe_dump(read_catalog(kind, name, texts(0)) | {"name": name}), "utf-8")
        return render_markdown(catalog_page.page())

    assert "document.title='PWNED'" in assert_same_pages(make).text


def render_markdown(text: str) -> str:
    """Returns Markdown with tables and elements of HTML, as pages of the docs have them, as HTML."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_browser_shows_texts_and_runs_none(browser: Browser, tmp_path: Path) -> None:
    """Every payload is a field, its value, a name of the job and its hardware: no dialog, no request, no element."""

    def make(texts: Texts) -> list[str]:
        job = load_job(describe_job(texts(0)))
        tables = load_plans(write_rows(tmp_path, texts, fields=len(ORDER))), load_plans(write_answer(tmp_path, texts))
        return [
            report_job(job, simulate(job), sensitivities=False),
            *(report_results(plans) for plans in tables if plans),
        ]

    harmless, hostile = make(lambda number: f"{HARMLESS}{number}"), make(lambda number: ORDER[number])
    tips = []
    for plain, odd in zip(map(browser.touch, harmless), map(browser.touch, hostile), strict=True):
        assert odd["idle"] and plain["idle"]
        assert (odd["errors"], odd["requests"]) == (plain["errors"], plain["requests"]) == ([], [])
        assert odd["kinds"] == plain["kinds"] and len(odd["heads"]) == len(plain["heads"])
        assert odd["title"] != "PWNED"
        tips += odd["tips"]
    assert any(escape_controls(EVERY)[:60] in tip for tip in tips), "a plan where the pointer is"


@pytest.mark.slow
def test_a_browser_shows_pages_of_the_docs(browser: Browser, tmp_path: Path) -> None:
    """The site as `make docs` builds it, with all payloads on a page."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs installs it, or pip install -e '.[docs]')")
    for name in ("mkdocs.yml", "README.md", "tools", "meshcast", "hardware"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    texts = [markdown.escape_text(text) for text in PAYLOADS.values()]
    page = "".join(f"| {text} |\n" for text in ("head", "---", *texts)) + "".join(f"\n- `x`: {text}" for text in texts)
    (tmp_path / "docs" / "catalog.md").write_text(f"# Payloads\n\n{page}\n", "utf-8")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    subprocess.run(build, cwd=tmp_path, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    file = tmp_path / "site" / "catalog" / "index.html"
    file.write_text(file.read_text("utf-8").replace("<head>", f"<head>{LISTEN}", 1), "utf-8")
    seen = browser.run(file.as_uri(), 1280, LOOK)
    assert (seen["title"], seen["scripts"], seen["handlers"], seen["requests"]) == ("Payloads - meshcast", 0, [], [])
    assert not {"alert", "confirm", "prompt", "open", "left"} & {*seen["errors"]}

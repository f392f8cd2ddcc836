"""The report of one job: what its sections hold, and that a browser shows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")

from meshcast.experiments.explain import sensitivity
from meshcast.experiments.render.bokeh.job_report import report_job
from meshcast.experiments.render.bokeh.sections import assumptions, breakdown, communication, memory, roofline, timeline
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from tests.browser import Browser
from tests.draws import drawn

GOLDEN = Path(__file__).resolve().parents[3] / "golden"

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}
LARGE: dict[str, Any] = {
    "model": {"preset": "llama3-70b", "layers": 128},
    "cluster": "dgx-h100:64",
    "batch": {"global": 512, "micro": 1, "sequence": 8192},
    "plan": {"tp": 8, "pp": 64},
}


@pytest.fixture(scope="module")
def report() -> Any:
    return simulate(load_job(JOB))


@pytest.fixture(scope="module")
def warned() -> list[logging.LogRecord]:
    """What the library logs while it draws `page`."""
    return []


@pytest.fixture(scope="module")
def page(report: Any, warned: list[logging.LogRecord]) -> str:
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append  # type: ignore[method-assign]
    logging.getLogger("bokeh").addHandler(handler)
    # A few figures and fields make a section; all of them take four seconds.
    listed = {name: getattr(sensitivity, name) for name in ("hardware_figures", "assumed_fields")}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, every in listed.items():
                patch.setattr(sensitivity, name, lambda *given, every=every: every(*given)[:6])
            return report_job(load_job(JOB), report)
    finally:
        logging.getLogger("bokeh").removeHandler(handler)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def test_every_section_is_there(page: str) -> None:
    names = ("summary", "breakdown", "memory", "timeline", "roofline", "communication", "sensitivity", "assumptions")
    for name in names:
        assert f'<section id="{name}">' in page and f'href="#{name}"' in page
    assert len(page.encode()) < 3e6


def test_the_page_draws_no_error_of_the_library(page: str, warned: list[logging.LogRecord]) -> None:
    assert page and not warned


@pytest.mark.slow
def test_the_same_job_gives_the_same_bytes() -> None:
    job = load_job({"model": "gpt2", "cluster": "dgx-h100:1", "batch": {"global": 8}, "plan": {"pp": 2}})
    pages = [report_job(job, simulate(job), sensitivities=False) for _ in range(2)]
    assert pages[0] == pages[1]


def test_memory_bars_add_up_to_what_nvidia_smi_shows(report: Any) -> None:
    source = memory.make_section(report).figures["memory"].renderers[-2].data_source.data
    assert source["high"] == pytest.approx([need / GIB for need in report.needs])


def test_the_breakdown_adds_up(report: Any) -> None:
    html = breakdown.make_section(report).html
    assert "100.0" in html and html.count("<tr>") == 2 + sum(
        bool(one.took or one.hidden) for one in breakdown.step_parts(report).values()
    )


def test_every_action_is_a_rectangle(report: Any) -> None:
    figure = timeline.make_section(report).figures["timeline"]
    columns = [one.data_source.data for one in figure.renderers if "microbatch" in one.data_source.data]
    count = sum(len(one["left"]) for one in columns)
    # 16 micro-batches forward and backward on two devices, and an update on each.
    assert count >= 2 * (2 * 16) + 2
    ends = np.concatenate([one["right"] for one in columns])
    assert ends.max() == pytest.approx(report.play.step.span, rel=0.02) or ends.max() == pytest.approx(
        1e3 * report.play.step.span, rel=0.02
    )
    passes = {name: one.name for one in figure.renderers for name in (one.name,)}
    assert {"forward", "backward", "optimizer"} <= {*passes}


def test_matrices_are_square(report: Any) -> None:
    for figure in communication.make_section(report).figures.values():
        assert figure.frame_width == figure.frame_height > 200


def test_images_of_communication_have_one_scale(report: Any) -> None:
    figures = communication.make_section(report).figures
    assert len(figures) == 4  # all, tp, dp, pp
    mappers = [one.renderers[0].glyph.color_mapper for one in figures.values()]
    assert len({(one.low, one.high) for one in mappers}) == 1
    assert len({id(one.x_range) for one in figures.values()}) == 1


def test_the_roofline_has_the_roofs_of_memory_and_links(report: Any) -> None:
    section = roofline.make_section(report)
    words = [word for one in section.figures["roofline"].renderers for word in one.data_source.data.get("text", [])]
    for name in ("memory bandwidth 3,350 GB/s", "scale-up links 450 GB/s", "network port 50 GB/s"):
        assert name in section.html and name in [one.name for one in section.figures["roofline"].renderers]
    assert "peak bf16 989 TFLOP/s" in words


def test_kernels_that_look_alike_are_one_row(report: Any) -> None:
    found = roofline.step_roofline(report)
    twice = replace(found, kernels=(*found.kernels, *found.kernels))
    once, merged = roofline.merge_kernels(found), roofline.merge_kernels(twice)
    assert [one.count for one, _ in merged] == [2 * one.count for one, _ in once]
    assert sum(total for _, total in merged) == pytest.approx(2 * sum(one.total_seconds for one in found.kernels))
    rows = roofline.make_section(report).html.partition("<h3>")[2].split("<tr")[2:]
    assert len(rows) == len(set(rows))


def test_every_figure_of_the_hardware_has_a_source(report: Any) -> None:
    rows = assumptions.list_sources(report)
    assert {"h100-sxm", "nvlink4", "infiniband-ndr", "dgx-h100"} <= {row[0] for row in rows}
    assert all(row[4] for row in rows)


@pytest.mark.parametrize("name", ["one-gpu-gpt2", "does-not-fit", "pipeline-pipedream-2bw", "data-zero-offload"])
@pytest.mark.slow
def test_other_plans_have_pages(name: str) -> None:
    """One GPU, a plan that lacks memory, one without a flush, one that copies to its host."""
    job = load_job(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text("utf-8"))["job"], base=GOLDEN)
    page = report_job(job, simulate(job), sensitivities=False)
    assert ("it does not fit" in page) == (name == "does-not-fit")
    assert ("has no flush" in page) == (name == "pipeline-pipedream-2bw")
    assert ("Copies between GPUs and hosts" in page) == (name == "data-zero-offload")


def test_several_kinds_of_nodes_have_no_sensitivities() -> None:
    groups = [{"node": node, "nodes": 1} for node in ("dgx-a100", "dgx-h100")]
    model, batch = {"preset": "llama3-8b", "layers": 4}, {"global": 4, "micro": 1}
    job = load_job({"model": model, "cluster": {"groups": groups}, "batch": batch, "plan": {"tp": 8, "pp": 2}})
    assert "Left out: cluster" in report_job(job, simulate(job))


@pytest.mark.parametrize("width", drawn([600, 1280], keep=2))
def test_a_browser_shows_every_figure(page: str, browser: Browser, width: int) -> None:
    found = browser.open(page, width)
    assert found.idle
    assert (found.errors, found.requests) == ([], [])
    assert (found.inner, found.scroll) == (width, width)
    assert len(found.shares) == 7 and min(found.shares.values()) > 0.001
    assert found.zoomed != found.shares, "a zoom in time draws the timeline anew"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 600])
def test_64_stages_of_512_micro_batches(browser: Browser, width: int) -> None:
    report = simulate(load_job(LARGE))
    page = report_job(load_job(LARGE), report, sensitivities=False)
    assert len(page.encode()) < 10e6
    figure = timeline.make_section(report).figures["timeline"]
    assert sum(len(one.data_source.data["left"]) for one in figure.renderers) > 2 * 64 * 512
    found = browser.open(page, width)
    assert found.idle
    assert (found.errors, found.requests, found.scroll) == ([], [], width)
    assert min(found.shares.values()) > 0.0005
    assert found.zoomed != found.shares

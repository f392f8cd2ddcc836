"""The plots of rooflines, of the communication matrix, and of memory through the step show their data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.experiments.render.matplotlib import communication, roofline, stage_memory, style
from meshcast.experiments.views.communication import choose_grouping, communication_matrix, pool_cells
from meshcast.experiments.views.memory import device_memories
from meshcast.experiments.views.roofline import group_kernels, step_roofline
from meshcast.simulator import simulate
from meshcast.simulator.report.formatting import format_bytes
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled, shown_texts

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "sequence": 4096},
    "plan": {"tp": 4, "pp": 2},
}


@pytest.fixture(scope="module")
def report() -> Any:
    return simulate(JOB)


def offsets(axes: Any) -> list[tuple[float, float]]:
    found = []
    for group in axes.collections:
        if type(group).__name__ == "PathCollection":
            found += [(float(x), float(y)) for x, y in group.get_offsets()]
    return found


def test_kernels_lie_below_their_roofs(report: Any) -> None:
    found = step_roofline(report)
    groups = group_kernels(found.kernels)
    assert all(0 < one.attained <= one.roof * (1 + 1e-9) for one in groups)
    seconds = sum(one.total_seconds for one in found.kernels if one.flops)
    assert sum(one.seconds for one in groups) == pytest.approx(seconds)
    assert [one.seconds for one in groups] == sorted((one.seconds for one in groups), reverse=True)
    figure = draw_styled(roofline.roofline, report, found)
    kernels, network = figure.axes
    drawn = [one for one in groups if one.seconds >= roofline.MIN_SHARE * found.step_seconds]
    points = sorted((one.intensity, one.attained) for one in drawn)
    assert np.array(sorted(offsets(kernels))) == pytest.approx(np.array(points))
    roof = kernels.lines[0]
    x, y = np.asarray(roof.get_xdata()), np.asarray(roof.get_ydata())
    assert y == pytest.approx(np.minimum(max(found.peaks.values()), x * found.memory_bandwidth))
    points_of_links = [one for one in found.network if one.busy_share >= roofline.MIN_SHARE]
    links = sorted((one.intensity, one.attained) for one in points_of_links)
    assert np.array(sorted(offsets(network))) == pytest.approx(np.array(links)), "where the report places them, too"
    risers = sorted((line.get_xdata()[0], line.get_ydata()[1]) for line in network.lines if len(line.get_xdata()) == 2)
    assert all((one.intensity, one.roof) in risers for one in points_of_links)
    words = " ".join(text.get_text() for text in shown_texts(figure))
    assert all(f"{tier} {rate / 1e9:,.4g} GB/s" in words for tier, rate in found.links.items()), "the network's roofs"
    for i, one in enumerate(drawn[: roofline.NUMBERED], 1):
        left = next(text.get_position()[0] for text in figure.texts if text.get_text().startswith(f"{i}  "))
        assert left == pytest.approx(0.5) or left < 0.1, "in two equal columns"
        assert f"{i}  {roofline.describe_kernel(one)}: {one.seconds / found.step_seconds:.1%} of the step" in words
    assert "Memory-bound kernels" in words, "what has no place on the axis is named"


def test_cells_are_the_bytes(report: Any) -> None:
    found = communication_matrix(report, "rank")
    figure = draw_styled(communication.communication, report, found)
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    shown = images[0]
    assert np.ma.filled(shown, 0.0) == pytest.approx(found.total) and (shown.mask == (found.total == 0)).all()
    for image, matrix in zip(images[1:], found.by_axis.values(), strict=False):
        assert np.ma.filled(image, 0.0) == pytest.approx(matrix)
    words = " ".join(text.get_text() for text in shown_texts(figure))
    for axis, nbytes in found.sums.items():
        assert f"{axis} {format_bytes(nbytes)}" in words
    assert "White: nothing is sent" in words


def test_a_drawn_cell_is_the_largest_of_its_block() -> None:
    matrix = np.arange(49.0).reshape(7, 7)
    assert pool_cells(matrix, 7).tolist() == matrix.tolist()
    assert pool_cells(matrix, 3).tolist() == [[16, 19, 20], [37, 40, 41], [44, 47, 48]]


def test_the_finest_grouping_that_can_be_told_apart(report: Any) -> None:
    assert choose_grouping(report.job.cluster, communication.CLEAR) == "rank"
    large = simulate(JOB | {"cluster": "dgx-h100:32", "batch": {"global": 64, "sequence": 4096}})
    assert choose_grouping(large.job.cluster, communication.CLEAR) == "node"


def test_curves_keep_the_peaks_of_all_devices(report: Any) -> None:
    figure = draw_styled(stage_memory.stage_memory, report)
    bars = device_memories(report)
    assert len(figure.axes) == len(bars)
    words = [text.get_text() for text in figure.texts]
    for axes, bar in zip(figure.axes, bars, strict=True):
        tops = [float(patch.get_data().values.max()) for patch in axes.patches if hasattr(patch, "get_data")]
        assert max(tops) == pytest.approx(bar.allocated / 2**30, rel=1e-9)
        assert f"{bar.allocated / 2**30:,.1f}" in words and bar.name in words
    assert len({axes.get_ylim() for axes in figure.axes}) == 1, "one scale"


def test_tensors_that_are_nothing_beside_the_context_have_a_legend() -> None:
    model = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 96, "seq": 32}
    job = {"model": model, "cluster": "dgx-h100:2", "batch": {"global": 16}, "plan": {"tp": 2, "pp": 2}}
    assert draw_styled(stage_memory.stage_memory, simulate(job)).legends


def test_areas_of_memory_are_proportional_to_their_bytes() -> None:
    """Parameters and optimizer are most of the memory here, and still the axes begin at 0 and say so."""
    batch = {"global": 32, "micro": 1, "sequence": 4096}
    small = simulate({"model": "llama2-7b", "cluster": "dgx-h100:4", "batch": batch, "plan": {"tp": 4, "pp": 4}})
    for width in style.WIDTHS:
        figure = draw_styled(stage_memory.stage_memory, small, width=width)
        check_figure(figure, width)
        for axes in figure.axes:
            assert axes.get_ylim()[0] == 0 and axes.spines["left"].get_visible()
            zero, mark = (label.get_text() for label in axes.get_yticklabels())
            assert zero == "0" and float(mark) == axes.get_yticks()[1] <= axes.get_ylim()[1]
        words = " ".join(text.get_text() for text in figure.texts)
        assert "GiB from 0" in words and "Below them" not in words

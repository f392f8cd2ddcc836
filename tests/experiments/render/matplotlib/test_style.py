"""Colours are seen on white, in grey and by the colour-blind; widths are those of papers and slides."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import breakdown, sheet, style
from meshcast.experiments.render.matplotlib.measured import calibration, measurements, published
from meshcast.experiments.search.output import plot as search
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import STEP_GROUPS
from tests.experiments.render.matplotlib.checks import check_legend, lightness

HUES = {
    name: value
    for name, value in vars(palette).items()
    if isinstance(value, str) and re.fullmatch(r"#[0-9a-f]{6}", value)
}


def test_every_colour_is_seen_on_white() -> None:
    assert len(HUES) > 15
    for name, hue in HUES.items():
        assert palette.contrast(palette.rgb(hue)) >= 2, name
    assert palette.contrast((0, 0, 0)) == pytest.approx(21) and palette.contrast((1, 1, 1)) == pytest.approx(1)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_every_shade_is_seen_on_white(count: int) -> None:
    for hue in HUES.values():
        tones = palette.shades(hue, count)
        assert all(palette.contrast(tone) >= 2 for tone in tones)
        assert tones == sorted(tones) and len(set(tones)) == count


def test_kinds_of_a_timeline_are_told_apart() -> None:
    bars = [
        (looks.words, palette.rgb(looks.colour), looks.hatch)
        for looks in (*palette.ACTIONS.values(), palette.RECOMPUTE)
    ]
    check_legend([bar for bar in bars if bar[0] != "recompute"])  # inside a pass or alone it is one kind
    check_legend([(axis, palette.rgb(palette.AXES[axis].colour), "strip") for axis in palette.AXES])
    colours = [looks.colour for looks in palette.ACTIONS.values()] + [looks.colour for looks in palette.AXES.values()]
    assert len(set(colours)) == len(colours), "no hue has two meanings"


def test_shades_of_chunks_keep_the_kinds_apart() -> None:
    """In grey a shade of one kind may be one of another, so their hatches differ."""
    hatches = [looks.hatch for looks in palette.ACTIONS.values()]
    plain = [kind for kind, looks in palette.ACTIONS.items() if not looks.hatch]
    assert plain == ["F", "O"] and len(set(hatches)) == len(hatches) - 1
    darkest = lightness(palette.shades(palette.ACTIONS["F"].colour, 8)[0])
    assert darkest - lightness(palette.rgb(palette.ACTIONS["O"].colour)) > 5


def test_passes_without_hatch_are_told_apart() -> None:
    """Bars that are too low for a hatch: in a schedule with split backward passes the kinds have greys of their own."""
    greys = sorted(lightness(palette.rgb(palette.ACTIONS[kind].colour)) for kind in ("R", "F", "BW", "B", "W"))
    assert all(b - a > 7 for a, b in pairwise(greys))


def test_kinds_of_other_legends_are_told_apart() -> None:
    parts = [looks for key, looks in palette.PARTS.items() if key not in ("bubble", "idle")]
    for kinds in (parts, palette.MEMORY.values(), STEP_GROUPS.values(), (palette.BETTER, palette.WORSE)):
        check_legend([(looks.words, palette.rgb(looks.colour), looks.hatch) for looks in kinds])
    marks = measurements.LOOKS.items()
    check_legend([(key, palette.rgb(looks["color"]), looks["marker"]) for key, looks in marks])


@pytest.mark.parametrize("hues", [published.HUES, calibration.HUES, search.HUES])
def test_series_have_hues_of_their_own(hues: tuple[str, ...]) -> None:
    """They have markers or places of their own beside it."""
    check_legend([(hue, palette.rgb(hue), str(i)) for i, hue in enumerate(hues)])


def test_hidden_communication_looks_like_no_part() -> None:
    hatches = {looks.hatch for looks in palette.PARTS.values()}
    assert all(breakdown.hidden_fill(axis)["hatch"] not in hatches for axis in palette.AXES)


def test_ink_is_readable() -> None:
    for hue in HUES.values():
        ink = (1.0, 1.0, 1.0) if palette.ink_on(palette.rgb(hue)) == "white" else (0.0, 0.0, 0.0)
        assert palette.contrast(palette.rgb(hue), ink) >= 3.4, hue
    dark, *_, light = palette.shades(palette.BLUE, 5)
    assert (palette.ink_on(dark), palette.ink_on(light)) == ("white", "black")


# -------------------------------------------------------------------------------------------- widths


def test_layouts_have_type_of_at_least_seven_points() -> None:
    sizes = [style.SMALL, style.TEXT, style.TITLE]
    sizes += [size for key, size in style.RC.items() if key.endswith("size") and key != "figure.figsize"]
    assert min(sizes) >= 7 and all(paper.zoom >= 1 for paper in style.WIDTHS.values())
    assert style.WIDTHS["column"].width <= 3.5 and style.WIDTHS["page"].width == style.PAGE <= 7.16
    assert (style.WIDTHS["slide"].width, style.WIDTHS["slide"].tallest) == (13.33, 7.5)


def empty_figure() -> Figure:
    return sheet.Sheet(2.0).figure


@pytest.mark.parametrize("width", style.WIDTHS)
def test_files_have_the_size_that_they_are_made_for(tmp_path: Path, width: Any) -> None:
    from PIL import Image

    size = style.WIDTHS[width]
    sheet.save(empty_figure, tmp_path / "a.png", width)
    with Image.open(tmp_path / "a.png") as image:
        pixels, dots = image.size, image.info["dpi"]
    assert dots == pytest.approx((style.DPI, style.DPI), rel=1e-3)
    assert pixels[0] / style.DPI == pytest.approx(size.width, abs=0.01)
    assert pixels[1] / style.DPI == pytest.approx(2.0 * size.zoom, abs=0.01)
    sheet.save(empty_figure, tmp_path / "a.svg", width)
    root = re.search(r"<svg [^>]*>", (tmp_path / "a.svg").read_text("utf-8"))
    assert root is not None
    points = {key: float(value) for key, value in re.findall(r'(width|height)="([0-9.]+)pt"', root[0])}
    box = [float(part) for part in re.findall(r'viewBox="([^"]+)"', root[0])[0].split()]
    assert points == pytest.approx({"width": size.width * 72, "height": 144 * size.zoom}, rel=1e-4)
    assert box[2] * size.zoom == pytest.approx(size.width * 72, rel=1e-4), "the drawing is enlarged as a whole"


def test_the_layout_is_that_of_the_width() -> None:
    for width, size in style.WIDTHS.items():
        with matplotlib.rc_context(style.settings(width)):
            assert style.layout_width() * size.zoom == pytest.approx(size.width)
            assert style.layout_height() * size.zoom == pytest.approx(size.tallest)
            assert style.is_narrow() == (width == "column")


def test_text_is_broken_to_its_room() -> None:
    words = "pp 16 x dp 128 x tp 8 = 16384 GPUs, interleaved-1f1b with 8 chunks, zero-1, recompute-selective"
    for room in (1.2, 3.0, 7.0):
        lines = sheet.wrap_text(words, room)
        assert " ".join(lines) == words and all(sheet.text_width(line) <= room for line in lines)
    (line,) = sheet.wrap_text("a-word-that-is-far-too-long-for-its-room", 1.0)
    assert line.endswith("...") and sheet.text_width(line) <= 1.0
    assert sheet.wrap_text("", 1.0) == []
    with matplotlib.rc_context(style.settings("column")):
        narrow = sheet.make_heading("A title that is longer than one line of a column", ["one", "two"], "a sentence")
    assert len(narrow.title) == 2 and narrow.lines == ["one, two", "a sentence"]


def test_labels_of_an_axis_stay_apart() -> None:
    with matplotlib.rc_context(style.settings("column")):
        own = sheet.Sheet(1.0)
        axes = own.axes(0.5, 0.1, 1.4, 0.5)
        axes.set_xlim(0, 17.5)
        sheet.space_ticks(axes, lambda value: f"{value:,.10g} seconds")
        ticks = axes.get_xticks()
        words = [sheet.text_width(f"{tick:,.10g} seconds") for tick in ticks]
    assert len(ticks) >= 2
    for (left, one), (right, other) in combinations(list(zip(ticks, words, strict=True)), 2):
        assert (right - left) / 17.5 * 1.4 >= (one + other) / 2


def test_settings_of_a_folder_change_no_plot() -> None:
    """matplotlib reads a file matplotlibrc of the folder that it starts in."""
    with matplotlib.rc_context({"text.usetex": True, "savefig.dpi": 9.0, "lines.linewidth": 99.0}), style.drawing():
        changed = {**matplotlib.rcParams}
    with style.drawing():
        assert {**matplotlib.rcParams} == changed and not changed["text.usetex"]

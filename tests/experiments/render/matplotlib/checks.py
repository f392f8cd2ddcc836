"""What every plot must keep: type that can be read, words on the paper and apart, kinds that are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.views import palette

SMALLEST = 7.0
"""Least type size at the width that a plot is made for [pt]."""

ADAPTED: dict[str, np.ndarray] = {
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}
"""Linear RGB as seen by dichromats (Machado, Oliveira, Fernandes 2009, severity 1)."""


def draw_styled(make: Callable[..., Figure], *arguments: Any, width: style.Width = "page") -> Figure:
    """A figure of a width, laid out as it is written; no pixels are made."""
    with matplotlib.rc_context(style.settings(width)):
        figure = make(*arguments)
        figure.set_dpi(style.DPI * style.WIDTHS[width].zoom)
        FigureCanvasAgg(figure)  # whose text has the extents of the image
        figure.draw_without_rendering()
    return figure


def shown_texts(figure: Figure) -> list[Any]:
    """All texts that are seen; not those of ticks outside the axes."""
    found = [*figure.texts]
    for legend in figure.findobj(Legend):
        found += legend.get_texts()
    for axes in figure.axes:
        found += axes.texts
        if not axes.axison:
            continue
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found.append(axis.label)
            for tick in axis.get_major_ticks():
                if low - 1e-9 * abs(high) <= tick.get_loc() <= high * (1 + 1e-9):
                    found += [tick.label1, tick.label2]
    return [text for text in found if text.get_text().strip() and text.get_visible()]


def check_figure(figure: Figure, width: style.Width = "page") -> None:
    """Asserts that a plot has the width it is made for, type of at least 7 pt, and words on the paper and apart."""
    size = style.WIDTHS[width]
    assert abs(figure.get_size_inches()[0] * size.zoom - size.width) < 1e-6
    boxes = []
    for text in shown_texts(figure):
        assert text.get_fontsize() * size.zoom >= SMALLEST, text
        box = Text.get_window_extent(text)  # without the arrow of an annotation
        assert box.x0 >= -0.5 and box.y0 >= -0.5, text
        assert box.x1 <= figure.bbox.x1 + 0.5 and box.y1 <= figure.bbox.y1 + 0.5, text
        boxes.append((text, box))
    for (one, a), (other, b) in overlapping(boxes):
        raise AssertionError(f"{one.get_text()!r} {a} and {other.get_text()!r} {b} overlap")


def overlapping(boxes: Sequence[tuple[Any, Any]]) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Pairs of boxes with more in common than a fifth of the smaller one."""
    for one, other in combinations(boxes, 2):
        a, b = one[1], other[1]
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if wide > 0 and high > 0 and wide * high > 0.2 * min(a.width * a.height, b.width * b.height):
            yield one, other


# ------------------------------------------------------------------------------------------- colours


def lightness(colour: palette.RGB) -> float:
    """CIE L* of a colour, from 0 to 100: what is left of it in grey."""
    return float(to_lab(np.array(_linear(colour)))[0])


def colour_distance(one: palette.RGB, other: palette.RGB, adapted: np.ndarray | None = None) -> float:
    """CIE 1976 distance of two colours. adapted: as which they are seen, see `ADAPTED`."""
    matrix = np.eye(3) if adapted is None else adapted
    first, second = (to_lab(np.clip(matrix @ np.array(_linear(colour)), 0, 1)) for colour in (one, other))
    return float(np.linalg.norm(first - second))


def _linear(colour: palette.RGB) -> list[float]:
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]


def to_lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    scaled = xyz / np.array([0.9505, 1.0, 1.089])
    root = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def check_legend(entries: Sequence[tuple[str, palette.RGB, str]]) -> None:
    """Asserts that entries of a legend, (words, colour, hatch or marker), are told apart by everyone and in grey."""
    for (words, tone, mark), (other_words, other, other_mark) in combinations(entries, 2):
        pair = f"{words} and {other_words}"
        assert colour_distance(tone, other) > 12, f"{pair} have one hue"
        if mark == other_mark:
            assert abs(lightness(tone) - lightness(other)) > 5, f"{pair} are one grey"
            for name, adapted in ADAPTED.items():
                assert colour_distance(tone, other, adapted) > 8, f"{pair} are one with {name}"
    for words, tone, _ in entries:
        assert palette.contrast(tone) >= 2 or tone == (1.0, 1.0, 1.0), f"{words} vanishes on white"

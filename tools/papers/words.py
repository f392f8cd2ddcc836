"""Numbers and errors of figures in words."""

from __future__ import annotations

from tools.papers.forecasts import ForecastFigure, ForecastPoint

EXACT = 5e-4
"""Largest deviation that is shown as none."""


def format_number(value: float) -> str:
    """Writes three digits, or all before the point, with commas."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:.4g}"


def format_share(point: ForecastPoint) -> str:
    """Returns the deviation of a point in percent, absolute where the published number is 0."""
    deviation = point.deviation
    if deviation is None:
        return ""
    if not point.theirs:
        return f"{deviation:+.2g}" if abs(deviation) > EXACT else "0"
    return f"{100 * deviation:+.1f} %" if abs(deviation) >= EXACT else "0 %"


def format_error(value: float | None) -> str:
    """Returns an error in percent; empty if there is none."""
    if value is None:
        return ""
    if value < EXACT:
        return "0 %"
    return f"{100 * value:.1f} %" if value < 0.0995 else f"{100 * value:.0f} %"


def word_errors(figure: ForecastFigure) -> str:
    """Returns the number of points, and the median and largest deviation, in a sentence."""
    count = len(figure.points)
    points = "1 point" if count == 1 else f"{count} points"
    if figure.median is None:
        return f"{points}, none of which has a forecast"
    return f"{points}: deviation {format_error(figure.median)} in the median, {format_error(figure.largest)} at most"

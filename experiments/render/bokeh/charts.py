"""What all Bokeh figures of the page share: size, fonts, colours, tools and formats of axes."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.views import palette

GRID = "#e3e3e3"
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def new_figure(height: int, x_label: str, y_label: str, tools: str = "pan,box_zoom,reset,save", **more: Any) -> Any:
    """Returns a figure as wide as the page, unless `more` of `bokeh.plotting.figure` says otherwise. height: [px]."""
    from bokeh.plotting import figure

    size: dict[str, Any] = {"height": height, "sizing_mode": "stretch_width", "min_width": 200}
    drawn = figure(tools=tools, **(size | more))
    drawn.toolbar.logo = None
    drawn.outline_line_color = None
    drawn.grid.grid_line_color = GRID
    for axis, label in ((drawn.xaxis, x_label), (drawn.yaxis, y_label)):
        axis.axis_label = label
        style_axis(axis)
    drawn.title.text_font, drawn.title.text_font_size, drawn.title.text_color = FONT, "14px", palette.INK
    return drawn


def style_axis(axis: Any) -> None:
    """Sets fonts and colours of an axis."""
    axis.axis_label_text_font = axis.major_label_text_font = FONT
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
    axis.axis_label_text_color = axis.major_label_text_color = palette.INK
    axis.axis_line_color = axis.major_tick_line_color = palette.GREY
    axis.minor_tick_line_color = None


def sequential(colour: str, count: int = 64) -> list[str]:
    """Returns a palette from almost white to a colour darker than `colour`, for values from small to large."""
    dark = tuple(0.55 * part for part in palette.rgb(colour))
    half = count // 2
    pale = [palette.lighten(colour, 0.9 * (1 - i / half)) for i in range(half)]
    steps = [i / (count - half - 1) for i in range(count - half)]
    deep = [tuple(a + (b - a) * at for a, b in zip(palette.rgb(colour), dark, strict=True)) for at in steps]
    return [palette.to_hex(colour) for colour in (*pale, *deep)]  # type: ignore[arg-type]

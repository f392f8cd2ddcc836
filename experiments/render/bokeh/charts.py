"""What all Bokeh figures of the page share: size, fonts, colours, tools and formats of axes."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.render.matplotlib import style

INK = style.INK
GRID = "#e3e3e3"
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def to_hex(colour: str | style.RGB) -> str:
    """A colour of the plots as ``#rrggbb``."""
    if isinstance(colour, str):
        return colour
    red, green, blue = (round(255 * part) for part in colour[:3])
    return f"#{red:02x}{green:02x}{blue:02x}"


def new_figure(height: int, x_label: str, y_label: str, tools: str = "pan,box_zoom,reset,save", **more: Any) -> Any:
    """A figure as wide as the page, unless `more` of `bokeh.plotting.figure` says otherwise. height: [px]."""
    from bokeh.plotting import figure

    size: dict[str, Any] = {"height": height, "sizing_mode": "stretch_width", "min_width": 200}
    found = figure(tools=tools, **(size | more))
    found.toolbar.logo = None
    found.outline_line_color = None
    found.grid.grid_line_color = GRID
    for axis, label in ((found.xaxis, x_label), (found.yaxis, y_label)):
        axis.axis_label = label
        style_axis(axis)
    found.title.text_font, found.title.text_font_size, found.title.text_color = FONT, "14px", INK
    return found


def style_axis(axis: Any) -> None:
    """Fonts and colours of an axis."""
    axis.axis_label_text_font = axis.major_label_text_font = FONT
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
    axis.axis_label_text_color = axis.major_label_text_color = INK
    axis.axis_line_color = axis.major_tick_line_color = style.GREY
    axis.minor_tick_line_color = None


def sequential(colour: str, count: int = 64) -> list[str]:
    """A palette from almost white to a colour darker than `colour`, for values from small to large."""
    dark = tuple(0.55 * part for part in style.rgb(colour))
    half = count // 2
    pale = [style.lighten(colour, 0.9 * (1 - i / half)) for i in range(half)]
    steps = [i / (count - half - 1) for i in range(count - half)]
    deep = [tuple(a + (b - a) * at for a, b in zip(style.rgb(colour), dark, strict=True)) for at in steps]
    return [to_hex(one) for one in (*pale, *deep)]  # type: ignore[arg-type]

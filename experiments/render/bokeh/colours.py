"""Names and colours of kinds of work on the page: those of the plots."""

from __future__ import annotations

from meshcast.experiments.render.bokeh.charts import to_hex
from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.breakdown import LOOKS
from meshcast.experiments.render.matplotlib.gantt import KINDS
from meshcast.experiments.render.matplotlib.memory import COLOURS, WORDS

AXES = {axis: to_hex(colour) for axis, colour in style.AXES.items()}
AXIS_NAMES = {
    "tp": "tensor parallelism (tp)",
    "cp": "context parallelism (cp)",
    "ep": "expert parallelism (ep)",
    "dp": "data parallelism (dp)",
    "pp": "pipeline parallelism (pp)",
    "copy": "copies to and from the host, updates there",
}
BETTER, WORSE = style.GREEN, style.ORANGE


def part_colour(key: str) -> str:
    """The colour of a part of the breakdown, by its key in `Metrics.parts`."""
    return to_hex(LOOKS[key]["facecolor"])


def memory_colour(category: str) -> str:
    return to_hex(COLOURS[category])


def memory_name(category: str) -> str:
    return WORDS.get(category, category)


def action_looks(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Name and colour of the actions of a kind and a chunk of the model."""
    name, colour, *_ = KINDS.get(kind, (f"action {kind}", style.GREY))
    if kind == "O" or chunks == 1:
        return name, to_hex(colour if kind == "O" else style.shades(colour, 1)[0])
    return f"{name}, chunk {chunk}", to_hex(style.shades(colour, chunks)[chunk])

"""Colours, hatches and names of everything that pictures show, the same on paper, in a browser and in a terminal.

Most hues are those of Okabe and Ito (2008), "Color Universal Design"; each has a contrast of at least 2 to white (WCAG
2.2, relative luminance). Within a legend no two kinds share a hue, and kinds whose greys are alike have different
hatches (`HATCHES`). No information is in the hue alone: position, number or label has it too.
"""

from __future__ import annotations

from typing import NamedTuple

INK, FAINT, LINE = "#222222", "#6f6f6f", "#a6a6a6"

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
SKY, YELLOW, GREY, BROWN = "#56b4e9", "#b79f00", "#555555", "#8c5a3c"
VIOLET, TEAL, OLIVE, PINK, WINE, AMBER, STONE, ROSE, OCHRE = (
    "#5d3a9b", "#44aac4", "#808000", "#cc79a7", "#6b1244", "#c79500", "#7d7d7d", "#dc93be", "#bc8d00",
)  # fmt: skip

RED = "#c1121f"
"""Of what exceeds a capacity."""

HATCHES = ("", "////", "\\\\\\\\", "....", "xxxx", "||||", "----", "++++", "oo")
"""Hatches that tell kinds apart whose greys are alike; the first is none."""

PALEST = 0.38
"""Largest share of white in a shade of a hue: paler ones vanish on white."""

RGB = tuple[float, float, float]
"""Red, green and blue from 0 to 1."""


class Looks(NamedTuple):
    """How a kind is drawn.

    words: its name in a legend.
    colour: as ``#rrggbb``.
    hatch: in matplotlib's letters.
    edge: colour of the hatch.
    title: longer name, for pages that have room; `words` if empty.
    """

    words: str
    colour: str
    hatch: str = ""
    edge: str = "white"
    title: str = ""

    @property
    def name(self) -> str:
        """The longer name."""
        return self.title or self.words


AXES = {
    "tp": Looks("tensor comm.", VIOLET, title="tensor parallelism (tp)"),
    "cp": Looks("context comm.", TEAL, title="context parallelism (cp)"),
    "ep": Looks("expert comm.", OLIVE, title="expert parallelism (ep)"),
    "dp": Looks("data comm.", GREEN, title="data parallelism (dp)"),
    "pp": Looks("pipeline comm.", INK, title="pipeline parallelism (pp)"),
    "copy": Looks("copies", BROWN, title="copies to and from the host, updates there"),
}
"""Communication by mesh axis, from the innermost; the greys are a ladder."""

ACTIONS = {
    "N": Looks("forward, output alone", "#6a8caf", "oo"),
    "Y": Looks("loss of the batch", "#a50026", "++++"),
    "Z": Looks("gradients of outputs", STONE, "----"),
    "F": Looks("forward", BLUE),
    "BW": Looks("backward", ORANGE, "////"),
    "B": Looks("backward, inputs", OCHRE, "\\\\\\\\"),
    "W": Looks("backward, weights", ROSE, "xxxx"),
    "R": Looks("recompute", WINE, "||||"),
    "O": Looks("optimizer", GREY),
}
"""Actions of a pipeline stage by their kind (`ActionKind`), and the optimizer."""

RECOMPUTE = Looks("recompute, inside a pass", WINE, "||||")
WAIT = Looks("wait inside a pass", "#ffffff", "......", FAINT)

PARTS = {
    "gemm": Looks("GEMMs", BLUE),
    "attention": Looks("attention", SKY, "\\\\\\\\"),
    "memory_bound": Looks("memory-bound", PINK, "...."),
    **{axis: Looks(axis, looks.colour) for axis, looks in AXES.items()},
    "tp": Looks("tp", VIOLET, "++++"),
    "copy": Looks("copy", BROWN, "||||"),
    "bubble": Looks("bubble", "#ffffff", edge=FAINT),
    "optimizer": Looks("optimizer", GREY, "xxxx"),
    "host": Looks("host", STONE, "----"),
    "idle": Looks("idle", "#ffffff", "...", FAINT),
}
"""Parts of a step, with short names: no two share a hue, and none is hatched as hidden communication is."""

MEMORY = {
    "parameters": Looks("parameters", BLUE),
    "gradients": Looks("gradients", ORANGE, "////"),
    "optimizer": Looks("optimizer state", GREY, "\\\\\\\\"),
    "activations": Looks("activations", SKY),
    "workspace": Looks("workspace", YELLOW, "...."),
    "buffers": Looks("buffers in flight", INK),
    "logits": Looks("logits", PINK, "xxxx"),
    "other": Looks("other", BROWN, "----"),
}
"""Tensors in the memory of a GPU by category (`CATEGORIES`); hatches where two greys are alike."""

FRAGMENTATION = Looks("fragmentation", "#e0e0e0", "//////", "#8a8a8a", "fragmentation, cached blocks")
CONTEXT = Looks("context, libraries", "#e0e0e0", "......", "#8a8a8a", "CUDA context, libraries")
EXCESS = Looks("beyond the capacity", "#ffffff", "xxxxx", RED)
"""What a GPU holds besides tensors, and memory that it does not have."""

BETTER, WORSE = Looks("shorter step", GREEN), Looks("longer step", ORANGE, "////")
"""What a step gains or loses against that of the job as it is."""


def rgb(colour: str) -> RGB:
    """Reads ``#rrggbb``."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def to_hex(colour: str | RGB) -> str:
    """Formats a colour as ``#rrggbb``."""
    return colour if isinstance(colour, str) else "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def lighten(colour: str, by: float) -> RGB:
    """Mixes a colour with white. by: share of white."""
    red, green, blue = (part + (1 - part) * by for part in rgb(colour))
    return red, green, blue


def shades(colour: str, count: int) -> list[RGB]:
    """Returns shades of a hue, darkest first; the palest is still seen on white, of a pale hue all are darker."""
    if count == 1:
        return [rgb(colour)]
    palest = PALEST
    while palest > 0 and contrast(lighten(colour, palest)) < 2.0:
        palest -= 0.02
    darkest = palest - PALEST
    return [_mix(colour, darkest + PALEST * i / (count - 1)) for i in range(count)]


def _mix(colour: str, by: float) -> RGB:
    """Mixes a colour with a share of white, or of black if negative."""
    if by >= 0:
        return lighten(colour, by)
    red, green, blue = (part * (1 + by) for part in rgb(colour))
    return red, green, blue


def luminance(colour: RGB) -> float:
    """Computes the relative luminance from 0, black, to 1, white (WCAG 2.2)."""
    red, green, blue = ((p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4) for p in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: RGB, other: RGB = (1.0, 1.0, 1.0)) -> float:
    """Computes the contrast of two colours from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: RGB) -> str:
    """Chooses black or white, whichever is readable on `colour`."""
    return "white" if luminance(colour) < 0.25 else "black"

"""Runs, draws and writes the figures of papers.

``python -m tools.papers`` (``make papers``) draws all into out/papers/ and writes docs/papers.md with
its images; ``python -m tools.papers NAME ...`` draws some and prints their errors.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import MeshcastError
from tools.papers.draw import draw
from tools.papers.figure_file import read_figures
from tools.papers.forecasts import ForecastFigure, forecast_figures
from tools.papers.page import IMAGES, sort_figures, write_page
from tools.papers.words import word_errors

COLOURS = 64
"""Colours of an image of the page: as many as text needs to look smooth, in half of the bytes."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.papers", description="Figures of papers, redrawn.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="figures to draw, by the files that docs/papers.md names; none: all, and the page",
    )
    parser.add_argument("--out", type=Path, default=Path("out/papers"), help="folder of the images")
    parser.add_argument("--page", type=Path, default=Path("docs/papers.md"), help="the page")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    options = parser.parse_args(words)
    try:
        figures = _forecast_named(options.names, options.workers)
    except MeshcastError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        file = options.out / f"{figure.file.name}.png"
        draw(figure, file)
        print(f"{figure.file.name}: {word_errors(figure)}; wrote {file}")
    if not options.names:
        write_file(options.page, write_page(figures))
        _write_images(figures, options.out, options.page.parent / IMAGES)
    return 0


def _forecast_named(names: Sequence[str], workers: int | None) -> list[ForecastFigure]:
    """Forecasts the named figures, all without names. Raises PlanError for a name that no figure has."""
    return sort_figures(list(forecast_figures(read_figures(names), workers)))


def _write_images(figures: Sequence[ForecastFigure], drawn: Path, folder: Path) -> None:
    """Writes the images of the page: those that were drawn, with fewer colours. drawn: folder of the latter."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        if figure.file.figure.image:
            name = f"{figure.file.name}.png"
            with Image.open(drawn / name) as image:
                few = image.convert("RGB").quantize(
                    COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
                )
                packed = io.BytesIO()
                few.save(packed, "PNG", optimize=True, dpi=image.info.get("dpi"))
                write_file(folder / name, packed.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())

"""Draws the images of docs/plots.md by the commands on the page: ``make docs-plots``."""

from __future__ import annotations

import io
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

from meshcast.hardware.documents.output_file import write_file

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
FOLDER = Path("docs")
"""Folder that the page's links to images begin in."""


def find_commands(page: str) -> list[list[str]]:
    """Returns the words of every command of the page that writes a file, without `meshcast` itself, in their order."""
    lines = [line.partition(" #")[0] for block in BLOCK.findall(page) for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("meshcast ")]
    return [words for words in commands if find_output(words)]


def find_output(words: list[str]) -> str:
    """Returns the file that a command writes; empty if it names none."""
    options = dict(itertools.pairwise(words))
    return options.get("--out") or options.get("--plot") or ""


def find_images(page: str) -> list[str]:
    """Paths of the images of the page, from the root of the repository."""
    return [(FOLDER / link).as_posix() for link in IMAGE.findall(page)]


def run_commands(page: str) -> None:
    """Runs the commands whose output the page shows, and those before them that they read from; images of the page are
    written with as few bytes as their pixels need.

    Raises subprocess.CalledProcessError if one fails.
    """
    for words in find_commands(page):
        Path(find_output(words)).parent.mkdir(parents=True, exist_ok=True)
        print("meshcast", *words, file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "meshcast.experiments.cli", *words], check=True, stdout=subprocess.DEVNULL
        )
        if find_output(words).endswith(".png"):
            compress_image(Path(find_output(words)))


def compress_image(path: Path) -> None:
    """Writes a PNG image anew without its alpha channel, as all plots are opaque, and packed as tightly as PNG can."""
    from PIL import Image

    with Image.open(path) as image:
        opaque, dpi = image.convert("RGB"), image.info.get("dpi")
    packed = io.BytesIO()
    opaque.save(packed, "PNG", optimize=True, dpi=dpi)
    write_file(path, packed.getvalue())


if __name__ == "__main__":
    run_commands(Path(sys.argv[1]).read_text("utf-8"))

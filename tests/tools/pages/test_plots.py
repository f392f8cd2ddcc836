"""Every image of docs/plots.md is drawn by a command on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.cli.plot import KINDS
from meshcast.experiments.render.matplotlib import style
from tools.pages import plots

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "plots.md").read_text("utf-8")


def test_every_image_has_its_command() -> None:
    images, outputs = plots.find_images(PAGE), [plots.find_output(words) for words in plots.find_commands(PAGE)]
    assert len(images) == len(set(images)) >= 10
    assert set(images) == {output for output in outputs if output.startswith("docs/")}
    assert all((ROOT / image).is_file() for image in images), "`make docs-plots` draws them"


def test_images_of_the_readme_are_on_the_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    named = [link for link in plots.IMAGE.findall(readme) if link.startswith("docs/images/")]
    assert named and set(named) <= set(plots.find_images(PAGE))


def test_all_kinds_and_widths_are_on_the_page() -> None:
    assert all(f"plot {kind}" in PAGE for kind in KINDS)
    for width, size in style.WIDTHS.items():
        assert f"| `{width}` | {size.width:g}" in PAGE


@pytest.mark.slow
def test_a_command_draws_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in plots.find_commands(PAGE) if words[:2] == ["plot", "schedules"]]
    plots.run_commands("```sh\nmeshcast " + " ".join(words) + "  # a comment\n```\n")
    drawn = (tmp_path / plots.find_output(words)).read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert CliRunner().invoke(app, ["plot", "--help"]).exit_code == 0

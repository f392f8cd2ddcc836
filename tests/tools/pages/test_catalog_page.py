"""docs/catalog.md is up to date and whole; the pages for newcomers show the files as they are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from meshcast.hardware import catalog, load, load_cluster
from meshcast.hardware.load import read_yaml
from meshcast.hardware.sourced_values import sourced_values
from tools.pages.catalog import SECTIONS, page

ROOT = Path(__file__).resolve().parents[3]


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


@cache
def written() -> str:
    return page()


def test_the_page_of_the_catalog_is_up_to_date() -> None:
    assert text("catalog.md") == written(), "`make docs-catalog` puts it right"


@pytest.mark.parametrize("kind", ["gpus", "links", "nodes"])
def test_the_page_shows_every_value(kind: str) -> None:
    shown = {path for _, of, columns in SECTIONS for _, path in columns if of == kind}
    for name in catalog(kind):
        found = dict(sourced_values(load(kind, name)))
        assert found and set(found) <= shown
        assert f"| `{name}` |" in written()
        for path, value in found.items():
            assert (f"`{kind}/{name}` | `{path}` |" in written()) == (value.kind == "assumed")


def test_every_source_has_its_number() -> None:
    body, _, rest = written().partition("## Sources")
    used = {int(number) for number in re.findall(r"<sup>(\d+)</sup>", body)}
    listed = re.findall(r"^(\d+)\. (peak|measured|fitted|assumed): .+$", rest, re.MULTILINE)
    assert used == {int(number) for number, _ in listed} and len(listed) > 20


def test_a_diff_is_the_whole_file() -> None:
    diffs = re.findall(r"```diff\n--- /dev/null\n\+\+\+ (\S+)\n(.*?)```", text("add-a-node.md"), re.DOTALL)
    assert diffs
    for path, diff in diffs:
        assert all(line.startswith("+") for line in diff.splitlines()), path
        assert [line[1:] for line in diff.splitlines()] == (ROOT / path).read_text("utf-8").splitlines(), path


def test_paths_and_links_of_the_page_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", text("add-a-node.md")):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"(?:tests|simulator|hardware)/[\w/.-]+", text("add-a-node.md")):
        assert (ROOT / path.rstrip(".")).exists(), path


def test_the_cluster_file_of_the_page_is_one() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", text("add-a-node.md"), re.DOTALL)
    cluster = load_cluster(read_yaml(shown).data)
    assert cluster.gpus == 1024 and [level.oversubscription for level in cluster.fabric.joins] == [1, 2]
    assert cluster.fabric.hop_latency == 0.25e-6

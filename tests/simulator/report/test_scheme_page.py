"""docs/schemes.md is up to date and says of every scheme what its file says."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from simulator.ir.registry import find_scheme, scheme_names
from simulator.ir.scheme import FAMILIES
from simulator.report.scheme_page import TITLES, anchor, closed_forms, page

ROOT = Path(__file__).resolve().parents[3]


@cache
def written() -> str:
    return page()


def section(use: str) -> str:
    """What the page says of one scheme."""
    _, _, rest = written().partition(f"\n### {use}\n")
    return re.split(r"\n##+ ", rest)[0]


def test_the_page_of_the_schemes_is_up_to_date() -> None:
    assert (ROOT / "docs" / "schemes.md").read_text("utf-8") == written(), "`make docs-schemes` puts it right"


def test_every_family_has_a_title() -> None:
    assert set(TITLES) == set(FAMILIES)


@pytest.mark.parametrize("use", scheme_names())
def test_it_shows_paper_options_and_laws_of_every_scheme(use: str) -> None:
    kind, told = find_scheme(use), section(use)
    assert kind.paper.title in told and str(kind.paper.year) in told
    assert f"[{use}](#{anchor(use)})" in written()
    for option in kind.Options.model_fields:
        (said,) = re.findall(rf"^\| `{option}` \| .+ \| (.*) \|$", told, re.MULTILINE)
        assert said, f"{use} does not say what its option {option} is"
    found = list(closed_forms(use))
    assert inspect.getsource(kind).count("ClosedForm(") == len(found)
    for quantity, where, formula in found:
        assert quantity in told and " ".join(where.split()).replace("|", "\\|") in told and formula


def test_what_a_law_works_out_before_stands_in_its_formula() -> None:
    ((_, _, formula),) = [law for law in closed_forms("data/fsdp") if law[0] == "sent_per_step"]
    assert "gathers * weights + grads" in formula and "moved" not in formula

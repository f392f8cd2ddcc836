"""docs/schemes.md is up to date and agrees with the file of every scheme."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.ir.scheme import FAMILIES
from tools.pages.schemes import TITLES, anchor, closed_forms, page

ROOT = Path(__file__).resolve().parents[3]


@cache
def written() -> str:
    return page()


def section(use: str) -> str:
    """The section of one scheme on the page."""
    _, _, rest = written().partition(f"\n### {use}\n")
    return re.split(r"\n##+ ", rest)[0]


def test_the_page_of_the_schemes_is_up_to_date() -> None:
    assert (ROOT / "docs" / "schemes.md").read_text("utf-8") == written(), "`make docs-schemes` puts it right"


def test_every_family_has_a_title() -> None:
    assert set(TITLES) == set(FAMILIES)


@pytest.mark.parametrize("use", scheme_names())
def test_it_shows_paper_options_and_closed_forms_of_every_scheme(use: str) -> None:
    kind, text = find_scheme(use), section(use)
    assert kind.paper.title in text and str(kind.paper.year) in text
    assert f"[{use}](#{anchor(use)})" in written()
    for option in kind.Options.model_fields:
        (sentence,) = re.findall(rf"^\| `{option}` \| .+ \| (.*) \|$", text, re.MULTILINE)
        assert sentence, f"{use} has no sentence on its option {option}"
    found = list(closed_forms(use))
    stated = next(base for base in kind.__mro__ if "closed_forms" in vars(base))
    assert inspect.getsource(stated).count("ClosedForm(") == len(found)
    for quantity, where, formula in found:
        assert quantity in text and " ".join(where.split()).replace("|", "\\|") in text and formula


def test_intermediate_values_stand_in_the_formula_of_a_closed_form() -> None:
    ((_, _, formula),) = [law for law in closed_forms("data/fsdp") if law[0] == "sent_per_step"]
    assert "gathers * weights + grads" in formula and "moved" not in formula

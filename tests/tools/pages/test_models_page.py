from pathlib import Path

from tools.pages.models import page

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

LIMITS = {"lara_mini": 0.6, "llava": 0.3, "internvl": 0.2}
"""Largest differences of products [%] of the types of which the page says why: a recurrence that counts by its states
here and by products of chunks there, and encoders whose class token is left out."""


def test_the_page_of_types_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "`make docs-models` puts it right"


def test_every_compared_type_has_the_parameters_and_products_of_its_code() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    for name, how, parameters, beside, flops, *_ in rows:
        assert beside == ("0" if parameters else "") and (how != "refused" or not parameters)
        share, most = flops.partition(" *")[0], LIMITS.get(name.strip("| `"), 0.1)
        assert share in ("", "< 0.1 %") or float(share.removesuffix("%")) <= most

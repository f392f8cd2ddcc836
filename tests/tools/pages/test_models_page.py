from pathlib import Path

from tools.pages.models import page

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

LIMITS = {"states*": 1.0, "encoder*": 0.3}
"""Largest differences of products [%] where the page says why: of recurrences, which count by their states here and by
products of chunks there, and of encoders, whose class token is left out."""


def test_the_page_of_types_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "`make docs-models` puts it right"


def test_every_compared_type_has_the_parameters_and_products_of_its_code() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    for _, how, parameters, beside, flops, *_ in rows:
        assert beside == ("0" if parameters else "") and (how != "refused" or not parameters)
        share, _, what = flops.partition(" *")
        assert share in ("", "< 0.1 %") or float(share.removesuffix("%")) <= LIMITS.get(what, 0.1)

from pathlib import Path

from tools.pages.models import page

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_of_types_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "`make docs-models` puts it right"


def test_every_compared_type_has_the_parameters_and_products_of_its_code() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    for _, how, parameters, beside, flops, *_ in rows:
        assert beside == ("0" if parameters else "") and (how != "refused" or not parameters)
        share, _, what = flops.partition(" *")
        most = 1.0 if what == "states*" else 0.1  # recurrences count by states here, by products of chunks there
        assert share in ("", "< 0.1 %") or float(share.removesuffix("%")) <= most

from pathlib import Path

from tools.pages.plan_keys import write_table

PAGE = Path(__file__).parents[3] / "docs" / "job.md"


def test_the_page_has_the_table_of_plan_keys() -> None:
    """`make docs-job` makes it anew."""
    page = PAGE.read_text("utf-8")
    assert write_table(page) == page

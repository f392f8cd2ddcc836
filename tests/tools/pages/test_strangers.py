"""The page of accuracy says what strangers are told, and the README takes its figures from there."""

from __future__ import annotations

from typing import Any

from tools.pages.accuracy import list_strangers
from tools.pages.readme import ACCURACY, README, describe_accuracy, describe_strangers


def answer(kind: str, error: float, program: str = "nemo") -> dict[str, Any]:
    """An answer to a run of 1 s, with an interval of 20 % on either side."""
    step = 1 + error
    return {
        "status": "predicted", "class": kind, "stack": program, "regime": "program", "error": error,
        "memory_error": None, "baseline": None,
        "predicted": {"step_time_s": step, "interval_90_s": [0.8 * step, 1.2 * step]},
    }  # fmt: skip


def test_figures_of_strangers_stand_on_the_page_and_in_the_readme() -> None:
    rows = [answer(kind, 0.01) for kind in ("dense", "moe", "lora") for _ in range(5)]
    strange = [answer("dense", 0.05)] * 5 + [answer("moe", 0.3)] * 5 + [answer("lora", -0.03)] * 5
    page = list_strangers(rows, strange, new=5)
    assert "| dense | 5 | 1.0 / 1.0 | 5.0 / 5.0 | +5.0 | 100 | 20 |" in page
    assert "| nemo | 15 | 1.0 / 1.0 | 5.0 / 30.0 |" in page and "| program | 15 |" in page
    assert "Now they are 1.0 / 1.0 % off, and 3.0 / 3.0 % as a stranger" in page
    assert describe_strangers(page).endswith(
        "5.0 / 30.0 % (median, 90th percentile; dense models 5.0 / 5.0, experts 30.0 / 30.0, adapters 3.0 / 3.0), "
        "and 67 % inside."
    )


def test_the_readme_says_what_the_page_says() -> None:
    assert describe_accuracy(ACCURACY.read_text("utf-8")) in README.read_text("utf-8")

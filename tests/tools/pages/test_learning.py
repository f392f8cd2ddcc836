"""docs/learning.md: figures of trials stand on the page, and the prior beside them."""

from __future__ import annotations

from pathlib import Path

import yaml

from meshcast.simulator.costs.step_posterior import StepPrior, shipped_prior
from meshcast.validation.learning.step_prior import START
from tools.pages.learning import describe_learning, write_prior

ANSWER = {
    "prior": {name: 0.12345 for name in vars(START)},
    "counts": [0, 1, 5],
    "trials": 3,
    "sources": [
        {
            "source": "mine", "steps": 12,
            "errors": {"0": 0.1, "1": 0.09, "5": 0.05}, "not_shortened": {"0": 0.1, "1": 0.08, "5": 0.02},
        }
    ],
    "draws": {"held": 20, "draws": 200, "worse": 4, "by_a_point": 1, "most": 0.012},
    "intervals": [
        {
            "steps": 5, "sources": 1, "inside_before": 0.95, "inside_after": 0.91,
            "width_before": 0.2, "width_after": 0.1,
        }
    ],
}  # fmt: skip


def test_figures_of_trials_stand_on_the_page() -> None:
    page = describe_learning(ANSWER)
    assert "| mine | 12 | 10.0 | 9.0 | 5.0 | 0.50 | 0.20 |" in page
    assert "5 steps leave 50% of the error (20% without shortening" in page
    assert "Of 200 draws with 20 steps or more held back 2.0% are forecast worse" in page
    assert "| 5 | 1 | 95 | 91 | 20 | 10 |" in page


def test_the_prior_is_written_as_it_is_read(tmp_path: Path) -> None:
    write_prior(ANSWER, file := tmp_path / "prior.yaml")
    assert StepPrior(**yaml.safe_load(file.read_text())).gemm == 0.123


def test_the_page_has_the_prior_that_ships() -> None:
    page = (Path(__file__).parents[3] / "docs" / "learning.md").read_text("utf-8")
    assert f"| gemm | {shipped_prior().gemm:.3g} |" in page and f"| noise | {shipped_prior().noise:.3g} |" in page

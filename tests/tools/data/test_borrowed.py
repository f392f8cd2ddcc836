"""The sigma that borrowed cost models need: that of nine of ten rows, of which every section counts alike."""

from __future__ import annotations

import numpy as np
import pytest

from meshcast.simulator.report.metrics import Z90
from tools.data.borrowed import needed_sigma


def test_the_sigma_is_what_nine_of_ten_rows_need_beside_that_of_the_lender() -> None:
    """Rows lie 0 to 0.5 off, evenly; 0.1 is the lender's."""
    far, none = np.linspace(-0.5, 0.5, 2001), np.zeros(2001)
    assert needed_sigma([(far, none)]) == pytest.approx(0.45 / Z90, rel=0.01)
    assert needed_sigma([(far, none + 0.1)]) ** 2 == pytest.approx((0.45 / Z90) ** 2 - 0.01, rel=0.01)
    assert needed_sigma([(far, none + 0.4)]) == 0.0


def test_sections_count_alike() -> None:
    """Twenty rows that are 0.5 off are half of two sections, beside ten thousand that are 0.1 off."""
    near, away = (np.full(10_000, 0.1), np.zeros(10_000)), (np.full(20, 0.5), np.zeros(20))
    assert needed_sigma([near, away]) == pytest.approx(0.5 / Z90)
    assert needed_sigma([near] * 19 + [away]) == pytest.approx(0.1 / Z90)

"""Rows of a file are those of a sweep: figures and fields are finite numbers, texts are texts."""

from typing import Any

import pytest

from meshcast.experiments.sweeps.selection import check_rows
from meshcast.hardware.errors import PlanError

ROW: dict[str, Any] = {"index": 0, "plan.tp": 2, "plan.schedule": "1f1b", "status": "invalid", "reason": "a rule"}


@pytest.mark.parametrize(
    ("key", "cell"),
    [
        ("status", ["fits"]),
        ("status", {"fits": 1}),
        ("status", "other"),
        ("reason", ["a rule"]),
        ("plan.tp", 10**40),
        ("plan.tp", float("nan")),
        ("step_time_s", "long"),
    ],
)
def test_a_cell_that_no_sweep_writes_is_refused_with_its_place(key: str, cell: object) -> None:
    check_rows("rows.parquet", [ROW], "Name a file")
    with pytest.raises(PlanError, match=rf"row 2 {key}"):
        check_rows("rows.parquet", [ROW, ROW | {key: cell}], "Name a file")

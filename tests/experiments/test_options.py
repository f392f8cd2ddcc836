"""The options of a command: one model for its command line and for the Python function."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.experiments.options import Options
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.sweeps.options import SweepOptions
from meshcast.hardware.errors import PlanError


@pytest.mark.parametrize(
    ("options", "field", "values"),
    [
        (SearchOptions, "within", {"within": 2}),
        (SearchOptions, "top", {"top": 0}),
        (SearchOptions, "workers", {"workers": 0}),
        (SearchOptions, "where", {"where": ["plan.tp +"]}),
        (SearchOptions, "memory_margin", {"memory_margin": -1}),
        (SearchOptions, "memory_risk", {"memory_risk": 1}),
        (SearchOptions, "objective", {"objective": "speed"}),
        (SearchOptions, "objective", {"objective": "days", "heterogeneous": True}),
        (SearchOptions, "near_measured", {"near_measured": True, "heterogeneous": True}),
        (SearchOptions, "runs", {"runs": 2}),
        (SweepOptions, "workers", {"workers": 0}),
        (SweepOptions, "workers", {"workers": 1, "on": "dask://host:8786"}),
    ],
)
def test_a_wrong_value_breaks_one_rule_wherever_it_is_written(
    options: type[Options], field: str, values: dict[str, Any]
) -> None:
    errors = []
    for of_command, place in ((False, field), (True, f"--{field.replace('_', '-')}")):
        with pytest.raises(PlanError) as refused:
            options.read(values, of_command)
        assert refused.value.where == place
        errors.append(refused.value)
    assert errors[0].rule == errors[1].rule and errors[0].value == errors[1].value


def test_an_unknown_word_and_a_wrong_type_are_refused_by_name() -> None:
    for values, place in (({"unlike": True}, "unlike"), ({"robust": "perhaps"}, "robust")):
        with pytest.raises(PlanError) as refused:
            SearchOptions.read(values)
        assert refused.value.where == place

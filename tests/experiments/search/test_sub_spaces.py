"""Searches of drawn parts of large spaces against the forecasts of all their plans."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshcast.hardware.errors import MeshcastError
from tests.experiments.search.spaces import check_against_brute_force, open_space, points_of
from tests.experiments.search.test_bounds import LARGE_JOBS

FIELDS: dict[str, list[Any]] = {
    "tp": [2, 4, 8], "cp": [1, 2], "pp": [1, 4, 8, 16], "zero": [1, 2, 3], "chunks": [1, 2, 3, 4],
    "schedule": ["1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "hanayo"],
    "recompute": ["none", "selective", "full"], "partition": ["even", "ends-as-layers"], "offload": [[], ["optimizer"]],
    "sequence_parallel": [True, False], "order": ["pp-dp-cp-tp", "dp-pp-cp-tp"],
}  # fmt: skip
EXPERTS: dict[str, list[Any]] = {"ep": [1, 2, 4, 8], "etp": [1, 2]}
SMALL = {"tp": 8, "pp": 16, "recompute": "full"}
"""A value of some fields with which plans need little memory."""

NAMES = ("gpt3", "llama3", "mixtral", "deepseek")


def draw_sub_space(seed: int) -> dict[str, Any]:
    """Draws a space of 8 to 60 plans of a large job: up to two values of each of its fields."""
    rng = random.Random(seed)
    job = LARGE_JOBS[NAMES[seed % len(NAMES)]]
    while True:
        fields = FIELDS | (EXPERTS if NAMES[seed % len(NAMES)] in ("mixtral", "deepseek") else {})
        plan = {name: rng.sample(values, rng.choice([1, 2, 2])) for name, values in fields.items()}
        for name, value in SMALL.items():  # most plans of other values do not fit
            plan[name] = [*dict.fromkeys([value, *plan[name][:1]])]
        if rng.random() < 0.3:
            plan |= {"zero": 1, "fsdp": True}
        drawn_job = {**job, "batch": {**job["batch"], "micro": rng.sample([1, 2, 3], 2)}, "plan": plan}
        try:
            if 8 <= len(points_of(open_space(drawn_job))) <= 60:
                return drawn_job
        except MeshcastError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_part_of_a_large_space_is_searched_as_by_brute_force(seed: int) -> None:
    check_against_brute_force(draw_sub_space(seed))

"""Aceso on its authors' profile of operators: the prices of the plans that their code found, and plans of our walk."""

from __future__ import annotations

import pytest

from meshcast.experiments.planning.cores.local_search import Shape, StageState
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.aceso import OperatorProfile, PricedStage
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import ProfileProblem

MEMORY = 12_000
"""MiB of the authors' small search."""


def price(counts: list[int], replicas: list[int], micro: int) -> tuple[list[PricedStage], list[float]]:
    """Stages of so many operators on so many replicas, and of each (m - 1) times its seconds and those of all."""
    profile = OperatorProfile(ProfileProblem("aceso-gpt-1.3b").settings, MEMORY)
    stages, first = [], 0
    for place, (count, data) in enumerate(zip(counts, replicas, strict=True)):
        stage = StageState(first, first + count, Shape(data, 1, data))
        stages.append(profile.price(stage, micro, len(counts) - 1 - place))
        first += count
    assert first == len(profile.names) == 315
    whole = sum(stage.seconds for stage in stages)
    return stages, [(512 // micro - 1) * stage.seconds + whole for stage in stages]


PLANS = {
    4: ([78, 81, 83, 73], [1, 1, 1, 1], 1),
    3: ([81, 160, 74], [1, 2, 1], 2),
}
FIGURES = {
    4: ([56934.82, 57665.78, 58760.92, 57330.98], [11904.80, 11940.64, 11776.38, 11976.22], [26, 22, 16, 14]),
    3: ([66087.78, 67394.46, 67191.13], [11688.20, 11848.03, 11728.24], [79, 160, 65]),
}
"""Milliseconds, MiB and how many operators are recomputed."""


@pytest.mark.parametrize("number", PLANS)
def test_plans_cost_what_the_authors_code_says(number: int) -> None:
    """The plans that `aceso_search.py` finds with 4 and with 3 stages, their times and memory, and how many operators
    are recomputed. The first is 58760.92 ms and 11940.64 MB in its README, too."""
    stages, seconds = price(*PLANS[number])
    milliseconds, memory, recomputed = FIGURES[number]
    assert [1e3 * value for value in seconds] == pytest.approx(milliseconds, abs=5.1e-3)
    assert [stage.memory for stage in stages] == pytest.approx(memory, abs=5.1e-3)
    assert [sum(stage.recomputed) for stage in stages] == recomputed
    if number == 4:  # the flags of the first two layers of the first stage
        again = [place for place, flag in enumerate(stages[0].recomputed) if flag]
        assert again[:10] == [3, 4, 5, 6, 10, 11, 16, 17, 18, 19]


def test_the_walk_is_no_slower_than_the_authors_search() -> None:
    """Their best plan takes 58.76092 s: 4 stages of one GPU, micro-batches of one sample."""
    problem = ProfileProblem("aceso-gpt-1.3b")
    proposal = find_planner("aceso")().plan(problem, SearchBudget(steps=500))
    assert 0.99 * 58.76092 < proposal.value <= 58.76092
    stages = proposal.plan["stages"]
    assert proposal.plan["micro_batch"] == 1 and [(stage["tp"], stage["dp"]) for stage in stages] == [(1, 1)] * 4
    theirs = [78, 81, 83, 73]
    assert all(abs(len(stage["nodes"]) - other) <= 3 for stage, other in zip(stages, theirs, strict=True))
    assert [node for stage in stages for node in stage["nodes"]] == [*range(315)]

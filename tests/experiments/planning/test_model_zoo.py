"""The models that papers of planners plan for: profiles with the weights of their models."""

from __future__ import annotations

import pytest

from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem


@pytest.mark.parametrize(
    ("profile", "millions"),
    [
        ("pipedream-alexnet", 61.10084),
        ("pipedream-vgg16", 138.357544),
        ("pipedream-resnet50", 25.557032),
        ("dapple-vgg19", 137.0),
        ("dapple-bert24", 335.1),
        ("dapple-bert48", 637.5),
        ("dapple-xlnet36", 500.8),
        ("dapple-amoebanet36", 932.8),
        ("aceso-wresnet-1b", 1005.6),
    ],
)
def test_a_profile_has_the_weights_of_its_model(profile: str, millions: float) -> None:
    """In fp32. Those of DAPPLE's paper are 137, 340, 640, 500 and 933 millions; PipeDream's are torchvision's."""
    figures = ProfileProblem(profile).graph().figures
    exact = profile in ("pipedream-alexnet", "pipedream-resnet50")
    assert figures["parameters"].sum() / 4e6 == pytest.approx(millions, rel=1e-9 if exact else 5e-4)
    assert (figures["forward"] >= 0).all() and figures["activations"].sum() > 0


@pytest.mark.parametrize("profile", ["aceso-wresnet-1b", "dapple-amoebanet36"])
def test_planners_of_chains_plan_them(profile: str) -> None:
    problem = ProfileProblem(profile, [NetworkLevel(4, 1.25e9)], batch=128, microbatches=8)
    figures = problem.graph().figures
    whole = float((figures["forward"] + figures["backward"]).sum())
    found = find_planner("pipedream")().plan(problem, SearchBudget())
    assert whole / 4 <= found.value < whole / 3
    assert find_planner("autopipe")().plan(problem, SearchBudget()).value > whole / 4 * 8

"""The models that papers of planners plan for: profiles with the weights of their models, and modules with the
published parameters and FLOPs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.planning.imported.module_problem import ModuleProblem
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from tests.thinning import thinned

MODULES = Path(__file__).resolve().parents[3] / "examples" / "modules" / "convolutional.py"


@cache
def figures_of(name: str) -> Any:
    """The figures of the layers of a module, traced once."""
    return ModuleProblem(f"{MODULES}:{name}", "p3:1", depth=1).graph().figures


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


@pytest.mark.parametrize(
    ("name", "millions", "products"),
    thinned(
        [
            ("alexnet", 61.10084, 0.714),
            ("vgg16", 138.357544, 15.47),
            ("resnet50", 25.557032, 4.089),
            ("wide_resnet_1b", 1005.4074, None),
            ("wide_resnet_4b", 4000.4458, None),
        ],
        keep=3,
    ),
)
def test_modules_have_the_published_parameters_and_flops(name: str, millions: float, products: float | None) -> None:
    """Products and sums of an image, in billions, as torchvision publishes them; the Wide-ResNets have the parameters
    that their names say."""
    pytest.importorskip("torch")
    figures = figures_of(name)
    assert figures["parameters"].sum() / 4e6 == pytest.approx(millions, rel=1e-9)
    if products is not None:
        assert figures["forward_flops"].sum() / 32 / 2e9 == pytest.approx(products, rel=1e-3)
    ratio = figures["backward_flops"].sum() / figures["forward_flops"].sum()
    assert 1.88 < ratio < 2, "twice the forward pass but for the images, which need no gradient"


def test_a_module_and_a_profile_of_wide_resnet_agree() -> None:
    """Weights within the rounding of the profile; convolutions are priced as products of fp32, which the measured ones
    outrun by a half."""
    pytest.importorskip("torch")
    module = figures_of("wide_resnet_1b")
    profile = ProfileProblem("aceso-wresnet-1b").graph().figures
    assert module["parameters"].sum() == pytest.approx(profile["parameters"].sum(), rel=3e-4)
    for name in ("forward", "backward"):
        ratio = module[name].sum() / 32 / (profile[name].sum() / 16)
        assert 1.0 < ratio < 1.7, name


@pytest.mark.parametrize("profile", ["aceso-wresnet-1b", "dapple-amoebanet36"])
def test_planners_of_chains_plan_them(profile: str) -> None:
    problem = ProfileProblem(profile, [NetworkLevel(4, 1.25e9)], batch=128, microbatches=8)
    figures = problem.graph().figures
    whole = float((figures["forward"] + figures["backward"]).sum())
    found = find_planner("pipedream")().plan(problem, SearchBudget())
    assert whole / 4 <= found.value < whole / 3
    assert find_planner("autopipe")().plan(problem, SearchBudget()).value > whole / 4 * 8

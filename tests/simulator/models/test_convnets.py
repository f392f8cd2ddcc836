"""ResNets as sequences of blocks that are priced by FLOPs and bytes: numbers of torchvision, and what a step has."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.huggingface.convnets import ResNet
from meshcast.simulator.models.load import load_model
from meshcast.validation.claims.played_measures import priced_ops
from tests.simulator.models.configs import RESNET


@pytest.mark.parametrize(
    ("layers", "parameters", "gmacs"),
    [
        (18, 11_689_512, 1.814),
        (34, 21_797_672, 3.664),
        (50, 25_557_032, 4.089),
        (101, 44_549_160, 7.801),
        (152, 60_192_808, 11.514),
    ],
)
def test_parameters_and_products_are_those_of_torchvision(layers: int, parameters: int, gmacs: float) -> None:
    """torchvision.models, ResNet*_Weights.IMAGENET1K_V1: num_params and _ops. The table of the one token is ours."""
    model = load_model(f"microsoft/resnet-{layers}")
    assert model.parameters - model.vocab * model.hidden == parameters
    blocks = [variant.other for variant in model.variants for _ in variant.numbers]
    blocks += [model.other] * (model.layers - len(blocks))
    products = sum(block.flops for block in blocks if block) * model.seq + 2 * model.hidden * 1000
    assert products / 2e9 == pytest.approx(gmacs, abs=0.001)


def test_a_step_has_three_times_the_products_of_a_forward_pass() -> None:
    job: dict[str, Any] = {
        "model": "microsoft/resnet-50",
        "cluster": {"gpu": "a100-sxm-80", "gpus": 1},
        "batch": {"global": 8},
    }
    report = simulate(load_job({**job, "framework": "hf-trainer", "plan": {}}))
    products = [
        (op.phase, count * op.work.flops) for _, op, _, count in priced_ops(report) if isinstance(op.work, Gemm)
    ]
    forward = sum(flops for phase, flops in products if phase == "F")
    assert sum(flops for _, flops in products) == pytest.approx(3 * forward, rel=0.01)
    assert forward == pytest.approx(8 * 2 * 4.089e9, rel=0.01)


def test_blocks_that_shrink_where_the_config_says() -> None:
    late, early = (ResNet.model_validate({**RESNET, "downsample_in_bottleneck": value}) for value in (False, True))
    flops = [sum(block.flops for block in network._blocks()) for network in (late, early)]
    assert flops[1] < flops[0], "a product of a quarter of the positions"


def test_a_stage_has_a_width_and_a_depth() -> None:
    with pytest.raises(ModelError, match=r"a stage has a width and a depth\. Give 4 of them"):
        from_config({**RESNET, "depths": [3, 4, 6]})

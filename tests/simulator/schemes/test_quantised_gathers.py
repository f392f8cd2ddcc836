"""Weights that are gathered in the format of their recipe: bytes of collectives, and of weights that stay."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report
from meshcast.validation.claims.measures import read_measure

H, F, LAYERS, VOCAB = 1024, 4096, 4, 32000
MODEL: dict[str, Any] = {
    "layers": LAYERS, "hidden": H, "heads": 8, "ffn": F, "vocab": VOCAB, "seq": 256, "gated": True, "norm": "rmsnorm",
    "positions": "rope",
}  # fmt: skip
MATRICES = LAYERS * (4 * H * H + 3 * H * F)
"""Elements of linear layers; embedding, output layer and norms are in no recipe."""
SHARED = SharedWork()


def forecast(
    recipe: str, quantised: bool, plan: dict[str, Any], gpu: str = "b200-sxm", name: str = "megatron-core"
) -> Report:
    job = {
        "model": MODEL,
        "cluster": {"gpu": gpu, "gpus": 8},
        "framework": {"name": name, "set": {"update": {"quantised_weights": quantised}}},
        "batch": {"global": 8, "micro": 1},
        "precision": recipe,
        "plan": plan,
    }
    return simulate(job, shared_work=SHARED)


def sent(report: Report, operation: str) -> float:
    """Returns the bytes of the buffers of a kind of collective."""
    (each,) = read_measure(report, f"sent_gib.dp.{operation}")
    return float(each) * 2**30 * 8 / 7


FORMATS = {"bf16": 2, "fp8-rowwise": 2, "fp8-tensorwise": 1, "fp8-blockwise": 1, "mxfp8": 33 / 32, "nvfp4": 9 / 16}


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize(("plan", "times"), [({"fsdp": True}, 2), ({"zero": 1, "tp": 1}, 1)])
def test_matrices_are_gathered_in_the_format_of_their_recipe(recipe: str, plan: dict[str, Any], times: int) -> None:
    """Once or, by FSDP, for both passes; gradients are reduced as before. ZeRO-1 gathers MXFP8 in 16 bits."""
    whole, small = (forecast(recipe, quantised, plan) for quantised in (False, True))
    nbytes = 2 if recipe == "mxfp8" and times == 1 else FORMATS[recipe]
    saved = sent(whole, "all_gather") - sent(small, "all_gather")
    assert saved == pytest.approx(times * (2 - nbytes) * MATRICES)
    assert sent(whole, "reduce_scatter") == sent(small, "reduce_scatter")
    assert small.step_time <= whole.step_time


@pytest.mark.parametrize(
    ("recipe", "gpu", "nbytes"),
    [
        ("fp8-tensorwise", "h100-sxm", 2),
        ("fp8-tensorwise", "b200-sxm", 1),
        ("fp8-blockwise", "h100-sxm", 2),
        ("mxfp8", "b200-sxm", 2 + 2 / 32),
        ("nvfp4", "b200-sxm", 1 + 2 / 16),
    ],
)
def test_whole_weights_stay_in_the_format_of_their_recipe(recipe: str, gpu: str, nbytes: float) -> None:
    """Of blocks along rows and along columns a copy each, and on Hopper one that is transposed."""
    whole, small = (forecast(recipe, quantised, {"zero": 1, "tp": 1}, gpu) for quantised in (False, True))
    difference = whole.play.resting[0]["parameters"] - small.play.resting[0]["parameters"]
    assert difference == pytest.approx((2 - nbytes) * MATRICES)
    states = [{**report.play.resting[0], "parameters": 0} for report in (whole, small)]
    assert states[0] == states[1]


def test_gathered_copies_take_the_bytes_that_are_gathered() -> None:
    """A layer's under FSDP with a pipeline, of which each stage keeps its weights whole: half of the memory."""
    plan = {"fsdp": True, "pp": 2, "tp": 1}
    whole, small = (forecast("fp8-tensorwise", each, plan, "h100-sxm", "torchtitan") for each in (False, True))
    difference = whole.play.peaks[1].by["parameters"] - small.play.peaks[1].by["parameters"]
    assert difference == pytest.approx(MATRICES / 2)

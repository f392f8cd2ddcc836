"""Encoders of images in front of a decoder: parameters, merged patches, tied output layers, frozen towers."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_gradients import sum_shared_gradients
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played
from tests.draws import drawn_grid
from tests.simulator.models.configs import VISION, VISION_COUNTS
from tests.simulator.models.lowered import PLANS, play

TOWERS = [name for name in VISION if "clip" not in name]


def read(name: str, **changes: Any) -> Model:
    return from_config(VISION[name] | changes, name=name)


@pytest.mark.parametrize("name", VISION)
def test_parameters_are_those_of_the_modelling_code(name: str) -> None:
    """LLaVA leaves the norm behind the last layer of CLIP unread, and CLIP has one number as temperature."""
    unread = {"llava-hf/llava-1.5-7b-hf": 2 * 1024, "openai/clip-vit-large-patch14": 1}
    assert read(name).parameters + unread.get(name, 0) == VISION_COUNTS[name]


def test_the_features_of_the_last_layer_cost_what_those_of_the_layer_before_do() -> None:
    llava = "llava-hf/llava-1.5-7b-hf"
    assert read(llava, vision_feature_layer=-1) == read(llava, vision_feature_layer=-2) == read(llava)


@pytest.mark.parametrize(
    ("name", "images", "weights", "pairs", "projector"),
    [
        (  # 4096 patches, averaged sixteen to one
            *("google/gemma-3-4b-pt", 4096),
            *(27 * (4 * 1152 * 1152 + 2 * 1152 * 4304) + 588 * 1152, 27 * 2 * 4096 * 1152, 1152 * 2560),
        ),
        (  # 1024 tokens of four patches each
            *("Qwen/Qwen2-VL-7B-Instruct", 4096),
            *(32 * (4 * 1280 * 1280 + 8 * 1280 * 1280) + 1176 * 1280, 32 * 2 * 4096 * 1280, 5120 * 5120 + 5120 * 3584),
        ),
        (  # attention within 64 patches in 28 layers, and over all in four
            *("Qwen/Qwen2.5-VL-7B-Instruct", 4096),
            32 * (4 * 1280 * 1280 + 3 * 1280 * 3420) + 1176 * 1280,
            (28 * 64 + 4 * 4096) * 2 * 1280,
            5120 * 5120 + 5120 * 3584,
        ),
        (
            *("llava-hf/llava-1.5-7b-hf", 576),
            *(24 * 12 * 1024 * 1024 + 588 * 1024, 24 * 2 * 576 * 1024, 1024 * 4096 + 4096 * 4096),
        ),
    ],
)
def test_flops_by_hand(name: str, images: int, weights: int, pairs: int, projector: int) -> None:
    """Of a sequence: those of the tower over the patches of one image, and of the projector over its tokens."""
    model = read(name)
    seq, tokens = model.seq, model.branches[0].tokens or 0
    trunk = Model.model_validate(model.model_dump(exclude_unset=True, exclude={"branches"}) | {"tied": False})
    whole = sum(forward_matmul_flops(model, seq, seq, causal=True).values())
    alone = sum(forward_matmul_flops(trunk, seq, seq, causal=True).values())
    assert whole - alone == pytest.approx(images * (2 * weights + 2 * pairs) + 2 * tokens * projector, rel=1e-9)


# --------------------------------------------------------------------------------------------- what is lowered

SMALL: dict[str, Any] = {
    **{"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 128, "seq": 48, "norm": "rmsnorm", "gated": True},
    **{"positions": "rope", "tied": True},
}
TOWER: dict[str, Any] = {
    **{"name": "vision", "tokens": 16, "merge": 4, "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "gated": False},
    **{"input_width": 12, "norm": "layernorm", "projector": "mlp", "projector_ffn": 64},
}
TEXT = {"name": "text", "layers": 0}


def run(tower: dict[str, Any], plan: Any = None, gpus: int = 1, **fields: Any) -> Played:
    return play(SMALL | fields | {"branches": [TOWER | tower, TEXT]}, plan, gpus, batch=2)


def test_layers_of_a_tower_run_over_all_inputs_and_the_projector_over_tokens() -> None:
    runs = run({}).stages[0].unit_runs
    qkv = next(op.work for op in runs[1].fragment.forward if isinstance(op.work, Gemm))
    assert qkv.m == 64
    ops = {op.name: op.work for one in runs for op in one.fragment.forward}
    up, down, merge = ops["project.up"], ops["project.down"], ops["merge"]
    assert isinstance(up, Gemm) and isinstance(down, Gemm) and isinstance(merge, Memory)
    assert (up.m, up.k, up.n) == (16, 64, 64) and (down.m, down.k, down.n) == (16, 64, 32)
    assert (merge.read, merge.write) == (2 * 64 * 16, 2 * 16 * 64)
    mean = {op.name: op.work for one in run({"merge_by": "mean"}).stages[0].unit_runs for op in one.fragment.forward}
    merge, up = mean["merge"], mean["project.up"]
    assert isinstance(up, Gemm) and isinstance(merge, Memory)
    assert (merge.read, merge.write) == (2 * 64 * 16, 2 * 16 * 16) and up.k == 16


@pytest.mark.parametrize("tower", [{}, {"merge_by": "mean", "projector": "linear"}, {"projector_norm": True}])
def test_all_parameters_are_held(tower: dict[str, Any]) -> None:
    played = run(tower | ({"merge_by": "mean"} if "projector_norm" in tower else {}))
    assert sum(param.size for param in played.list_held(0)) == played.plan.job.model.parameters


def test_a_tied_output_layer_shares_the_embedding_of_the_texts() -> None:
    tied, untied = run({}), run({}, tied=False)
    assert sum(one.size for one in untied.list_held(0)) - sum(one.size for one in tied.list_held(0)) == 128 * 32
    tables = [param.name for param in params_of(tied.stages[0]) if "embedding" in param.name]
    assert tables == ["branch1.embedding"]


def test_a_tied_output_layer_on_another_stage_is_a_copy_whose_gradient_is_summed() -> None:
    """Stages: the tower; the texts' embedding and the first layer of the trunk; the last layer and the loss."""
    plan = {"mesh": {"pp": 4}, "schemes": [{"use": "pipeline/1f1b", "over": "pp"}], "partition": [1, 1, 1, 1]}
    tied = run({}, plan, gpus=4)
    names = ("branch1.embedding", "head")
    tables = [[param.size for param in params_of(stage) if param.name in names] for stage in tied.stages]
    assert tables == [[], [], [128 * 32], [128 * 32]]
    assert [bool(sums) for sums in sum_shared_gradients(tied.plan, tied.stages)] == [False, False, True, True]
    untied = run({}, plan, gpus=4, tied=False)
    assert [bool(sums) for sums in sum_shared_gradients(untied.plan, untied.stages)] == [False] * 4


@pytest.mark.parametrize(("name", "plan"), drawn_grid(TOWERS, PLANS))
def test_whole_forecasts(name: str, plan: str) -> None:
    """Of the first layers; a tower that is not trained takes less time and memory."""
    model = read(name).model_dump(exclude_unset=True)
    model |= {"layers": 6, "seq": 2048, "branches": [model["branches"][0] | {"layers": 8}, TEXT]}
    job = {"cluster": "dgx-h100:1", "batch": {"global": 16}, "plan": PLANS[plan]}
    steps, peaks = [], []
    for frozen in (False, True):
        model["branches"][0]["frozen"] = frozen
        forecast = simulate(job | {"model": model})
        steps.append(forecast.step_time)
        peaks.append(forecast.peak_device)
        assert 0 < forecast.mfu["causal"] < 0.8
    assert steps[1] < steps[0] and peaks[1] <= peaks[0]


# -------------------------------------------------------------------------------------- images of a sample


def test_more_images_and_frozen_towers_are_changes_of_a_branch() -> None:
    changed = load_model({"preset": "llava-1.5-7b", "branches": {"vision": {"tokens": 1152, "attention_chunk": 576}}})
    vision, text = changed.branches
    assert (vision.tokens, vision.attention_chunk, text.layers) == (1152, 576, 0)
    assert changed.parameters == load_model("llava-1.5-7b").parameters
    one, two = (
        load_model({"preset": "llava-1.5-7b", "branches": {"vision": tower}}) for tower in ({}, {"frozen": True})
    )
    assert (one.branches[0].frozen, two.branches[0].frozen) == (False, True)

"""Diffusion transformers: parameters and products beside those of diffusers, conditions of a sample, streams of texts
and patches, memory, and what each kind of parallelism divides.

A line of diffusers.jsonl is the config of a released model, or of a small one; `parameters` of the model that release
0.42 of diffusers builds on the meta device; `products`: FLOPs of a forward pass of one sample, as torch's
`FlopCounterMode` counts them (PyTorch 2.13).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import ModelError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.ir.ops import Collective, Gemm
from meshcast.simulator.models.flops import causal, forward_matmul_flops, palm
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import count_patches
from meshcast.validation.contract.played import Played, play_job
from tests.simulator.models.lowered import describe_job, play

RELEASED = [json.loads(line) for line in Path(__file__).with_name("diffusers.jsonl").read_text().splitlines()]

H, A, F, SEQ, TEXT, C = 64, 4, 256, 40, 8, 64
SHAPE: dict[str, Any] = {"layers": 4, "hidden": H, "heads": A, "seq": SEQ}
WORDS = {"name": "text", "layers": 0, "tokens": TEXT, "input_width": 48, "input_bias": True}
ENDS = {"inputs": 16, "outputs": 32, "embedders": {"vectors": [[256, C], [96, C]]}}
SINGLE = {"parallel_residual": True, "shared_norm": True, "proj_bias": False}
DOUBLE = {"joint_attention": True, "parallel_residual": False, "shared_norm": False, "proj_bias": True}
REFINER = {**WORDS, "layers": 2, "norm": "layernorm", "positions": "none", "bidirectional": True}
GATES = {"modulation": {"condition": C, "parts": "gates"}}
KINDS: dict[str, dict[str, Any]] = {
    "dit": {"diffusion": ENDS | {"embedders": {"vectors": [[256, C]], "labels": 11}}},
    "dit of diffusers": {
        "diffusion": {"inputs": 16},
        "modulation": {"embedders": {"vectors": [[256, C]], "labels": 11}},
    },
    "mmdit": {
        **{"diffusion": ENDS, "branches": [WORDS], "joint_attention": True, "qk_layernorm": True},
        "variants": [{"numbers": [3], "joint_attention": "last"}],
    },
    "flux": {
        **{"diffusion": ENDS, "branches": [WORDS], "positions": "rope", "qk_layernorm": True, **SINGLE},
        "variants": [{"numbers": [0, 1], **DOUBLE}],
    },
    "refined": {"diffusion": ENDS, "branches": [{**REFINER, **GATES}], "joint_attention": True},
    "shared weights": {
        **{"diffusion": ENDS | {"embedders": {"vectors": [[H, 32]]}, "final_norms": 2}, "branches": [WORDS]},
        **{"norm": "layernorm", "qk_layernorm": "layer", "modulation": {"condition": 32, "sets": 2}},
    },
    "pixart": {
        **{"diffusion": ENDS, "branches": [{**WORDS, "input_bias": "mlp"}]},
        **{"cross_attention": True, "modulation": {"by": "table"}},
    },
    "wan": {
        **{"diffusion": ENDS | {"cross_norm": True}, "branches": [{**WORDS, "input_bias": "mlp"}]},
        **{"cross_attention": True, "modulation": {"by": "table"}, "qk_layernorm": "all", "positions": "rope"},
    },
    "video": {"diffusion": ENDS, "frames": 4},
    "latte": {
        **{"diffusion": ENDS | {"cross_frames": True}, "branches": [{**WORDS, "input_bias": "mlp"}], "frames": 4},
        **{"cross_attention": True, "modulation": {"by": "table"}},
    },
    "video and text": {
        **{"diffusion": ENDS, "branches": [{**WORDS, "input_bias": "mlp"}], "frames": 4},
        **{"cross_attention": True, "modulation": {"by": "table"}},
    },
}


def describe(kind: str, **fields: Any) -> dict[str, Any]:
    return SHAPE | KINDS[kind] | fields


def run(kind: str, plan: Any = None, gpus: int = 1, batch: int = 1, **fields: Any) -> Played:
    return play(describe(kind, **fields), plan, gpus, batch)


# ------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("config", RELEASED, ids=[config["name"] for config in RELEASED])
def test_parameters_and_products_are_those_of_diffusers(config: dict[str, Any]) -> None:
    model = from_config(config)
    assert model.parameters == config["parameters"]
    products = sum(forward_matmul_flops(model, model.seq, model.seq, causal=False).values())
    assert products == pytest.approx(config["products"], rel=1e-3)


def test_dit_counted_by_hand() -> None:
    """DiT-XL/2: 675 M parameters, 256 x 1152 positions that are not trained left out, and 118.6 x 10^9 multiplications
    with an addition each (table 1)."""
    model, h = load_model("dit-xl-2-675m"), 1152
    layer = 4 * h * (h + 1) + 2 * 4 * h * h + 5 * h + 6 * h * (h + 1)
    conditions = (256 + 1) * h + (h + 1) * h + 1001 * h
    ends = (16 + 1) * h + 2 * h * (h + 1) + (h + 1) * 32
    assert model.parameters == 28 * layer + conditions + ends == 674_834_720
    products = sum(forward_matmul_flops(model, 256, 256, causal=False).values()) / 2
    assert products == pytest.approx(118.6e9, rel=1e-3)


def test_a_token_passes_the_weights_of_its_stream_and_a_share_of_those_of_its_sample() -> None:
    """A layer of two streams has the products of a layer of one, but for modulation, which a sample passes once."""
    joint, plain = (load_model(describe("mmdit", variants=(), joint_attention=kind)) for kind in (True, False))
    counted = [forward_matmul_flops(model, SEQ, SEQ, causal=True) for model in (joint, plain)]
    modulation = [parts.pop("modulation") for parts in counted]
    assert counted[0] == counted[1]
    assert modulation[0] - modulation[1] == 2 * 4 * 6 * H * C
    weights = 4 * (4 * H * H + 2 * H * F)
    assert joint.parameters - plain.parameters > weights
    assert joint.active_parameters == pytest.approx(plain.active_parameters, rel=0.02)
    assert palm(joint, SEQ) == pytest.approx(causal(joint, SEQ), rel=0.05)


def test_the_last_layer_of_a_text_lacks_what_comes_behind_attention() -> None:
    last, whole = (load_model(describe("mmdit", variants=variants)) for variants in (KINDS["mmdit"]["variants"], ()))
    parts = [forward_matmul_flops(model, SEQ, SEQ, causal=True) for model in (last, whole)]
    assert parts[1]["proj"] - parts[0]["proj"] == 2 * TEXT * H * H
    assert parts[1]["mlp"] - parts[0]["mlp"] == 2 * TEXT * 2 * H * F
    mlp, vectors = 2 * H * F + F + H, 4 * H * (C + 1)
    assert whole.parameters - last.parameters == H * (H + 1) + mlp + vectors


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_has_the_parameters_and_products_that_are_counted(kind: str) -> None:
    model, played = load_model(describe(kind)), run(kind)
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    counted = forward_matmul_flops(model, SEQ, SEQ, causal=True)
    attention = counted.pop("attention")
    assert played.flops("F") == {"gemm": sum(counted.values()), "attention": pytest.approx(attention)}
    backward = sum(played.flops(phase).get("gemm", 0) for phase in "BW")
    seconds = sum(2 * TEXT * H * H for branch in model.branches if branch.input_bias == "mlp")
    first_layers = counted["inputs"] - seconds  # nothing asks for the gradients of what these read
    assert backward == 2 * sum(counted.values()) - first_layers


# ------------------------------------------------------------------------------------------ dividing


@pytest.mark.parametrize("plan", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_divide_the_products_of_tokens_and_each_computes_the_vectors_of_a_sample(kind: str, plan: Any) -> None:
    """A text that patches attend to is whole on every rank of context parallelism, with its keys and values; of tensor
    parallelism its heads are divided, and its embedding is not."""
    model, played = load_model(describe(kind)), run(kind, plan, gpus=2)
    counted = forward_matmul_flops(model, SEQ, SEQ, causal=True)
    attention, again = counted.pop("attention"), counted["modulation"]
    if model.cross_attention:
        keys = {"latte": 2 * 4}.get(kind, 4)  # of each layer, of Latte of four frames in two
        again += 2 * TEXT * H * (48 + H) + (keys * 2 * TEXT * H * 2 * H if "cp" in plan else 0)
    assert played.flops("F") == {"gemm": sum(counted.values()) + again, "attention": pytest.approx(attention)}
    held = played.list_held(0)
    assert sum(param.total for param in held) == model.parameters
    parts = {
        "wq": "tp" in plan,
        "wo": "tp" in plan,
        "wup": "tp" in plan,
        "wnorm1.modulation": False,
        "wdown.gate": False,
    }
    for param in held:
        if (divided := parts.get(param.name.removeprefix("own.").removeprefix("branch."))) is not None:
            assert param.total == (2 if divided else 1) * param.size


@pytest.mark.parametrize("kind", ["dit", "flux", "wan"])
def test_gradients_of_vectors_are_sums_over_the_tokens_of_all_ranks(kind: str) -> None:
    """They are reduced with those of other weights, and not layer by layer."""
    played = run(kind, {"cp": 2}, gpus=2)
    modulating = [param for param in played.list_held(0) if "modulation" in param.name or "gate" in param.name]
    assert modulating and all(param.partial == ("cp",) for param in modulating)


def collectives(played: Played) -> list[str]:
    """Returns the tensors that the layers of the first stage communicate forward."""
    runs = [run for run in played.stages[0].unit_runs if run.name == "layer"]
    return [op.name for run in runs for op in run.fragment.forward if isinstance(op.work, Collective)]


def test_context_parallelism_moves_queries_keys_values_and_results_of_both_streams() -> None:
    plan = {"mesh": {"cp": 2}, "schemes": [{"use": "sequence/ulysses", "over": "cp"}]}
    joint = collectives(run("mmdit", plan, gpus=2, variants=()))
    assert joint == [f"all_to_all {name}" for name in ("q.all", "k.all", "v.all", "o")]
    assert not [name for name in collectives(run("wan", plan, gpus=2)) if "cross" in name or "context" in name]


def test_tensor_parallelism_gathers_and_sums_in_each_stream() -> None:
    played = run("mmdit", {"tp": 2, "sequence_parallel": True}, gpus=2, variants=())
    names = collectives(played)
    for stream in ("own", "branch"):
        its = [name.partition(" ")[0] for name in names if f" {stream}." in name]
        assert sorted(its) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_stages_pass_on_the_stream_and_the_text_that_layers_attend_to() -> None:
    assert run("flux", {"pp": 2}, gpus=2).stages[0].message_nbytes == 2 * SEQ * H
    assert run("wan", {"pp": 2}, gpus=2).stages[0].message_nbytes == 2 * SEQ * H


# ------------------------------------------------------------------------------------------ memory


def test_a_layer_saves_what_its_norms_vectors_and_products_read() -> None:
    """Of a token: inputs, norms and modulated norms of both blocks, queries, keys, values, result of attention and what
    both gates multiply; the MLP's two inner tensors; roots of both norms, sums of each head's softmax."""
    peaks = [run("dit", layers=layers).category_peak(0, "activations") for layers in (2, 3)]
    assert peaks[1] - peaks[0] == SEQ * (2 * (12 * H + 2 * F) + 4 * (2 + A))


SAVED: dict[str, tuple[float, dict[str, Any]]] = {
    "DiTTransformer2DModel": (1296.02, {"diffusion": ENDS, "seq": 256}),
    "SD3Transformer2DModel": (
        1359.60,
        {"diffusion": ENDS, "branches": [WORDS | {"tokens": 64}], "joint_attention": True},
    ),
    "PixArtTransformer2DModel": (
        1526.00,
        {
            **{"diffusion": ENDS, "cross_attention": True, "modulation": {"by": "table"}},
            "branches": [WORDS | {"tokens": 64, "input_bias": "mlp"}],
        },
    ),
}
"""Elements of two bytes that a layer with 64 elements and 4 heads saves for each token of 256 patches, and of 64 tokens
of a text where both pass it: storages that autograd keeps for diffusers 0.42 (`saved_tensors_hooks`, PyTorch 2.13,
bf16), of one layer more."""


@pytest.mark.parametrize("name", SAVED)
def test_a_layer_saves_what_autograd_does(name: str) -> None:
    """But for the mean of each norm, of which the reciprocal deviation is kept here."""
    elements, fields = SAVED[name]
    shape = SHAPE | {"seq": 320} | fields
    peaks = [play(shape | {"layers": layers}).category_peak(0, "activations") for layers in (3, 4)]
    tokens = 256 if fields.get("cross_attention") else shape["seq"]
    assert (peaks[1] - peaks[0]) / 2 / tokens == pytest.approx(elements, rel=4e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_given_back_and_recomputation_keeps_the_stream_alone(kind: str) -> None:
    variants = {"variants": ()} if "variants" in KINDS[kind] else {}
    plans: list[Any] = [{}, {"recompute": "full"}, {"recompute": "selective"}]
    played = [[run(kind, plan, layers=layers, **variants) for layers in (2, 3)] for plan in plans]
    for pair in played:
        assert [sum(nbytes for _, nbytes, _ in each.changes(0)) for each in pair] == [0, 0]
    kept, full, selective = (
        pair[1].category_peak(0, "activations") - pair[0].category_peak(0, "activations") for pair in played
    )
    tokens = SEQ - TEXT if load_model(describe(kind)).cross_attention else SEQ
    assert full == 2 * tokens * H < selective < kept


# ------------------------------------------------------------------------------------------ whole jobs


@pytest.mark.parametrize("name", ["dit-xl-2-675m", "black-forest-labs/FLUX.1-dev", "Wan-AI/Wan2.1-T2V-1.3B"])
def test_released_models_are_forecast(name: str) -> None:
    plan = {"mesh": {"dp": 8}, "schemes": [{"use": "data/fsdp", "over": "dp"}]}
    micro = 256 if name.startswith("dit") else 4
    forecast = simulate(describe_job(name, plan, 8) | {"batch": {"global": 8 * micro, "micro": micro}})
    assert forecast.step_time > 0 and 0.1 < forecast.mfu["causal"] < 0.6


def test_the_examples_of_the_page_are_released_models() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "model.md").read_text("utf-8")
    dit, flux = (
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "diffusion:" in block
    )
    assert load_job(dit).model == load_model({**dit["model"], "name": "custom"})
    assert load_model(dit["model"] | {"name": "dit-xl-2-675m"}) == load_model("dit-xl-2-675m")
    assert simulate(dit).step_time > 0
    assert load_model(flux["model"]).parameters == load_model("black-forest-labs/FLUX.1-dev").parameters


def test_an_answer_says_what_a_sample_is_and_what_runs_elsewhere() -> None:
    answer = simulate(describe_job(describe("flux"), {"pp": 2}, 2, batch=4))
    assert "a sample is 32 patches and 8 tokens of a text; the encoder of texts and that of images" in str(
        answer.assumed
    )
    assert f"conditions of a sample: not sent to later stages, nor is its gradient summed, {C} elem" in str(
        answer.assumed
    )
    (alone,) = [text for text in simulate(describe_job(describe("dit"))).assumed if "sample" in text]
    assert alone.startswith("a sample is 40 patches; the encoder of images (VAE) run")


def test_a_longer_sequence_has_more_patches_and_the_same_text() -> None:
    short, long = (run("flux", seq=seq) for seq in (SEQ, 2 * SEQ))
    counts = [forward_matmul_flops(load_model(describe("flux", seq=seq)), seq, seq, causal=True) for seq in (40, 80)]
    assert counts[1]["head"] / counts[0]["head"] == (80 - TEXT) / (40 - TEXT)
    assert long.flops("F")["gemm"] == sum(n for part, n in counts[1].items() if part != "attention")
    assert short.flops("F")["gemm"] == sum(n for part, n in counts[0].items() if part != "attention")


def test_latents_of_unknown_size_are_asked_for(tmp_path: Path) -> None:
    (flux,) = [config for config in RELEASED if config["name"] == "FLUX.1-dev"]
    config = {key: value for key, value in flux.items() if key not in ("sequence", "parameters", "products", "name")}
    (file := tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="the config does not say how large latents are"):
        load_model(str(file))
    model = load_model({"preset": str(file), "seq": 1024 + 512})
    assert (model.seq, count_patches(model, model.seq)) == (1536, 1024)


def test_products_of_vectors_are_over_samples() -> None:
    """A micro-batch of three samples: the products that make vectors have three rows."""
    played = play_job(describe_job(describe("dit")) | {"batch": {"global": 3, "micro": 3}})
    (layer,) = [run for run in played.stages[0].unit_runs if run.name == "layer"]
    works = {op.name: op.work for op in layer.fragment.forward if isinstance(op.work, Gemm)}
    assert {name: (work.m, work.n, work.k) for name, work in works.items() if "modulate" in name or "gate" in name} == {
        **{f"norm{i}.modulate": (3, 2 * H, C) for i in (1, 2)},
        **{f"{name}.gate": (3, H, C) for name in ("proj", "down")},
    }

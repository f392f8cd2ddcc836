"""Experts over a latent (Nemotron 3, ``moe_latent_size`` of Megatron-Core) and layers of multi-token prediction that
differ from the last layer: work, messages, parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator import load_job
from meshcast.simulator.formats.launch.convert import export_job, import_file
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.transformer import list_further_kinds
from tests.simulator.models.lowered import PLANS, forward_ops, play

MOE = {"experts": 8, "top_k": 2, "expert_ffn": 96, "shared_experts": 1, "shared_ffn": 64}
SHAPE: dict[str, Any] = {
    **{"layers": 2, "hidden": 256, "heads": 8, "vocab": 512, "seq": 128, "norm": "rmsnorm", "positions": "rope"},
    **{"gated": True, "tied": False, "name": "small"},
}
HYBRID: dict[str, Any] = SHAPE | {
    "layers": 4,
    "ssm": {"pattern": "ME*E", "heads": 8, "head_dim": 64, "state": 16, "groups": 2, "mtp_pattern": "*E"},
}


def with_latent(latent: int | None, **more: Any) -> dict[str, Any]:
    return SHAPE | {"moe": MOE | ({"latent": {"width": latent} | more} if latent else {})}


def sent_bytes(latent: int | None) -> list[int]:
    """Returns the bytes of the exchanges of a layer's experts."""
    works = [op.work for op in forward_ops(play(with_latent(latent), {"dp": 4, "ep": 4}, gpus=4, batch=4))]
    return [work.nbytes for work in works if isinstance(work, Collective) and "all_to_all" in str(work)]


def test_tokens_travel_to_experts_as_wide_as_their_latent() -> None:
    assert sent_bytes(None) == [2 * nbytes for nbytes in sent_bytes(128)] != []


def test_a_latent_as_wide_as_the_stream_adds_two_projections() -> None:
    """Parameters, FLOPs of the model and FLOPs that GPUs execute, forward and backward."""
    plain, latent = load_model(with_latent(None)), load_model(with_latent(256))
    normed = load_model(with_latent(256, norm=True))
    added = 2 * 2 * 256 * 256
    assert latent.parameters - plain.parameters == added
    assert normed.parameters - latent.parameters == 2 * 256
    flops = [sum(forward_matmul_flops(model, 128, 128, causal=True).values()) for model in (plain, latent)]
    assert flops[1] - flops[0] == 2 * 128 * added
    executed = [play(with_latent(width)).flops("F", "B", "W")["gemm"] for width in (None, 256)]
    assert executed[1] - executed[0] == 3 * 2 * 128 * added


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_compute_what_one_gpu_does(plan: str) -> None:
    """Tensor ranks project their share of the tokens, or all of them; nothing gets lost."""
    model = with_latent(128, norm=True)
    single, many = play(model, batch=8), play(model, PLANS[plan], gpus=8, batch=8)
    assert many.flops("F", "B", "W")["gemm"] >= single.flops("F", "B", "W")["gemm"]


def test_layers_of_multi_token_prediction_are_of_their_own_kind() -> None:
    """Those of a hybrid model have a pattern; those of others may be as a layer without experts."""
    join = 2 * 256 + 2 * 256 * 256
    hybrid = load_model(HYBRID | {"moe": MOE, "mtp": 2})
    alone = load_model(HYBRID | {"layers": 2, "moe": MOE, "ssm": HYBRID["ssm"] | {"pattern": "*E"}})
    assert [kind.block for kind in list_further_kinds(hybrid)] == ["*", "E"]
    assert hybrid.parameter_parts["mtp"] == 2 * (join + alone.every_layer_parameters())
    moe = MOE | {"first_dense": 1}
    like_last, like_first = (load_model(SHAPE | {"moe": moe, "mtp": 1} | more) for more in ({}, {"mtp_like": 0}))
    assert like_first.parameter_parts["mtp"] == join + like_first.layer_parameters()
    assert like_last.parameter_parts["mtp"] == join + like_last.layer_parameters(moe=True)
    for shape in (HYBRID | {"moe": MOE, "mtp": 2}, SHAPE | {"moe": moe, "mtp": 1, "mtp_like": 0}):
        both = shape, shape | {"mtp": 0, "mtp_like": None}
        counted = [forward_matmul_flops(load_model(each), 128, 128, causal=True) for each in both]
        products = [sum(parts.values()) - parts["attention"] - parts["scan"] for parts in counted]
        played = [play(each).flops("F")["gemm"] for each in both]
        assert played[0] - played[1] == products[0] - products[1] > 0


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (HYBRID | {"moe": MOE, "mtp": 1, "ssm": HYBRID["ssm"] | {"mtp_pattern": None}}, "ssm.mtp_pattern"),
        (SHAPE | {"mtp_like": 0}, "mtp_like"),
        (SHAPE | {"mtp": 1, "mtp_like": 2}, "mtp_like"),
        (SHAPE | {"moe": MOE | {"latent": {"norm": True}}}, "moe.latent.width"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ModelError) as error:
        load_model(fields)
    assert error.value.where == f"model.{where}"


def test_megatron_says_latents_and_depths_of_hybrid_models(tmp_path: Path) -> None:
    """A written script of a hybrid model with both is read as the same model."""
    relu = {"gated": False, "activation": "gelu", "positions": "none"}
    fields = HYBRID | {"moe": MOE | {"latent": {"width": 128}, "router_bias": True}, "mtp": 2} | relu
    job = load_job({"model": fields, "cluster": "dgx-h100:1", "framework": "megatron-core", "batch": {"global": 8}})
    text = export_job(job, "megatron", lambda data, folder: load_job(data, base=folder), lambda job: None).text
    assert "--moe-latent-size 128" in text and "ME*E/*E/*E" in text
    (path := tmp_path / "train.sh").write_text(text)
    assert load_job(import_file(read_launch_file(path)).job).model.model_dump() == job.model.model_dump() | {
        "name": "custom"
    }

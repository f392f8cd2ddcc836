"""Encoders with decoders that attend to them (T5): parameters, FLOPs, messages between stages, memory and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_gradients import sum_shared_gradients
from meshcast.simulator.ir.operators import Residual
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory
from meshcast.simulator.models.flops import causal, forward_matmul_flops, palm
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played, play_job
from tests.simulator.models.configs import ENCODER_DECODER_COUNTS, ENCODER_DECODERS
from tests.simulator.models.lowered import describe_job, play

H, A, D, F, V, INPUTS, TARGETS, BUCKETS = 32, 4, 16, 48, 128, 64, 32, 8
WIDE = A * D
MODEL: dict[str, Any] = {
    **{"layers": 2, "hidden": H, "heads": A, "head_dim": D, "ffn": F, "vocab": V, "seq": INPUTS + TARGETS},
    **{"norm": "rmsnorm", "positions": "none", "relative_buckets": BUCKETS, "cross_attention": True, "tied": True},
}
ENCODER = {"name": "encoder", "layers": 2, "tokens": INPUTS, "bidirectional": True, "final_norm": True}


PIPELINE = {"mesh": {"pp": 4}, "schemes": [{"use": "pipeline/1f1b", "over": "pp"}], "partition": [1, 1, 1, 1]}


def describe(**fields: Any) -> dict[str, Any]:
    """Returns the model with some changes; `encoder`: those of the encoder."""
    encoder = ENCODER | {"relative_buckets": BUCKETS} | fields.pop("encoder", {})
    return MODEL | fields | {"branches": [encoder]}


def run(plan: Any = None, gpus: int = 1, batch: int = 1, **fields: Any) -> Played:
    return play(describe(**fields), plan, gpus, batch)


# ------------------------------------------------------------------------------------------- the shape


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_parameters_are_those_of_the_modelling_code(name: str) -> None:
    assert from_config(ENCODER_DECODERS[name], name=name).parameters == ENCODER_DECODER_COUNTS[name]


@pytest.mark.parametrize(
    ("stated", "function"),
    [("relu", "relu"), ("gelu", "gelu"), ("gated-gelu", "gelu_new"), ("gated-relu", "relu"), ("gated-silu", "silu")],
)
def test_a_gelu_is_approximate_behind_a_gate_alone(stated: str, function: str) -> None:
    """As ``T5Config`` reads ``feed_forward_proj``."""
    model = from_config(ENCODER_DECODERS["google-t5/t5-base"] | {"feed_forward_proj": stated})
    assert (model.activation, model.gated) == (function, stated.startswith("gated"))


BART: dict[str, Any] = {
    **{"model_type": "bart", "d_model": H, "encoder_layers": 2, "encoder_attention_heads": A, "encoder_ffn_dim": F},
    **{"decoder_layers": 3, "decoder_attention_heads": A, "decoder_ffn_dim": F, "vocab_size": V},
    **{"max_position_embeddings": 48, "dropout": 0.1},
}


def test_dropout_of_scores_is_apart_from_that_of_states() -> None:
    """BART has either; unfused attention then has kernels for it: in each layer of the encoder, and twice in each of
    the decoder."""
    kernels = {}
    for scores in (0.0, 0.1):
        model = from_config(BART | {"attention_dropout": scores})
        assert (model.score_dropout, model.branches[0].score_dropout) == (scores > 0, scores > 0)
        unfused = {"framework": {"name": "megatron-core", "set": {"attention": "unfused"}}}
        played = play_job(describe_job(model.model_dump(exclude_unset=True)) | unfused)
        works = [(unit.count, op.work) for unit in played.stages[0].unit_runs for op in unit.fragment.forward]
        kernels[scores] = sum(count for count, work in works if isinstance(work, Memory) and work.what == "dropout")
    assert kernels == {0.0: 0, 0.1: 2 + 2 * 3}
    assert from_config(BART | {"dropout": 0.0}).score_dropout is False


@pytest.mark.parametrize(
    ("kind", "changes", "tokens"),
    [
        ("bigbird_pegasus", {"attention_type": "block_sparse", "num_random_blocks": 2}, (3 + 2 + 2) * 64),
        ("bigbird_pegasus", {"attention_type": "original_full"}, None),
        ("led", {"attention_window": [32, 32], "max_encoder_position_embeddings": 64}, 32),
    ],
)
def test_windows_and_blocks_of_an_encoder_are_chunks(kind: str, changes: dict[str, Any], tokens: int | None) -> None:
    model = from_config(BART | {"model_type": kind} | changes)
    assert (model.branches[0].attention_chunk, model.attention_chunk) == (tokens, None)


def test_windows_of_t5gemma_lie_on_both_sides_of_a_token_of_the_encoder() -> None:
    stack = {
        "num_hidden_layers": 4,
        "hidden_size": H,
        "num_attention_heads": A,
        "num_key_value_heads": 2,
        "head_dim": D,
    }
    stack |= {"intermediate_size": F, "vocab_size": V, "max_position_embeddings": 64, "sliding_window": 16}
    model = from_config({"model_type": "t5gemma", "encoder": stack, "decoder": stack, "vocab_size": V})
    (encoder,) = model.branches
    assert (encoder.attention_chunk, encoder.full_every, model.window, model.full_every) == (32, 2, 16, 2)
    wide = from_config({"model_type": "t5gemma", "encoder": stack | {"sliding_window": 32}, "decoder": stack})
    assert (wide.branches[0].attention_chunk, wide.branches[0].full_every) == (None, 0)
    assert (encoder.softcaps, model.softcaps) == (("attention",), ("attention", "logits"))


def test_means_of_blocks_are_keys_of_every_token() -> None:
    t5 = {"model_type": "longt5", "d_model": H, "d_ff": F, "num_layers": 2, "num_heads": A, "vocab_size": V}
    model = from_config(t5 | {"encoder_attention_type": "transient-global", "n_positions": 1024})
    assert model.branches[0].attention_chunk == 3 * 128 + 1024 // 16
    assert from_config(t5 | {"encoder_attention_type": "local"}).branches[0].attention_chunk == 3 * 128


def test_a_decoder_alone_holds_what_it_does_not_use() -> None:
    """``BartForCausalLM``: the weights of attention to an encoder are there, and nothing of them is computed."""
    model = from_config(BART | {"is_encoder_decoder": False})
    played = play_job(describe_job(model.model_dump(exclude_unset=True)))
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    plain = model.model_copy(update={"other": None})
    assert model.parameters - plain.parameters == 3 * (4 * H * (H + 1) + 2 * H)
    assert forward_matmul_flops(model, 48, 48, causal=True) == forward_matmul_flops(plain, 48, 48, causal=True)


def test_parameters_by_hand() -> None:
    """One table of the vocabulary, one of relative positions for each stack; a third norm in layers of a decoder."""
    model = load_model(describe())
    attention, mlp = 4 * H * WIDE, 2 * H * F
    encoder, decoder = 2 * (attention + mlp + 2 * H), 2 * (2 * attention + mlp + 3 * H)
    assert model.parameters == V * H + 2 * BUCKETS * A + encoder + decoder + 2 * H
    untied = load_model(describe(tied=False))
    assert untied.parameters - model.parameters == V * H
    assert sum(param.size for param in run().list_held(0)) == model.parameters
    assert sum(param.size for param in run(tied=False).list_held(0)) == untied.parameters


def test_flops_by_hand() -> None:
    """Of a sequence of inputs and targets: the encoder attends to all inputs, the decoder to targets and inputs."""
    model = load_model(describe())
    seq = INPUTS + TARGETS
    parts = forward_matmul_flops(model, seq, seq, causal=True)
    assert parts["qkv"] == 2 * H * WIDE * (2 * 3 * INPUTS + 2 * 3 * TARGETS + 2 * TARGETS + 2 * 2 * INPUTS)
    assert parts["proj"] == 2 * H * WIDE * (2 * INPUTS + 2 * 2 * TARGETS)
    assert parts["mlp"] == 2 * 2 * H * F * 2 * seq
    pairs = 2 * INPUTS * INPUTS + 2 * TARGETS * TARGETS / 2 + 2 * TARGETS * INPUTS
    assert parts["attention"] == 4 * WIDE * pairs
    assert parts["head"] == 2 * TARGETS * H * V
    assert causal(model, seq) == pytest.approx(3 * sum(parts.values()) / seq)
    attention = 2 * INPUTS * INPUTS + 2 * TARGETS * TARGETS + 2 * TARGETS * INPUTS
    assert palm(model, seq) == pytest.approx(6 * model.active_parameters_at(seq) + 12 * WIDE * attention / seq)


def test_kernels_do_the_flops() -> None:
    runs = run().stages[0].unit_runs
    works = [(unit.count, op.work) for unit in runs for op in unit.fragment.forward]
    products = sum(count * work.flops for count, work in works if isinstance(work, Gemm))
    attention = sum(count * work.flops for count, work in works if isinstance(work, Attention))
    parts = forward_matmul_flops(load_model(describe()), INPUTS + TARGETS, INPUTS + TARGETS, causal=True)
    assert products == sum(parts.values()) - parts["attention"]
    assert attention == parts["attention"]
    again = [(unit.count, op.work) for unit in runs for op in unit.fragment.backward]
    assert sum(count * work.flops for count, work in again if isinstance(work, Gemm)) == 2 * products


def test_layers_of_a_decoder_add_to_the_gradient_of_the_encoders_output() -> None:
    (layer,) = [unit for unit in run().stages[0].unit_runs if any("cross" in op.name for op in unit.fragment.forward)]
    (add,) = [op.work for op in layer.fragment.backward if op.name.startswith("dcontext")]
    assert isinstance(add, Memory) and (add.read, add.write) == (2 * 2 * INPUTS * H, 2 * INPUTS * H)


# ------------------------------------------------------------------------------------------------ memory


def test_the_output_of_the_encoder_is_in_memory_once() -> None:
    """Each further layer of a decoder keeps its own activations: keys and values of the inputs, but not the inputs."""
    peaks = [run(layers=layers).category_peak(0, "activations") for layers in (2, 3)]
    held = 2 * TARGETS * (6 * H + 3 * WIDE + WIDE + 2 * WIDE + 2 * F) + 2 * INPUTS * 2 * WIDE
    sums = 2 * 4 * A * TARGETS + 3 * 4 * TARGETS  # of both softmaxes, and roots of the norms
    assert peaks[1] - peaks[0] == held + sums


@pytest.mark.parametrize("plan", [{}, {"pp": 2}, PIPELINE, {"pp": 2, "schedule": "interleaved-1f1b", "chunks": 2}])
def test_memory_is_given_back(plan: dict[str, Any]) -> None:
    """What a device has at the end of a step is what it had at its begin."""
    gpus = plan.get("pp") or len(plan.get("partition", [0]))
    played = run(plan, gpus=gpus, batch=4)
    for device in range(gpus):
        assert sum(nbytes for _, nbytes, _ in played.changes(device)) == 0


def test_full_recomputation_keeps_the_targets_alone() -> None:
    peaks = [run({"recompute": "full"}, layers=layers).category_peak(0, "activations") for layers in (4, 6)]
    assert (peaks[1] - peaks[0]) / 2 == 2 * TARGETS * H


# --------------------------------------------------------------------------------------------- stages


def test_stages_of_a_decoder_pass_on_both() -> None:
    """The encoder sends its inputs; a stage of the decoder its targets and the output of the encoder."""
    played = run(PIPELINE, gpus=4)
    assert [stage.message_nbytes for stage in played.stages[:3]] == [
        2 * INPUTS * H,
        2 * INPUTS * H,
        2 * (TARGETS + INPUTS) * H,
    ]
    names = [[unit.name for unit in stage.unit_runs] for stage in played.stages]
    assert names == [["embedding", "layer"], ["layer", "projector"], ["decoder input", "layer"], ["layer", "ending"]]


def test_stages_hold_the_output_of_the_encoder() -> None:
    """A stage with layers of the decoder alone holds what it received until it has its gradient: INPUTS x H elements
    more than the layer itself, which the stage in front of it has in the unit that embeds the targets."""
    deep = {"mesh": {"pp": 4}, "schemes": [{"use": "pipeline/1f1b", "over": "pp"}], "partition": [1, 1, 1, 2]}
    short, long = (
        run(plan, gpus=4, layers=layers).category_peak(3, "activations") for plan, layers in ((PIPELINE, 2), (deep, 3))
    )
    held = 2 * TARGETS * (6 * H + 3 * WIDE + WIDE + 2 * WIDE + 2 * F) + 2 * INPUTS * 2 * WIDE
    held += 4 * TARGETS * (2 * A + 3)  # sums of both softmaxes, roots of the norms
    assert long - short == held


@pytest.mark.parametrize("tied", [True, False])
def test_stages_share_the_table_of_the_vocabulary(tied: bool) -> None:
    """Copies for the encoder, for the decoder and, tied, for the output layer; their gradients are summed."""
    played = run(PIPELINE, gpus=4, tied=tied)
    tables = [[param.name for param in params_of(stage) if param.total == V * H] for stage in played.stages]
    assert [len(names) for names in tables] == [1, 0, 1, 1]
    shared = sum_shared_gradients(played.plan, played.stages)
    assert [len(sums) for sums in shared] == ([1, 0, 1, 1] if tied else [1, 0, 1, 0])
    two = run({"pp": 2}, gpus=2, tied=tied)
    tables = [[param.name for param in params_of(stage) if param.total == V * H] for stage in two.stages]
    assert [len(names) for names in tables] == ([1, 1] if tied else [1, 2])
    assert [len(sums) for sums in sum_shared_gradients(two.plan, two.stages)] == [1, 1]
    whole = run(tied=tied)
    assert len([param for param in params_of(whole.stages[0]) if param.total == V * H]) == (1 if tied else 2)


@pytest.mark.parametrize("tied", [True, False])
def test_an_encoder_of_sounds_has_no_table(tied: bool) -> None:
    """The decoder has one, and a tied output layer on another stage a copy."""
    sounds = {"input_width": 12, "convolutions": [{"channels": H, "kernel": 3, "stride": 2}]}
    played = run(PIPELINE, gpus=4, tied=tied, encoder=sounds)
    tables = [[param.name for param in params_of(stage) if param.total == V * H] for stage in played.stages]
    assert [len(names) for names in tables] == [0, 0, 1, 1]
    shared = sum_shared_gradients(played.plan, played.stages)
    assert [len(sums) for sums in shared] == ([0, 0, 1, 1] if tied else [0, 0, 0, 0])
    whole, model = run(tied=tied, encoder=sounds), load_model(describe(tied=tied, encoder=sounds))
    assert sum(param.size for param in whole.list_held(0)) == model.parameters
    assert model.parameters - load_model(describe(tied=tied)).parameters == (3 * 12 + 1) * H


@pytest.mark.parametrize("tied", [True, False])
def test_an_encoder_may_have_a_table_of_its_own(tied: bool) -> None:
    """Its gradient is summed with no other; a tied output layer shares that of the decoder."""
    model = load_model(describe(cross_attention="own-tables", tied=tied))
    assert model.parameters - load_model(describe(tied=tied)).parameters == V * H
    played = run(PIPELINE, gpus=4, tied=tied, cross_attention="own-tables")
    tables = [[param.name for param in params_of(stage) if param.total == V * H] for stage in played.stages]
    assert [len(names) for names in tables] == [1, 0, 1, 1]
    shared = sum_shared_gradients(played.plan, played.stages)
    assert [len(sums) for sums in shared] == ([0, 0, 1, 1] if tied else [0, 0, 0, 0])
    two = run({"pp": 2}, gpus=2, tied=tied, cross_attention="own-tables")
    assert [len(sums) for sums in sum_shared_gradients(two.plan, two.stages)] == [0, 0]


@pytest.mark.parametrize("behind", [True, False])
def test_the_stream_of_a_decoder_goes_on_from_norms_that_are_behind_additions(behind: bool) -> None:
    units = run(norm_residual=behind).plan.model_parts.stage(0).units
    (layer,) = [unit for unit in units if any(operator.name == "residual.cross" for operator in unit.operators())]
    streams = [operator.ins[0].name for operator in layer.operators() if isinstance(operator, Residual)]
    assert streams == (["norm1", "norm.cross", "norm2"] if behind else ["x", "middle", "crossed"])


def test_chunks_on_one_device_share_its_table() -> None:
    plan = {"pp": 2, "schedule": "interleaved-1f1b", "chunks": 2}
    played = run(plan, gpus=2, batch=4, tied=False)
    tables = [[param.name for param in params_of(stage) if param.total == V * H] for stage in played.stages]
    assert [len(names) for names in tables] == [1, 0, 0, 1]
    assert [len(sums) for sums in sum_shared_gradients(played.plan, played.stages)] == [0, 0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(sequence_parallel: bool) -> None:
    """Each layer of a decoder gathers the output of the encoder, or sums its gradient."""
    played = run({"tp": 2, "sequence_parallel": sequence_parallel}, gpus=2)
    layer = next(unit for unit in played.stages[0].unit_runs if any("cross" in op.name for op in unit.fragment.forward))
    found = [op.work.operation for op in layer.fragment.forward if isinstance(op.work, Collective)]
    back = [op.work.operation for op in layer.fragment.backward if isinstance(op.work, Collective)]
    if sequence_parallel:
        assert (found.count("all_gather"), found.count("reduce_scatter")) == (4, 3)
        assert back.count("reduce_scatter") == 4
    else:
        assert found == ["all_reduce"] * 3 and back == ["all_reduce"] * 4
    shards = {param.name: param.total // param.size for param in params_of(played.stages[0])}
    assert {shards[f"wcross.{name}"] for name in "qkvo"} == {2}


def test_t5_is_forecast() -> None:
    model = from_config(ENCODER_DECODERS["google-t5/t5-base"], name="t5-base").model_dump(exclude_unset=True)
    forecast = simulate(describe_job(model, {"tp": 2, "pp": 2, "dp": 2}, 8) | {"batch": {"global": 128, "micro": 4}})
    assert forecast.step_time > 0 and 0 < forecast.mfu["causal"] < 0.5


def test_lengths_are_fields() -> None:
    model = from_config(ENCODER_DECODERS["google-t5/t5-base"])
    assert (model.seq, model.branches[0].tokens, model.trunk_tokens(model.seq)) == (626, 512, 114)
    longer = load_model({**describe(), "seq": 256})
    assert longer.trunk_tokens(256) == 192

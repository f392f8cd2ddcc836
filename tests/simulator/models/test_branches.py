"""Models with branches: their parameters, FLOPs and units, and which of their layers lie on which stage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.flops import causal, forward_matmul_flops, mosaic_mfu, needed_flops, palm, six_n
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import LayerKind, Model
from meshcast.simulator.plan.partition import layers_of_graph

PLAIN = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "positions": "learned"}


def branched(count: int = 2, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """A model with equal branches."""
    return {**PLAIN, "branches": [{"layers": layers}] * count, **changes}


EQUAL = branched()
"""Two equal branches of two layers, a trunk of four."""


def test_parameters_of_a_model_with_equal_branches() -> None:
    """An embedding, positions and layers for each branch; the trunk, final norm and output layer once."""
    model = load_model(EQUAL)
    plain = load_model({**PLAIN, "tied": False, "seq": 8})
    assert not model.tied and [one.position_rows for one in model.branches] == [8, 8]
    more = plain.parameter_parts["embedding"] + plain.parameter_parts["positions"]
    assert model.parameters == plain.parameters + more + 2 * 2 * plain.layer_parameters()
    assert model.active_parameters == plain.parameters + 2 * plain.layer_parameters()
    assert (model.encoder_layers, len(model.every_layer)) == (4, 8)


def test_kinds_begin_anew_in_every_branch() -> None:
    model = load_model(branched(layers=3, window=4, full_every=2))
    assert [model.kind(i).local for i in model.every_layer] == [*[True, False, True] * 2, *[True, False] * 2]
    assert model.kinds == {LayerKind(False, True): 6, LayerKind(False, False): 4}


@given(count=st.integers(2, 4), depth=st.integers(1, 3), seq=st.integers(1, 12), window=st.none() | st.integers(1, 20))
def test_flops_of_branches_are_those_of_models_of_their_own(
    count: int, depth: int, seq: int, window: int | None
) -> None:
    """Each branch does the work of a chain of its layers over its part of a sequence, the trunk over all."""
    fields = {**PLAIN, "seq": count * seq, "window": window, "full_every": 0}
    model = Model(**fields, branches=[{"layers": depth}] * count)
    bare = {**fields, "tied": False}
    one, trunk = Model(**{**bare, "layers": depth, "seq": seq}), Model(**bare)
    for halved in (True, False):
        found = forward_matmul_flops(model, 12 * count * seq, count * seq, halved)
        each = forward_matmul_flops(one, 12 * seq, seq, halved)
        own = forward_matmul_flops(trunk, 12 * count * seq, count * seq, halved)
        wanted = {part: own[part] + (count * each[part] if part != "head" else 0) for part in found}
        assert found == pytest.approx(wanted)
    assert causal(model, model.seq) == pytest.approx(
        3 * sum(forward_matmul_flops(model, 1, model.seq, causal=True).values())
    )
    assert six_n(model, model.seq) == pytest.approx(6 * model.active_parameters)
    attention = 12 * 32 * (4 * min(model.seq, window or 99) + depth * min(seq, window or 99))
    assert palm(model, model.seq) == pytest.approx(six_n(model, model.seq) + attention)
    if window is None:
        assert mosaic_mfu(model, model.seq) == pytest.approx(palm(model, model.seq))


def test_a_model_without_branches_embeds_before_its_layers() -> None:
    model = load_model(PLAIN)
    assert model.tied and model.position_rows == 16 and model.encoder_layers == 0
    assert [unit.name for unit in Architecture(model, 1, 16, 64).units] == ["embedding", "layer", "ending"]


def test_the_units_of_a_model_with_equal_branches() -> None:
    blocks = Architecture(load_model(EQUAL), 1, 16, 64)
    whole = blocks.stage(blocks.model.every_layer, True, True)
    assert [(unit.name, unit.count) for unit in whole.units] == [
        *[("embedding", 1), ("layer", 2)] * 2,
        *[("join", 1), ("layer", 4), ("ending", 1)],
    ]
    assert len(list(blocks.units)) == 5
    assert [unit.name for unit in blocks.stage(range(1, 3), False, False).units] == ["layer", "embedding", "layer"]
    assert whole.units[0].children is whole.units[2].children, "equal branches share their modules"
    assert whole.units[0].residual_out is not None and whole.units[0].residual_out.dims["s"].size == 8
    assert whole.units[4].residual_out is not None and whole.units[4].residual_out.dims["s"].size == 16


# ----------------------------------------------------------------------------------------------- heterogeneous branches

CLIP_LAYER = 4 * 1024 * 1024 + 4 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 2 * 2 * 1024
"""Parameters of a layer of ViT-L: attention and MLP with biases, two norms."""


def vision(**changes: Any) -> dict[str, Any]:
    """The vision tower of llava-1.5-7b, as a branch."""
    (tower, _) = load_model("llava-1.5-7b").branches
    own = tower.model_dump(exclude={"name", "seq", "trunk_hidden", "mla"})
    return {**own, **changes}


def test_clip_counted_by_hand() -> None:
    """ViT-L/14 at 224 pixels has 303,179,776 parameters without the projection to the space of the loss (304 M with
    it); at 336 pixels and without the last norm 303,505,408."""
    model = {"layers": 1, "hidden": 1024, "heads": 16, "vocab": 10, "seq": 300}
    of_224 = vision(tokens=256, position_rows=257, final_norm=True, projector="none")
    (tower, _) = load_model({**model, "branches": [of_224, {"layers": 0}]}).branches
    patches, places, norms = 3 * 14 * 14 * 1024, 257 * 1024, 2 * 2 * 1024
    assert tower.parameters == patches + 1024 + places + norms + 24 * CLIP_LAYER == 303_179_776
    assert tower.parameters + 1024 * 768 == 303_966_208


def test_llava_counted_by_hand() -> None:
    """Llama 2, the tower, and a projector of two layers with biases."""
    model = load_model("llava-1.5-7b")
    tower, text = model.branches
    projector = (1024 + 1) * 4096 + (4096 + 1) * 4096
    assert tower.projector_parameters == projector == 20_979_712
    assert text.parameters == 32000 * 4096 and (text.seq, tower.seq) == (1472, 576)
    assert model.parameters == 6_738_415_616 + 303_505_408 + projector
    assert (tower.norm, tower.gated, tower.bidirectional, tower.mlp_bias) == ("layernorm", False, True, True)
    assert (text.norm, text.gated, text.bidirectional, text.mlp_bias) == ("rmsnorm", True, False, False)


def test_flops_of_heterogeneous_branches_by_hand() -> None:
    """Patches and projector are GEMMs; a bidirectional token attends to all tokens of its branch."""
    model, alone = load_model("llava-1.5-7b"), load_model({"preset": "llama2-7b", "seq": 2048})
    found, trunk = (forward_matmul_flops(one, 2048, 2048, causal=True) for one in (model, alone))
    assert found["inputs"] == 2 * 576 * 588 * 1024
    assert found["projector"] == 2 * 576 * (1024 * 4096 + 4096 * 4096)
    assert found["attention"] - trunk["attention"] == pytest.approx(24 * 4 * 576 * 576 * 1024)
    assert found["mlp"] - trunk["mlp"] == 24 * 2 * 576 * 2 * 1024 * 4096
    assert found["head"] == trunk["head"]
    halves = {**vision(), "bidirectional": False}
    causal_model = load_model({"preset": "llava-1.5-7b", "branches": [halves, {"layers": 0}]})
    halved = forward_matmul_flops(causal_model, 2048, 2048, causal=True)
    assert halved["attention"] - trunk["attention"] == pytest.approx(24 * 2 * 576 * 576 * 1024)


@pytest.mark.parametrize("convention", ["palm", "causal"])
def test_a_frozen_branch_needs_a_third_of_its_flops(convention: str) -> None:
    trained = load_model("llava-1.5-7b")
    frozen = load_model({"preset": "llava-1.5-7b", "branches": [vision(frozen=True), {"layers": 0}]})
    saved = needed_flops(convention, trained, 2048) - needed_flops(convention, frozen, 2048)
    attention = 24 * 4 * 576 * 576 * 1024
    products = 24 * 2 * 576 * (CLIP_LAYER - 9 * 1024 - 4096) + 2 * 576 * 588 * 1024
    parameters = 2 * 576 * 303_505_408
    wanted = 2 * ((parameters if convention == "palm" else products) + attention)
    assert saved * 2048 == pytest.approx(wanted)


def test_what_a_branch_states_is_not_inherited() -> None:
    """Nor is what follows from it: widths of heads from the hidden size, biases from the norm."""
    gpt = {
        **PLAIN,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "ffn": 100,
        "window": 5,
        "norm": "rmsnorm",
        "qkv_bias": True,
    }
    model = load_model(
        {**gpt, "branches": [{"layers": 1}, {"layers": 1, "hidden": 64}, {"layers": 1, "input_width": 9}]} | {"seq": 15}
    )
    same, wide, inputs = model.branches
    assert (same.kv_heads, same.head_dim, same.ffn, same.window, same.qkv_bias) == (2, 6, 100, 5, True)
    assert (wide.kv_heads, wide.head_dim, wide.ffn, wide.heads, wide.projector) == (4, 16, 256, 4, "linear")
    assert (inputs.window, inputs.bidirectional, inputs.ffn, inputs.projector) == (None, True, 100, "none")
    assert load_model(model.model_dump(exclude_unset=True)) == model, "a model read again is the same"


def test_units_of_heterogeneous_branches() -> None:
    """Tokens of a branch without layers are embedded where the trunk begins."""
    model = load_model({"preset": "llava-1.5-7b", "layers": 2, "branches": [vision(layers=3), {"layers": 0}]})
    units = Architecture(model, 1, 2048, 32000).stage(model.every_layer, True, True).units
    assert [(unit.name, unit.count) for unit in units] == [
        *(("embedding", 1), ("layer", 3), ("projector", 1), ("join", 1), ("layer", 2), ("ending", 1)),
    ]
    join = units[3]
    assert join.residual_in is not None and join.residual_out is not None
    assert (join.residual_in.dims["s"].size, join.residual_out.dims["s"].size) == (576, 2048)
    assert [operator.name for operator in join.operators()] == ["branch1.embedding", "join", "leaving"]


def test_experts_are_of_the_trunk() -> None:
    moe = {"experts": 4, "top_k": 1, "expert_ffn": 8, "first_dense": 1}
    model = load_model({**PLAIN, "moe": moe, "branches": [{"layers": 2}, {"layers": 0}]})
    assert [model.is_moe(layer) for layer in model.every_layer] == [False] * 3 + [True] * 3


# -------------------------------------------------------------------------------------------------- partition

BEFORE: list[tuple[int, ...]] = [(), (0,), (), (2,), (1, 3), (4,)]
"""Two branches of two stages and a trunk of two."""


def test_layers_of_a_graph() -> None:
    model = load_model(EQUAL)
    assert layers_of_graph("even", model, BEFORE, "x", list) == [1, 1, 1, 1, 2, 2]
    assert layers_of_graph((1, 1, 1, 1, 4, 0), model, BEFORE, "x", list) == [1, 1, 1, 1, 4, 0]
    assert layers_of_graph("even", model, [()], "x", list) == [8]
    assert layers_of_graph("even", load_model(PLAIN), [(), (0,)], "x", list) == [2, 2]
    one = load_model({**PLAIN, "branches": [{"layers": 2}, {"layers": 0}]})
    assert layers_of_graph("even", one, [(), (0,)], "x", list) == [3, 3], "one branch of layers and a trunk are a chain"
    heterogeneous = load_model({**PLAIN, "branches": [{"layers": 1, "tokens": 6}, {"layers": 0}, {"layers": 6}]})
    assert layers_of_graph("even", heterogeneous, [(), (), (1,), (2,), (0, 3)], "x", list) == [1, 2, 2, 2, 4]


@pytest.mark.parametrize(
    ("changes", "partition", "words"),
    [
        (branched(layers=3), "even", "the 3 layers of branch 1 must divide evenly over its 2 stages"),
        ({"layers": 5}, "even", "the 5 layers of the trunk must divide evenly over its 2 stages"),
        ({}, "ends-as-layers", "evenly, or by a list"),
        ({}, (1, 1, 1, 1, 4), "2 on 2, 2 on 2, 4 on 2 stages"),
        ({}, (2, 0, 1, 1, 2, 2), "no stage but the last is without"),
        ({}, (1, 1, 2, 1, 1, 2), "2 on 2, 2 on 2, 4 on 2 stages"),
        ({}, (1, 1, 1, 1, 5, -1), "2 on 2, 2 on 2, 4 on 2 stages"),
        (branched(4), "even", "joins 2 branches of stages, and custom has 4 branches of layers"),
        ({"branches": []}, "even", "joins 2 branches of stages, and custom is a chain of layers"),
    ],
)
def test_layers_that_do_not_fit_a_graph_are_refused(changes: dict[str, Any], partition: Any, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        layers_of_graph(partition, load_model(EQUAL | changes), BEFORE, "a graph", list)
    assert words in str(refused.value) and refused.value.remedy

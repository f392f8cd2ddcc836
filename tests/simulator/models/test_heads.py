"""Heads in place of logits of the vocabulary: classes, rewards and vectors of sequences.

A line of heads.jsonl is a type of `transformers` 5.24 with the parameters of its classes on the meta device, for the
config of types.jsonl and ``num_labels`` of 2, or as stated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.played import Played, play_job
from tests.simulator.models.lowered import describe_job
from tests.simulator.models.test_types import TYPES

HEADS = [json.loads(line) for line in Path(__file__).with_name("heads.jsonl").read_text().splitlines()]
CONFIGS = {config["model_type"]: config for config in reversed(TYPES)}
CLASSES = [
    (row["model_type"], head, row.get("num_labels", 2), parameters)
    for row in HEADS
    for head, parameters in row.items()
    if head.startswith("For")
]


@pytest.mark.parametrize(("kind", "head", "labels", "parameters"), CLASSES)
def test_parameters_are_those_that_transformers_makes(kind: str, head: str, labels: int, parameters: int) -> None:
    config = CONFIGS[kind] | {"architectures": [f"Some{head}"], "num_labels": labels}
    assert from_config(config).parameters == parameters + config["corrections"]


@pytest.mark.parametrize(
    ("kind", "head", "products"),
    [
        ("bert", "ForSequenceClassification", 45_903_645_696),
        ("roberta", "ForSequenceClassification", 45_903_645_696),
        ("roberta", "ForTokenClassification", 45_903_249_408),
        ("qwen3", "ForSequenceClassification", 5_566_281_809_920),
        ("qwen3", "ForTokenClassification", 5_566_281_809_920),
    ],
)
def test_products_are_those_that_torch_counts(kind: str, head: str, products: int) -> None:
    """Of a forward pass over 256 tokens (`FlopCounterMode`): BERT has the head of one token, Qwen3 that of all."""
    model = from_config(CONFIGS[kind] | {"architectures": [f"Some{head}"]})
    assert sum(forward_matmul_flops(model, 256, 256, causal=False).values()) == products


SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 4096, "seq": 32, "tied": False}


def run(output: dict[str, Any] | None, batch: int = 4, **fields: Any) -> Played:
    """Plays a micro-batch of so many sequences."""
    job = describe_job(SHAPE | fields | ({"output": output} if output else {}))
    return play_job(job | {"batch": {"global": batch, "micro": batch}})


def test_classes_of_tokens_as_many_as_the_vocabulary_are_its_logits() -> None:
    """In time, memory and FLOPs as an output layer of a language model that is not tied."""
    classes, language = (
        simulate({"model": SHAPE | more, "cluster": "dgx-h100:1", "batch": {"global": 16}})
        for more in ({"output": {"classes": 4096, "pool": "none"}}, {})
    )
    assert classes.step_time == language.step_time and classes.mfu == language.mfu
    assert classes.peak_allocated == language.peak_allocated


OUTPUTS: list[dict[str, Any]] = [
    {"output": {"classes": 1}},
    {"output": {"classes": 3, "pool": "none"}, "head": ["bias"]},
    {"output": {"classes": 3, "pool": "token"}, "head": ["dense", "bias"]},
    {"output": {"classes": 3, "pool": "mean"}},
    {"output": {"classes": None}},
    {"output": {"pool": "token"}, "head": ["dense"]},
]


@pytest.mark.parametrize("part", OUTPUTS, ids=str)
def test_a_device_has_the_parameters_and_products_that_are_counted(part: dict[str, Any]) -> None:
    """The backward pass has twice the products; those of pairs are beside those that the model counts."""
    model, played = load_model(SHAPE | part), run(**part)
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    counted = forward_matmul_flops(model, 4 * 32, 32, causal=True)
    counted.pop("attention")
    works = [
        [(unit.count, op.work) for unit in played.stages[0].unit_runs for op in ops(unit.fragment)]
        for ops in (lambda fragment: fragment.forward, lambda fragment: fragment.backward)
    ]
    products = [
        sum(count * work.flops for count, work in some if isinstance(work, Gemm) and work.what == "linear")
        for some in works
    ]
    assert products == [sum(counted.values()), 2 * sum(counted.values())]
    pairs = [work.flops for some in works for _, work in some if isinstance(work, Gemm) and work.what == "similarity"]
    assert pairs == ([2 * 2 * 2 * 64] * 3 if model.output and model.output.classes is None else [])


def test_one_logit_of_a_sequence_takes_the_work_of_the_vocabulary_away() -> None:
    """A reward model is a language model whose output layer has one column; the loss reads one number a sequence."""
    reward, language = run({"classes": 1}), run(None)
    assert load_model(SHAPE).parameters - load_model(SHAPE | {"output": {"classes": 1}}).parameters == 64 * 4095
    flops = [played.flops("F")["gemm"] for played in (language, reward)]
    assert flops[0] - flops[1] == 2 * 4 * 32 * 64 * 4095
    (loss,) = [
        op.work
        for unit in reward.stages[0].unit_runs
        for op in unit.fragment.backward
        if isinstance(op.work, Memory) and op.work.what == "cross-entropy"
    ]
    assert loss.read == 6 * 4


def test_the_state_of_one_token_has_a_gradient_of_all() -> None:
    """Where states are pooled first, a kernel writes the gradient of all of them, most of it zero; where logits are, of
    these."""
    written = {}
    for pool in ("token", "logits"):
        units = run({"classes": 8, "pool": pool}).stages[0].unit_runs
        (written[pool],) = [op.work.write for unit in units for op in unit.fragment.backward if op.name == "dpool"]  # type: ignore[union-attr]
    assert written == {"token": 2 * 4 * 32 * 64, "logits": 2 * 4 * 32 * 8}


def test_no_memory_of_the_vocabulary_is_needed() -> None:
    """Logits of the vocabulary, their softmax and gradient are the peak of a small model, and the vectors of a sequence
    take as good as nothing."""
    peaks = {
        name: run(output, batch=16).category_peak(0, "logits")
        for name, output in {"language": None, "reward": {"classes": 1}, "vectors": {"pool": "mean"}}.items()
    }
    assert peaks["language"] >= 4 * 16 * 32 * 4096
    assert peaks["vectors"] == 4 * 8 * 8 and peaks["reward"] == 4 * 16


def test_an_encoder_without_a_head_is_trained_for_vectors() -> None:
    """``BertModel``, as sentence-transformers trains it: mean of states, no head for masked tokens."""
    model = from_config(CONFIGS["bert"] | {"architectures": ["BertModel"]})
    assert model.output is not None and (model.output.pool, model.head) == ("mean", ())
    masked = from_config(CONFIGS["bert"])
    assert masked.parameters - model.parameters == 768 * 769 + 2 * 768 + 30522
    assert from_config(CONFIGS["gpt_neox"] | {"architectures": ["GPTNeoXModel"]}).output is None


def test_layers_of_multi_token_prediction_are_of_the_vocabulary() -> None:
    config = CONFIGS["minimax_m2"] | {"num_mtp_modules": 3}
    assert from_config(config).mtp == 3
    assert from_config(config | {"architectures": ["MiniMaxM2ForSequenceClassification"]}).mtp == 0
    with pytest.raises(ModelError, match="logits of the vocabulary"):
        load_model(SHAPE | {"output": {"classes": 1}, "mtp": 1})

"""Tensor parallelism of Hugging Face Transformers: what it sends beside Megatron-LM's, and that nothing overlaps."""

from __future__ import annotations

from typing import Any

from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Collective, Op
from meshcast.simulator.program.program import one_of

TOKENS, HIDDEN, VOCAB = 2 * 4096, 4096, 128256


def job(use: str, **framework: Any) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": "dgx-h100:1",
        "batch": {"global": 2, "micro": 2, "sequence": 4096},
        "framework": {"name": "hf-trainer", "set": framework},
        "plan": {"mesh": {"tp": 8}, "schemes": [{"use": use, "over": "tp"}]},
    }


def units(use: str) -> list[list[Op]]:
    """Forward and backward ops of the embedding, of a layer, and of the output layer with the loss."""
    (stage,) = lower_stages(resolve_plan(load_job(job(use))))[0]
    return [run.fragment.forward + run.fragment.backward for run in one_of(stage).unit_runs]


def sent(ops: list[Op]) -> list[tuple[str, int]]:
    return [(op.work.operation, op.work.nbytes) for op in ops if isinstance(op.work, Collective)]


def test_every_colwise_layer_reduces_the_gradient_of_its_input() -> None:
    """Two forward; of queries, keys and values and of gate and up backward."""
    embedding, layer, end = units("tensor/transformers")
    activation = ("all_reduce", 2 * TOKENS * HIDDEN)
    assert sent(layer) == [activation] * (2 + 3 + 2)
    assert sent(units("tensor/megatron")[1]) == [activation] * 4
    assert sent(embedding) == []
    assert sent(end) == [("all_gather", 2 * TOKENS * VOCAB), activation]


def test_it_waits_where_megatron_overlaps() -> None:
    """All it sends is exposed, so the framework's overlap of gradients changes nothing."""
    found = [simulate(job("tensor/transformers", overlap={"gradients": on})).step_time for on in (False, True)]
    assert found[0] == found[1]
    megatron = [simulate(job("tensor/megatron", overlap={"gradients": on})).step_time for on in (False, True)]
    assert found[0] > megatron[0] > megatron[1]


def test_the_loss_holds_whole_logits() -> None:
    whole, sharded = (simulate(job(use)).peak_allocated for use in ("tensor/transformers", "tensor/megatron"))
    assert whole - sharded > 7 / 8 * 2 * TOKENS * VOCAB

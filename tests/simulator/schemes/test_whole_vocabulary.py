"""A loss over the whole vocabulary on every tensor rank: what is gathered for it, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.program.program import one_of

TOKENS, HIDDEN, VOCAB = 2 * 4096, 4096, 128256


def job(tensor: str, whole: bool) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": "dgx-h100:1",
        "batch": {"global": 2, "micro": 2, "sequence": 4096},
        "framework": {"name": "torchtitan", "set": {"loss": {"whole_vocabulary": whole}}},
        "plan": {"mesh": {"tp": 8}, "schemes": [{"use": f"tensor/{tensor}", "over": "tp"}]},
    }


def test_transformers_gathers_the_logits_in_any_case() -> None:
    asked, unasked = (simulate(job("transformers", on)) for on in (True, False))
    assert (asked.step_time, asked.peak_allocated) == (unasked.step_time, unasked.peak_allocated)


def sent(tensor: str, whole: bool) -> list[tuple[str, int]]:
    """Collectives of the output layer and the loss."""
    (stage,) = lower_stages(resolve_plan(load_job(job(tensor, whole))))[0]
    fragment = one_of(stage).unit_runs[-1].fragment
    works = [op.work for op in fragment.forward + fragment.backward]
    return [(work.operation, work.nbytes) for work in works if isinstance(work, Collective)]


@pytest.mark.parametrize("tensor", ["megatron", "megatron-sp"])
def test_logits_are_gathered_in_place_of_three_sums(tensor: str) -> None:
    """Backward nothing is sent for it: a rank slices its shard out of the gradient of all logits."""
    sums = [("all_reduce", 4 * TOKENS)] * 3
    sharded, whole = sent(tensor, False), sent(tensor, True)
    logits = ("all_gather", 2 * TOKENS * VOCAB)
    assert [work for work in sharded if work in sums] == sums
    assert sorted(whole) == sorted([work for work in sharded if work not in sums] + [logits])


@pytest.mark.parametrize("tensor", ["megatron", "megatron-sp"])
def test_every_rank_holds_all_logits_and_takes_longer(tensor: str) -> None:
    sharded, whole = (simulate(job(tensor, on)) for on in (False, True))
    assert whole.peak_allocated - sharded.peak_allocated > 7 / 8 * 2 * TOKENS * VOCAB
    assert whole.step_time > sharded.step_time

"""Words of other programs in messages about words that are not valid."""

from __future__ import annotations

import pytest

from meshcast.hardware.documents.explain import MAX_UNKNOWN
from meshcast.hardware.documents.other_words import MEANINGS, WORDS, find_meaning
from meshcast.hardware.errors import MeshcastError, nearest
from meshcast.simulator import load_job
from meshcast.simulator.ir.registry import scheme_names
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.job import Precision
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.job.shorthand import SCHEDULES_ELSEWHERE
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import MoEShape

JOB = {"model": "gpt2", "cluster": "dgx-h100:1"}


def refusal(**job: object) -> str:
    with pytest.raises(MeshcastError) as caught:
        load_job({**JOB, **job})
    return str(caught.value)


def test_every_meaning_is_a_word_of_a_job() -> None:
    keys = {
        field.alias or key
        for kind in (ShortPlan, Batch, Precision, Model, MoEShape)
        for key, field in kind.model_fields.items()
    }
    valid = keys | set(framework_names()) | {name.partition("/")[2] for name in scheme_names()}
    assert WORDS.keys() <= valid
    assert not MEANINGS.keys() & keys - {"seq"}, "a word that is valid needs no meaning"
    assert len(MEANINGS) == sum(len(others.split()) for others in WORDS.values()), "one meaning for each word"


@pytest.mark.parametrize(
    ("word", "valid", "meaning"),
    [
        ("vpp", ["chunks", "pp"], "chunks"),
        ("--tensor-model-parallel-size", ["tp"], "tp"),
        ("parallelism.tensor_parallel_degree", ["tp"], "tp"),
        ("Num-Layers", ["layers"], "layers"),
        ("vpp", ["tp"], None),
        ("nonsense", ["tp"], None),
    ],
)
def test_a_word_means_a_valid_one(word: str, valid: list[str], meaning: str | None) -> None:
    assert find_meaning(word, valid) == meaning
    assert (
        meaning is None
        or f"It is {meaning!r} here" in nearest(word, valid)
        or f"Did you mean {meaning!r}" in nearest(word, valid)
    )


def test_messages_name_the_key_that_was_meant() -> None:
    assert "It is 'zb-h1' here" in refusal(plan={"pp": 2, "schedule": "zero-bubble"})
    assert set(SCHEDULES_ELSEWHERE.values()) <= {name.removeprefix("pipeline/") for name in scheme_names()}
    assert "It is 'megatron-core' here" in refusal(framework="megatron-lm")
    assert "batch.gbs: no such key. It is 'global' here" in refusal(batch={"gbs": 8})


def test_all_wrong_keys_are_told_at_once() -> None:
    text = refusal(plan={"vpp": 2, "tensor_parallel_size": 8, "sheduling": 1})
    assert "plan.vpp: no such key, nor are " in text and "It is 'chunks' here" in text
    assert "tensor_parallel_size (it is 'tp' here)" in text and "sheduling (did you mean 'schedule'?)" in text
    many = refusal(plan={f"key_{number}": 1 for number in range(MAX_UNKNOWN + 4)})
    assert f"key_{MAX_UNKNOWN} and 3 more. " in many

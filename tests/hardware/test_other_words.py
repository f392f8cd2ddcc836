"""Words of other programs in messages about words that are not valid."""

from __future__ import annotations

import pytest

from meshcast.hardware.documents.other_words import MEANINGS, WORDS, find_meaning
from meshcast.hardware.errors import nearest
from meshcast.simulator.ir.registry import scheme_names
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.job import Precision
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.job.shorthand import SCHEDULES_ELSEWHERE
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import MoEShape

JOB = {"model": "gpt2", "cluster": "dgx-h100:1"}


def test_every_meaning_is_a_word_of_a_job() -> None:
    keys = {
        field.alias or key
        for kind in (ShortPlan, Batch, Precision, Model, MoEShape)
        for key, field in kind.model_fields.items()
    }
    valid = keys | set(framework_names()) | {name.partition("/")[2] for name in scheme_names()}
    assert WORDS.keys() <= valid
    assert set(SCHEDULES_ELSEWHERE.values()) <= {name.removeprefix("pipeline/") for name in scheme_names()}
    assert not MEANINGS.keys() & keys - {"seq"}, "a word that is valid needs no meaning"
    assert len(MEANINGS) == sum(len(others.split()) for others in WORDS.values()), "one meaning for each word"


@pytest.mark.parametrize(("word", "valid", "meaning"), [
    ("vpp", ["chunks", "pp"], "chunks"), ("--tensor-model-parallel-size", ["tp"], "tp"),
    ("parallelism.tensor_parallel_degree", ["tp"], "tp"), ("Num-Layers", ["layers"], "layers"), ("vpp", ["tp"], None),
    ("nonsense", ["tp"], None),
])  # fmt: skip
def test_a_word_means_a_valid_one(word: str, valid: list[str], meaning: str | None) -> None:
    assert find_meaning(word, valid) == meaning
    assert (
        meaning is None
        or f"It is {meaning!r} here" in nearest(word, valid)
        or f"Did you mean {meaning!r}" in nearest(word, valid)
    )

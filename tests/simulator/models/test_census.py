"""Every type of causal language models of ``transformers`` 5.24 and how it is read: by a reader (types.jsonl), by a
trace of its code (traced.jsonl), or not at all, which says why.

A line of traced.jsonl is the config that this release writes for a type by default, with `changes`, of which `source`
says where they are from: `parameters` of the model that it builds on the meta device, `products` of the traced pass
over 128 tokens by the formulas of torch's `FlopCounterMode`, with experts that get the same number of tokens, `left`,
the share of these that no part of meshcast describes, and `states`, by what share more or less the elements of the
states of a recurrence have than the products of its chunks, all others included (lara_mini). `make test` reads a tenth
of the traces as they were recorded; with torch and transformers `make test-all` makes all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import SUPPORTED, from_config
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.trace.reading import read_record
from meshcast.simulator.models.trace.record import Record
from tests.draws import drawn

HERE = Path(__file__).parent
RECORDS = HERE / "traces"
CAUSAL = (HERE / "causal_types.txt").read_text("utf-8").split()
RELEASE = "5.24"

Row = dict[str, Any]


def read_rows(name: str) -> dict[str, Row]:
    """The rows of a table by their types, of several the first."""
    rows = [json.loads(line) for line in (HERE / name).read_text("utf-8").splitlines()]
    return {row["model_type"]: row for row in reversed(rows)}


READ, LISTED = read_rows("types.jsonl"), read_rows("traced.jsonl")
TRACED = {kind: row for kind, row in LISTED.items() if "refused" not in row}
RECORDED = sorted(set(TRACED) & {path.stem for path in RECORDS.glob("*.json")})


def forecast(model: Model) -> float:
    """The step time of a small job of a model."""
    seq = model.seq if model.branches else min(model.seq, 2048)
    job = {"model": model, "cluster": "dgx-h100:4", "batch": {"global": 32, "sequence": seq}, "plan": {"zero": 3}}
    return simulate(job).step_time


def describe(record: Record, row: Row) -> Model:
    """The model of a record, which has the parameters and the products of a row."""
    model = Model.model_validate({"name": row["model_type"], **read_record(record, 2048)})
    assert model.parameters == record.parameters == row["parameters"]
    parts = forward_matmul_flops(model, record.tokens, record.tokens, causal=False)
    assert record.flops == row["products"]
    assert sum(parts.values()) / row["products"] - 1 == pytest.approx(row.get("states", 0), abs=1e-3)
    assert parts["other"] / sum(parts.values()) == pytest.approx(row["left"], abs=1e-4)
    return model


def test_nearly_all_types_are_read_or_traced() -> None:
    how = {kind: "reader" if kind in SUPPORTED else "trace" if kind in TRACED else "" for kind in CAUSAL}
    refused = [kind for kind, words in how.items() if not words]
    assert len(CAUSAL) == len(set(CAUSAL)) == 196
    assert all(LISTED[kind]["refused"] for kind in refused)
    assert len(CAUSAL) - len(refused) >= 192


def test_a_tenth_of_the_traces_is_recorded() -> None:
    assert len(RECORDED) >= len(TRACED) / 10


@pytest.mark.parametrize("kind", RECORDED)
def test_a_recorded_trace_has_the_parameters_and_products_of_its_type_and_a_forecast(kind: str) -> None:
    record = Record.from_json((RECORDS / f"{kind}.json").read_text("utf-8"))
    assert forecast(describe(record, TRACED[kind])) > 0


@pytest.mark.parametrize("kind", drawn(READ, keep=32))
def test_a_type_with_a_reader_has_a_forecast(kind: str) -> None:
    assert forecast(from_config(READ[kind])) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRACED)
def test_a_type_without_a_reader_is_traced_as_the_table_says(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="types without a reader are traced by its code")
    pytest.importorskip("torch", reason="a model is traced by torch")
    if not transformers.__version__.startswith(RELEASE):
        pytest.skip(f"default configs are those of transformers {RELEASE}")
    from meshcast.simulator.models.trace.folding import fold
    from meshcast.simulator.models.trace.transformers_types import trace_type

    settings = transformers.AutoConfig.for_model(kind, **TRACED[kind].get("changes", {}))
    config = json.loads(settings.to_json_string(use_diff=False)) | {"model_type": kind}
    assert forecast(describe(fold(trace_type(config, "model_type")), TRACED[kind])) > 0


@pytest.mark.slow
def test_the_table_has_all_causal_types() -> None:
    transformers = pytest.importorskip("transformers", reason="it says which types there are")
    if not transformers.__version__.startswith(RELEASE):
        pytest.skip(f"the table is of transformers {RELEASE}")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(CAUSAL) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

"""Models that are traced: recorded passes read without torch, and passes that run where torch and transformers are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator import simulate
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.trace import source
from meshcast.simulator.models.trace.reading import read_record
from meshcast.simulator.models.trace.record import Record

RECORDS = Path(__file__).parent / "traces"
"""Records of passes, and the configs that they are of, where a reader reads the same."""

PLAN = {"tp": 4, "pp": 2, "dp": 2}


def read(name: str) -> tuple[Record, Model]:
    record = Record.from_json((RECORDS / f"{name}.json").read_text("utf-8"))
    return record, Model.model_validate({"name": name, **read_record(record, 4096)})


def configs() -> dict[str, dict[str, Any]]:
    """The configs by their type."""
    lines = (RECORDS / "configs.jsonl").read_text("utf-8").splitlines()
    return {config["model_type"]: config for config in map(json.loads, lines)}


def forecast(model: Model, recompute: str) -> tuple[float, float]:
    """The step time and the largest peak of a model."""
    job = {"model": model, "cluster": "dgx-h100:2", "batch": {"global": 16, "micro": 1, "sequence": 4096}}
    report = simulate({**job, "plan": {**PLAN, "recompute": recompute}})
    return report.step_time, max(peak.total for peak in report.play.peaks)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDS.glob("*.json")))
def test_parameters_of_a_trace_are_those_of_the_module(name: str) -> None:
    record, model = read(name)
    assert model.parameters == record.parameters


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_traced_model_has_the_products_of_its_pass(name: str) -> None:
    record, model = read(name)
    assert sum(forward_matmul_flops(model, record.tokens, record.tokens, False).values()) == record.flops


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_next"])
def test_a_traced_model_is_forecast_as_the_model_that_is_read(name: str, recompute: str) -> None:
    config = json.loads(
        (RECORDS / "configs.jsonl").read_text("utf-8").splitlines()[["llama", "mixtral", "qwen3_next"].index(name)]
    )
    traced, expected = read(name)[1], from_config(config)
    assert traced.parameters == expected.parameters
    assert forecast(traced, recompute) == pytest.approx(forecast(expected, recompute), rel=0.01)


def test_a_norm_before_the_layers_is_of_embeddings() -> None:
    record = read("llama")[0]
    norm = next(step for step in record.outside.steps if step.step == "norm")
    before = replace(record, outside=replace(record.outside, steps=(norm, *record.outside.steps)))
    assert [read_record(each, 4096)["embedding_norm"] for each in (record, before)] == [False, True]


def test_a_module_without_layers_is_refused() -> None:
    record = Record(128, 0, (), (), read("llama")[0].outside)
    with pytest.raises(ModelError, match="no list of modules"):
        read_record(record, 4096)


def test_what_no_part_describes_is_named() -> None:
    report = simulate(
        {
            "model": {**SMALL, "other": {"modules": ["mystery"], "parameters": 1000, "flops": 2000.0}},
            "cluster": "dgx-h100:1",
            "batch": {"global": 8},
        }
    )
    assert any("mystery" in text for text in report.assumed)


SMALL: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 32000, "seq": 4096}


def test_a_variant_without_changes_changes_nothing() -> None:
    model = load_model({**SMALL, "variants": [{"numbers": [1, 3]}]})
    plain = load_model(SMALL)
    assert model.parameters == plain.parameters
    assert forecast(model, "full") == forecast(plain, "full")


def test_variants_count_their_own_parameters_and_products() -> None:
    model, plain = load_model({**SMALL, "variants": [{"numbers": [0], "ffn": 8192}]}), load_model(SMALL)
    more = 2 * 1024 * 4096
    assert model.parameters - plain.parameters == more + 4096  # a bias, too
    flops = [forward_matmul_flops(each, 1024, 1024, True) for each in (model, plain)]
    assert flops[0]["mlp"] - flops[1]["mlp"] == 2 * 1024 * more


def test_variants_name_layers_once() -> None:
    with pytest.raises(ModelError, match=r"variants\[1\].numbers"):
        load_model({**SMALL, "variants": [{"numbers": [0]}, {"numbers": [0]}]})


def test_a_part_that_a_variant_lacks_stays_away_when_fields_are_read_again() -> None:
    blocks = {"pattern": "M-", "heads": 2, "head_dim": 4, "state": 4, "groups": 1}
    model = load_model({**SMALL, "layers": 2, "ssm": blocks, "variants": [{"numbers": [1], "ssm": None}]})
    again = load_model(model.model_dump(exclude_unset=True))
    assert again == model and again.variants[0].ssm is None


# ---------------------------------------------------------------------------------------------- what is run


def test_a_type_without_a_reader_says_what_would_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source, "PACKAGES", ("torch", "no_such_transformers"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "without-reader"}))
    with pytest.raises(ModelError, match=r"meshcast\[trace\]"):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("kind", ["/etc/x", "../../x", "**", "[x", "a\0b", "a" * 5000, "\ud800"])
def test_a_record_is_a_file_of_its_folder_whatever_a_config_says(kind: str) -> None:
    name = source.name_config({"model_type": kind})
    assert re.fullmatch(r"[\w.-]{21,81}", name) and list(Path().glob(f"{name}-*.json")) == []
    assert name != source.name_config({"model_type": kind + "_"})


def test_a_kept_trace_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "without-reader", "max_position_embeddings": 512}
    name = source.name_config(config)
    folder = source.traces_folder()
    folder.mkdir(parents=True)
    (folder / f"{name}-2.13-5.24.json").write_text((RECORDS / "llama.json").read_text("utf-8"))
    monkeypatch.setattr(source, "PACKAGES", ("no_such_torch",))
    model = from_config(config)
    assert (model.parameters, model.seq) == (read("llama")[1].parameters, 512)


@pytest.mark.slow
def test_a_module_of_a_package_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="a module is traced by torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_model({"module": "tests.simulator.models.traced_module:build", "seq": 128})
    assert (model.layers, model.heads, model.ffn, model.positions) == (2, 4, 1024, "learned")
    assert model.parameters == 1000 * 256 + 512 * 256 + 2 * 256 + 2 * (12 * 256 * 256 + 13 * 256)


@pytest.mark.slow
def test_transformers_are_traced_as_their_readers_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="types of transformers are traced by its code")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for each in configs().values():
        config = each | {"num_hidden_layers": 4, "layer_types": None}
        fields = source.trace_config(config, "config.json")
        assert fields is not None
        assert Model.model_validate(fields).parameters == from_config(config).parameters

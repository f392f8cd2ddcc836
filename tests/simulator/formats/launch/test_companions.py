"""What settings name: references to other settings, files of DeepSpeed by their names, configurations of xtuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.formats.launch.keys import nest
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.programs.swift import FILES as SWIFT
from meshcast.simulator.formats.launch.programs.xtuner import FILES as XTUNER
from meshcast.simulator.formats.launch.references import fill_references
from meshcast.simulator.formats.launch.table import Keys, Stated
from tests.draws import drawn
from tests.launch_files import LAUNCHES, import_launch, keys_of, read_launch, write_launch_text


def test_references_lead_to_what_they_name() -> None:
    values = {"a.b": "${..c}", "c": "${d}", "d": 4, "a.e": "${.b}", "f": "x${d}", "g": "${mul:${a.b}, ${d}}"}
    filled = fill_references({name: Stated(value, name) for name, value in values.items()})
    expected = {"a.b": 4, "c": 4, "d": 4, "a.e": 4, "f": "x4", "g": 16}
    assert {name: stated.value for name, stated in filled.items()} == expected


@pytest.mark.parametrize("value", ["${b}", "${nothing}", "${mul:two,3}", "${div:1,0}", "${oc.env:HOME}"])
def test_references_that_lead_nowhere_are_unknown(value: str) -> None:
    assert fill_references({"a": Stated(value, "a"), "b": Stated("${a}", "b")})["a"].unknown


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(configuration: str, deepspeed: str, **changes: Any) -> Keys:
    """Returns the job of `xtuner train`."""
    command = f"NPROC_PER_NODE=8 xtuner train {configuration} --deepspeed {deepspeed}\n"
    return keys_of(read_launch("any", name="run.sh", command=command, set=["model=llama3-8b"], **changes))


@pytest.mark.parametrize("name", drawn(SWIFT, keep=2))
def test_a_name_of_deepspeed_is_the_file_behind_it_in_ms_swift(name: str) -> None:
    nested = nest({f"file.{field}": value for field, value in SWIFT[name].items()}, "file")
    beside = read_launch("swift", settings={"deepspeed": "ds.json"}, files={"ds.json": nested})
    assert keys_of(read_launch("swift", settings={"deepspeed": name})) == keys_of(beside)


@pytest.mark.parametrize("name", drawn(XTUNER, keep=2))
def test_names_of_deepspeed_say_stage_and_offloading_in_xtuner(name: str) -> None:
    files = {"ds.json": {"zero_optimization": {"overlap_comm": True, **XTUNER[name]}}, "own.py": "{xtuner}"}
    assert train("own.py", "ds.json", files=files) == train("own.py", name)


@pytest.mark.parametrize(
    "name", ["llama2_7b_qlora_alpaca_e3", "llama2_7b_full_wizardlm_e1", "llama3_8b_instruct_full_alpaca_e3"]
)
def test_a_configuration_by_name_is_a_file_with_its_fields(name: str) -> None:
    recipe = load_recipes("xtuner").find(name)
    assert recipe is not None
    fields = {key: stated.value for key, stated in recipe.items()}
    written = write_launch_text({**LAUNCHES["xtuner"], "settings": fields})
    by_name = train(name, "deepspeed_zero3")
    assert by_name == train("own.py", "deepspeed_zero3", files={"own.py": written})
    assert by_name["train.mode"] == ("qlora" if "qlora" in name else "full")


def test_settings_of_another_trainer_are_idle() -> None:
    """Below a switch that is off, in NeMo-RL; of FSDP, where verl trains with Megatron-Core."""
    policy = import_launch(LAUNCHES["nemo-rl"]).findings.ignored
    assert "policy.megatron_cfg.tensor_model_parallel_size" in {entry.shown for entry in policy}
    name = "actor_rollout_ref.model.enable_gradient_checkpointing"
    actor = read_launch("verl", flags=f"actor_rollout_ref.actor.strategy=megatron {name}=True").findings.ignored
    assert {entry.shown: entry.why for entry in actor}[name] == "of Megatron-Core recompute_granularity says it"

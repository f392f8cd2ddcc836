"""What a job takes from the published recipes of its program, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.job.framework import framework_names, framework_recipe, load_framework
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.job.program_rules import broken_rules
from meshcast.simulator.job.recipe import Recipe, RecipeFacts, RecipeSetting, fill_plan, find_recipe, recipe_settings
from meshcast.simulator.loading.load import state_recipes

PROGRAMS = [name for name in framework_names() if framework_recipe(name)]


def make(framework: Any, plan: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"model": "llama3-8b", "cluster": "dgx-h100:2", "framework": framework, "plan": plan or {}, **keys}


def taken_by(job: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value, _ in load_job(job).taken}


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_of_recipes_are_traits_and_keys_of_plans(program: str) -> None:
    for setting in recipe_settings(program):
        assert setting.set or setting.plan, setting.source
        assert load_framework(program, setting.set) and setting.plan.keys() <= PLAN_KEYS.keys()
        assert setting.plan.keys().isdisjoint(("tp", "pp", "cp", "dp", "ep", "etp"))  # a user's own


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_takes_what_it_leaves_open_and_tells_it(program: str) -> None:
    loaded = load_job(make(program, {"tp": 2, "cp": 2}))
    told = [text for text in simulate(loaded).assumed if f"as recipes of {program}" in text]
    sources = {source for _, _, source in loaded.taken}
    assert len(sources) >= len(told) > 0
    assert load_job(make({"name": program, "recipe": False}, {"tp": 2, "cp": 2})) != loaded or program == "internevo"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_long_form_states_what_was_taken(program: str) -> None:
    loaded = load_job(make(program, {"tp": 2}))
    again = load_job(loaded.to_dict())
    assert again == loaded and again.taken == () and again.to_dict() == loaded.to_dict()
    opened = [value.key for value in loaded.taken if value.key.startswith("plan.")]
    assert load_job(state_recipes(make(program, {"tp": 2}), opened, Path())).taken == (), "another plan takes no more"


@pytest.mark.parametrize("framework", [{"name": "nemo", "recipe": False}, {"name": "nemo", "rules": False}])
def test_a_job_that_wants_no_recipe_has_the_defaults_of_the_code(framework: dict[str, Any]) -> None:
    loaded = load_job(make(framework, {"tp": 2}))
    assert loaded.taken == () and loaded.framework.overlap == load_framework("nemo").overlap
    assert load_job(loaded.to_dict()) == loaded
    assert "cp_scheme" not in taken_by({key: value for key, value in make("").items() if key != "framework"})


def test_what_a_job_states_stands() -> None:
    assert taken_by(make("nemo"))["gradients"] == "bf16"
    assert "gradients" not in taken_by(make("nemo", precision={"gradients": "fp32"}))
    loaded = load_job(make({"name": "nemo", "set": {"overlap": {"tp": False}}}, {"tp": 2}))
    assert not loaded.framework.overlap.tp and loaded.framework.gradients == "bf16"
    assert taken_by(make("torchtitan", {"zero": 0})) == {"plan.recompute": "operators"}
    assert taken_by(make("torchtitan", {"recompute": "none"})) == {"plan.fsdp": True}


def test_recipes_are_those_of_the_release() -> None:
    for release, gradients in (("24.07", "fp32"), ("25.02", "bf16")):
        assert load_job(make({"name": "nemo", "release": release})).framework.gradients == gradients


def test_recipes_know_a_model_by_its_sizes() -> None:
    """Whatever a model is called: its own recipe, and that of no model of other sizes."""
    named, renamed, wider = (
        taken_by(make("torchtitan", model={"preset": "llama3-405b", **changes}))
        for changes in ({}, {"name": "ours"}, {"name": "ours", "hidden": 8192})
    )
    assert named == renamed != wider


@pytest.mark.parametrize(("condition", "facts"), [
    ({"models": ["qwen3"]}, {"model": "Qwen3-30B-A3B"}), ({"experts": True}, {"experts": True}),
    ({"mixers": ["latent-attention"]}, {"mixer": "latent-attention"}), ({"gpus": ["gb200"]}, {"gpu": "gb200"}),
    ({"compute": ["mxfp8"]}, {"compute": "mxfp8"}), ({"modes": ["lora"]}, {"mode": "lora"}),
    ({"above": {"domain": 8}}, {"degrees": {"domain": 72}}), ({"at_most": {"pp": 1}}, {}), ({"since": "2025-11"}, {}),
])  # fmt: skip
def test_every_condition_of_a_setting_counts(condition: dict[str, Any], facts: dict[str, Any]) -> None:
    setting = RecipeSetting(source="a file of recipes", set={"regather": True}, **condition)
    other = RecipeFacts(month="2025-10", mode="full", degrees={"pp": 2})
    assert setting.is_for(RecipeFacts(**facts)) and not setting.is_for(other)
    assert RecipeSetting(source="a file of recipes", until="2025-11").is_for(other)
    assert not RecipeSetting(source="a file of recipes", until="2025-11").is_for(RecipeFacts())  # of the newest release


def test_a_stated_scheme_leaves_no_default_to_its_family() -> None:
    assert fill_plan({"zero": 2}, {"fsdp": True, "recompute": "full", "recompute_layers": 3}) == {
        "zero": 2,
        "recompute": "full",
        "recompute_layers": 3,
    }
    assert fill_plan(
        {"recompute": "full", "tp_scheme": "flux"}, {"recompute_layers": 3, "sequence_parallel": False}
    ) == {"recompute": "full", "tp_scheme": "flux"}
    later = RecipeSetting(source="a file of recipes", plan={"zero": 3})
    first = RecipeSetting(source="a file of recipes", plan={"fsdp": True, "recompute": "full"})
    assert Recipe(settings=(first, later)).plan == {"zero": 3, "recompute": "full"}


GB200 = {"model": "qwen3-30b-a3b", "cluster": {"gpu": "gb200", "gpus": 64}}
H100 = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100:2"}


@pytest.mark.parametrize(("key", "job", "change"), [
    ("overlap.tp", make("nemo", {"tp": 2}), "plan.sequence_parallel=false"),
    ("overlap.tp", make("torchtitan", {"tp": 8}, model="llama3.1-405b"), "framework.set.compile=false"),
    ("cuda_graphs", make("megatron-bridge", {"ep": 8}, **GB200), "plan.recompute=full"),
    ("plan.schedule", make({"name": "megatron-bridge", "release": "0.3"}, {"ep": 8}, **H100), "plan.recompute=full"),
    ("plan.schedule", make({"name": "megatron-bridge", "release": "0.3"}, {"ep": 8, "pp": 2, "chunks": 2}, **H100),
        "plan.chunks=1"),
])  # fmt: skip
def test_a_job_takes_nothing_that_its_program_refuses(key: str, job: dict[str, Any], change: str) -> None:
    assert key in taken_by(job)
    changed = load_job(job, [change])
    assert key not in [value.key for value in changed.taken] and broken_rules(changed) == []
    again = load_job(changed.to_dict())
    assert again == changed and broken_rules(again) == []


def test_a_launch_file_says_itself_what_it_sets(tmp_path: Path) -> None:
    script = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32"
    script += " --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1"
    script += " --global-batch-size 64 --tensor-model-parallel-size 2 --context-parallel-size 2 --bf16"
    (tmp_path / "train.sh").write_text(script)
    assert load_job(tmp_path / "train.sh").taken == () and find_recipe("megatron-core", RecipeFacts()).settings

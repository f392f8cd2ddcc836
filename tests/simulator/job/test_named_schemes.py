"""Keys of a plan in short form that name schemes, and those of units of FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.plan_keys import PLAN_KEYS, keys_alike
from meshcast.simulator.loading.load import load_job
from tests.jobs import MODELS

DENSE: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 4, "sequence": 4096},
}
EXPERTS = {**DENSE, "model": {"preset": "mixtral-8x7b", "layers": 4}}
ZERO_1, MEGATRON = "data/zero-1 over dp", "tensor/megatron-sp over tp"


def describe(entry: dict[str, Any]) -> str:
    """A scheme in words: its axes, then its options."""
    options = {key: value for key, value in entry.items() if key not in ("use", "over")}
    axes = [entry["over"]] if isinstance(entry.get("over"), str) else entry.get("over", [])
    return " ".join([entry["use"], *["over"] * bool(axes), *axes, *(f"{key}={options[key]}" for key in options)])


def stated(plan: dict[str, Any], job: dict[str, Any] = DENSE) -> tuple[str, list[str]]:
    """The mesh and the schemes of a plan in long form, in words."""
    long = load_job({**job, "plan": plan}).to_dict()["plan"]
    mesh = " ".join(f"{axis} {size}" for axis, size in long["mesh"].items())
    return mesh, [describe(entry) for entry in long["schemes"] if not entry["use"].startswith("pipeline/")]


@pytest.mark.parametrize(("plan", "mesh", "schemes"), [
    ({"cp": 4, "cp_scheme": "ulysses"}, "pp 1 dp 4 cp 4 tp 1", [ZERO_1, "sequence/ulysses over cp", MEGATRON]),
    ({"cp": 8, "cp_scheme": "wallfacer"}, "pp 1 dp 2 cp-1 2 cp-2 2 cp-3 2 tp 1",
        [ZERO_1, "sequence/wallfacer over cp-1 cp-2 cp-3", MEGATRON]),
    ({"cp_scheme": "ring"}, "pp 1 dp 16 tp 1", [ZERO_1, MEGATRON]),
    ({"tp": 4, "tp_scheme": "tensor/summa-2d"}, "pp 1 dp 4 tp-1 2 tp-2 2", [ZERO_1, "tensor/summa-2d over tp-1 tp-2"]),
    ({"tp": 8, "tp_scheme": "tesseract"}, "pp 1 dp 2 tp-1 2 tp-2 2 tp-3 2",
        [ZERO_1, "tensor/tesseract over tp-1 tp-2 tp-3"]),
    ({"tp": 4, "tp_scheme": "flux", "sequence_parallel": False}, "pp 1 dp 4 tp 4",
        [ZERO_1, "tensor/flux", "tensor/megatron over tp"]),
    ({"tp_scheme": "flux"}, "pp 1 dp 16 tp 1", [ZERO_1, MEGATRON]),
    ({"tp": 2, "dp_scheme": "zero-plus-plus"}, "pp 1 dp-1 2 dp-2 4 tp 2",
        ["data/zero-plus-plus over dp-1 dp-2", MEGATRON]),
    ({"pp": 2, "tp": 2, "order": "dp-pp-cp-tp", "dp_scheme": "byteps"}, "dp-1 2 dp-2 2 pp 2 tp 2",
        ["data/byteps over dp-1 dp-2", MEGATRON]),
    ({"dp_scheme": "mics", "shard": 4}, "pp 1 replicate 4 shard 4 tp 1",
        ["data/mics over shard replicate=replicate", MEGATRON]),
    ({"fsdp": True, "reshard": False, "unit": 2, "prefetch": 0}, "pp 1 dp 16 tp 1",
        ["data/fsdp over dp reshard=False unit=2 prefetch=0", MEGATRON]),
])  # fmt: skip
def test_a_named_scheme_gets_its_axes(plan: dict[str, Any], mesh: str, schemes: list[str]) -> None:
    assert stated(plan) == (mesh, schemes)
    assert forecast_step(load_job({**DENSE, "model": MODELS["gpt"], "batch": {"micro": 4}, "plan": plan})).step_time > 0


@pytest.mark.parametrize(("plan", "scheme"), [
    ({"ep": 4, "ep_scheme": "deepep"}, "expert/deepep over ep"),
    ({"tp": 2, "ep": 4, "etp": 2, "ep_scheme": "tutel"}, "expert/tutel over ep etp"),
    ({"ep_scheme": "deepep"}, MEGATRON),
    ({"ep_scheme": "scattermoe"}, "expert/scattermoe"),
    ({"ep": 4, "ep_scheme": {"use": "expert/deepep", "sms": 24}}, "expert/deepep over ep sms=24"),
])  # fmt: skip
def test_expert_schemes_are_over_the_axes_of_the_experts(plan: dict[str, Any], scheme: str) -> None:
    assert stated(plan, EXPERTS)[1][-1] == scheme


def test_a_scheme_is_named_with_its_options() -> None:
    ring, overlap = {"use": "ring", "balance": "striped"}, {"use": "async-tp", "directions": 2}
    schemes = [ZERO_1, "sequence/ring over cp balance=striped", "tensor/async-tp directions=2", MEGATRON]
    assert stated({"tp": 2, "tp_scheme": overlap, "cp": 2, "cp_scheme": ring})[1] == schemes
    fsdp = stated({"dp_scheme": {"use": "fsdp", "offload": True}, "unit": 2, "shard": 4})[1][0]
    assert {*fsdp.split()} >= {"data/fsdp", "offload=True", "unit=2", "replicate=replicate"}
    assert stated({"dp_scheme": {"use": "mics"}}) == stated({"dp_scheme": "mics"})
    plans = [{"tp": 2, "tp_scheme": {"use": "flux", "wave": wave}} for wave in (8, 132)]
    times = {forecast_step(load_job({**DENSE, "plan": plan})).step_time for plan in plans}
    assert len(times) == 2


def test_keys_that_choose_one_scheme_know_each_other_and_no_others() -> None:
    alike = {name: keys_alike(name) for name in PLAN_KEYS}
    assert alike["zero"] and alike["sequence_parallel"] and not alike["shard"]
    for name, names in alike.items():
        assert not names or (name in names and all(alike[other] == names for other in names))
        assert len({PLAN_KEYS[other].flat for other in names}) <= 1, "one place in the flat form"


def test_what_is_left_out_is_said_by_its_value_or_as_none() -> None:
    words = {name: key.words for name, key in PLAN_KEYS.items()}
    assert (words["offload"], words["recompute"], words["tp"]) == ("none", "`none`", "1")


def test_default_schemes_may_be_named() -> None:
    plan = {"tp": 2, "cp": 2, "ep": 4}
    named = {"tp_scheme": "megatron-sp", "cp_scheme": "all-gather", "ep_scheme": "all-to-all", "dp_scheme": "zero-1"}
    assert stated(plan, EXPERTS) == stated({**plan, **named}, EXPERTS)


def test_stages_name_schemes_of_their_own() -> None:
    stages = [{"tp": 4, "dp": 2, "tp_scheme": "summa-2d"}, {"tp": 4, "dp": 2, "tp_scheme": "megatron"}]
    plans = load_job({**DENSE, "plan": {"stages": stages}}).plan.stages
    assert [plan.schemes[-1].use for plan in plans] == ["tensor/summa-2d", "tensor/megatron"]


def test_a_file_of_an_order_is_a_schedule(tmp_path: Path) -> None:
    """`schedule: own.csv` is the scheme from-file, with its path from the job's folder."""
    (tmp_path / "own.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n")
    job = {"model": MODELS["gpt"], "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}}
    short, named = (
        load_job({**job, "plan": {"tp": 2, "pp": 2, "schedule": schedule}}, base=tmp_path).to_dict()
        for schedule in ("own.csv", {"use": "from-file", "path": "own.csv"})
    )
    assert short == named and short["plan"]["schemes"][0]["use"] == "pipeline/from-file"

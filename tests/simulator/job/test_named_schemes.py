"""Keys of a plan in short form that name schemes, and those of units of FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.plan_keys import PLAN_KEYS, keys_alike
from meshcast.simulator.loading.load import load_job

DENSE: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 4, "sequence": 4096},
}
EXPERTS = {**DENSE, "model": {"preset": "mixtral-8x7b", "layers": 4}}


def stated(plan: dict[str, Any], job: dict[str, Any] = DENSE) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The mesh and the schemes of a plan in long form."""
    found = load_job({**job, "plan": plan}).to_dict()["plan"]
    return found["mesh"], [one for one in found["schemes"] if not one["use"].startswith("pipeline/")]


ZERO_1, MEGATRON = {"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}


@pytest.mark.parametrize(("plan", "mesh", "schemes"), [
    ({"cp": 4, "cp_scheme": "ulysses"}, {"pp": 1, "dp": 4, "cp": 4, "tp": 1}, [ZERO_1, {"use": "sequence/ulysses",
        "over": "cp"}, MEGATRON]),
    ({"cp": 8, "cp_scheme": "wallfacer"}, {"pp": 1, "dp": 2, "cp-1": 2, "cp-2": 2, "cp-3": 2, "tp": 1}, [ZERO_1,
        {"use": "sequence/wallfacer", "over": ["cp-1", "cp-2", "cp-3"]}, MEGATRON]),
    ({"cp_scheme": "ring"}, {"pp": 1, "dp": 16, "tp": 1}, [ZERO_1, MEGATRON]),
    ({"tp": 4, "tp_scheme": "tensor/summa-2d"}, {"pp": 1, "dp": 4, "tp-1": 2, "tp-2": 2}, [ZERO_1,
        {"use": "tensor/summa-2d", "over": ["tp-1", "tp-2"]}]),
    ({"tp": 8, "tp_scheme": "tesseract"}, {"pp": 1, "dp": 2, "tp-1": 2, "tp-2": 2, "tp-3": 2}, [ZERO_1,
        {"use": "tensor/tesseract", "over": ["tp-1", "tp-2", "tp-3"]}]),
    ({"tp": 4, "tp_scheme": "flux", "sequence_parallel": False}, {"pp": 1, "dp": 4, "tp": 4}, [ZERO_1,
        {"use": "tensor/flux"}, {"use": "tensor/megatron", "over": "tp"}]),
    ({"tp_scheme": "flux"}, {"pp": 1, "dp": 16, "tp": 1}, [ZERO_1, MEGATRON]),
    ({"tp": 2, "dp_scheme": "zero-plus-plus"}, {"pp": 1, "dp-1": 2, "dp-2": 4, "tp": 2}, [{"use": "data/zero-plus-plus",
        "over": ["dp-1", "dp-2"]}, MEGATRON]),
    ({"pp": 2, "tp": 2, "order": "dp-pp-cp-tp", "dp_scheme": "byteps"}, {"dp-1": 2, "dp-2": 2, "pp": 2, "tp": 2},
        [{"use": "data/byteps", "over": ["dp-1", "dp-2"]}, MEGATRON]),
    ({"dp_scheme": "mics", "shard": 4}, {"pp": 1, "replicate": 4, "shard": 4, "tp": 1}, [{"use": "data/mics",
        "over": "shard", "replicate": "replicate"}, MEGATRON]),
    ({"fsdp": True, "reshard": False, "unit": 2, "prefetch": 0}, {"pp": 1, "dp": 16, "tp": 1}, [{"use": "data/fsdp",
        "over": "dp", "reshard": False, "unit": 2, "prefetch": 0}, MEGATRON]),
])  # fmt: skip
def test_a_named_scheme_gets_its_axes(plan: dict[str, Any], mesh: dict[str, int], schemes: list[Any]) -> None:
    assert stated(plan) == (mesh, schemes)
    assert list(stated(plan)[0]) == list(mesh)
    assert forecast_step(load_job({**DENSE, "plan": plan})).step_time > 0


def test_expert_schemes_are_over_the_axes_of_the_experts() -> None:
    assert stated({"ep": 4, "ep_scheme": "deepep"}, EXPERTS)[1][-1] == {"use": "expert/deepep", "over": "ep"}
    grid = stated({"tp": 2, "ep": 4, "etp": 2, "ep_scheme": "tutel"}, EXPERTS)[1][-1]
    assert grid == {"use": "expert/tutel", "over": ["ep", "etp"]}
    assert stated({"ep_scheme": "deepep"}, EXPERTS)[1] == [ZERO_1, MEGATRON]
    assert stated({"ep_scheme": "scattermoe"}, EXPERTS)[1][-1] == {"use": "expert/scattermoe"}


def test_a_scheme_is_named_with_its_options() -> None:
    plan = {
        "tp": 2,
        "tp_scheme": {"use": "async-tp", "directions": 2},
        "cp": 2,
        "cp_scheme": {"use": "ring", "balance": "striped"},
    }
    assert stated(plan)[1] == [
        {"use": "data/zero-1", "over": "dp"},
        {"use": "sequence/ring", "over": "cp", "balance": "striped"},
        {"use": "tensor/async-tp", "directions": 2},
        MEGATRON,
    ]
    assert stated({"ep": 4, "ep_scheme": {"use": "expert/deepep", "sms": 24}}, EXPERTS)[1][-1]["sms"] == 24
    fsdp = {"dp_scheme": {"use": "fsdp", "offload": True}, "unit": 2, "shard": 4}
    assert (
        stated(fsdp)[1][0].items() >= {"use": "data/fsdp", "offload": True, "unit": 2, "replicate": "replicate"}.items()
    )
    assert stated({"dp_scheme": {"use": "mics"}}) == stated({"dp_scheme": "mics"})
    one, two = (
        forecast_step(load_job({**DENSE, "plan": {"tp": 2, "tp_scheme": {"use": "flux", "wave": n}}})) for n in (8, 132)
    )
    assert one.step_time != two.step_time


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
    found = load_job({**DENSE, "plan": {"stages": stages}}).plan.stages
    assert [one.schemes[-1].use for one in found] == ["tensor/summa-2d", "tensor/megatron"]


def test_a_file_of_an_order_is_a_schedule(tmp_path: Path) -> None:
    """`schedule: own.csv` is the scheme from-file, with its path from the job's folder."""
    rows = ["0F0,0F1,,,0B0,0B1", ",1F0,1B0,1F1,1B1,"]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    job = {
        "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128},
        "cluster": "dgx-h100:1",
        "batch": {"global": 8, "micro": 1},
        "plan": {"tp": 2, "pp": 2, "schedule": "own.csv"},
    }
    short = load_job(job, base=tmp_path).to_dict()
    job["plan"]["schedule"] = {"use": "from-file", "path": "own.csv"}
    assert short == load_job(job, base=tmp_path).to_dict()
    assert short["plan"]["schemes"][0]["use"] == "pipeline/from-file"

"""Releases of a framework: which month they are of, and the traits of that time."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.job.framework import framework_generations, framework_names, framework_versions, load_framework
from meshcast.simulator.job.release import find_month, generations_of
from tests.draws import drawn

JOB: dict[str, Any] = {
    "model": "llama3.2-1b",
    "cluster": {
        "gpu": "h100-sxm",
        "gpus": 16,
        "gpus_per_node": 8,
        "inter": {"kind": "infiniband", "gbps_per_gpu": 400},
    },
    "batch": {"global": 64, "micro": 1, "sequence": 4096},
    "plan": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize(("release", "month"), [
    ("2023-06", "2023-06"), ("2023-06-28", "2023-06"), ("24.05", "2024-05"), ("25.02.01", "2025-02"),
    ("0.8", "2024-08"), ("core_r0.8.0", "2024-08"), ("v0.12", "2025-05"),
])  # fmt: skip
def test_a_release_is_a_month_a_container_or_a_version(release: str, month: str) -> None:
    assert find_month(release, framework_versions("megatron-core"), "release") == month


def test_releases_of_megatron_core_have_the_traits_of_their_time() -> None:
    """Months on either side of the commits that the profile cites."""

    def at(month: str) -> tuple[str, bool, bool, bool, bool, bool]:
        found = load_framework("megatron-core", release=month)
        overlap = found.overlap
        return (
            found.attention, overlap.pp, overlap.dp, overlap.updated_weights, found.dummy_gradients,
            found.scatter_gather_tensors_in_pipeline,
        )  # fmt: skip

    assert at("2022-12") == ("unfused", False, False, False, False, True)
    assert at("2023-01") == ("flash", False, False, False, False, True)
    assert at("2023-02") == ("flash", False, False, False, False, False)
    assert at("2023-10") == ("flash", False, False, False, False, False)
    assert at("2023-11") == ("flash", True, True, False, False, False)
    assert at("2023-12") == ("flash", True, True, True, False, False)
    assert at("2025-05") == ("flash", True, True, True, True, False)
    assert load_framework("megatron-core", release="2026-04") == load_framework("megatron-core")


def test_set_wins_over_the_traits_of_the_release() -> None:
    given = load_framework("megatron-core", {"attention": "flash", "overlap": {"pp": True}}, "2022-06")
    assert given.attention == "flash" and given.overlap.pp and not given.overlap.dp


def test_an_older_generation_wins_over_a_newer_one() -> None:
    entries = [
        {"until": month, "source": "commit of that month", "set": {"attention": month}}
        for month in ("2022-03", "2024-01", "2023-01")
    ]
    assert [each.until for each in generations_of(entries, "2022-01")] == ["2024-01", "2023-01", "2022-03"]
    assert [each.until for each in generations_of(entries, "2023-01")] == ["2024-01"]


@pytest.mark.parametrize("entry", [{"until": "2023"}, {"source": "blog"}, {"set": {}}, {"since": "2023-01"}])
def test_a_generation_that_says_too_little_is_refused(entry: dict[str, Any]) -> None:
    whole = {"until": "2023-01", "source": "commit of that month", "set": {"attention": "unfused"}}
    with pytest.raises(PlanError):
        generations_of([whole | entry], "2022-01")


def test_updated_weights_are_gathered_after_the_update_or_ahead_of_use() -> None:
    """Without overlap the all-gather of 2 bytes a parameter is exposed; with it behind the first forward passes."""

    def exposed(**overlap: bool) -> float:
        job = {**JOB, "plan": {"zero": 1}, "framework": {"name": "megatron-core", "set": {"overlap": overlap}}}
        return float(simulate(job).to_dict()["breakdown_s"]["exposed"]["dp"])

    ahead, after, none = exposed(), exposed(updated_weights=False), exposed(dp=False)
    assert ahead < after < none
    # A node receives half of the weights from the other one, 2 bytes each, at 8 x 400 Gb/s: 3.1 ms.
    fastest = 2 * load_job(JOB).model.parameters / 2 / (8 * 50e9)
    assert 0.8 * fastest < after - ahead < 2 * fastest
    assert exposed(dp=False, updated_weights=False) == none


def test_an_older_release_is_slower() -> None:
    def step(release: str | None) -> float:
        job = {**JOB, "framework": {"name": "megatron-core", "release": release}, "plan": {"tp": 2, "pp": 2, "zero": 1}}
        return float(simulate(job).step_time)

    assert step("2022-06") > step("2023-05") > step("2023-11") > step(None)


@pytest.mark.parametrize("name", drawn(framework_names(), keep=5))
def test_every_profile_forecasts_in_every_generation(name: str) -> None:
    for release in (None, *(each["until"] for each in framework_generations(name)), "2020-01"):
        model = {"preset": "llama3.2-1b", "layers": 4}
        answer = simulate({**JOB, "model": model, "framework": {"name": name, "release": release}})
        assert 0.02 < answer.step_time < 2


@pytest.mark.parametrize("name", framework_names())
def test_every_generation_changes_its_traits(name: str) -> None:
    for entry in framework_generations(name):
        newer = load_framework(name, release=entry["until"]).model_dump()
        for key, value in entry["set"].items():
            own = {k: newer[key][k] for k in value} if isinstance(value, dict) else newer[key]
            assert own != value, (name, entry["until"], key)


def test_a_profile_has_the_traits_of_its_base_but_not_its_history() -> None:
    nemo, core = load_framework("nemo"), load_framework("megatron-core")
    same = {"name", "title", "source"}
    assert nemo.model_dump(exclude=same) == core.model_dump(exclude=same)
    assert "0.8" not in framework_versions("nemo") and framework_generations("primus") == ()
    # The distributed Adam of Apex overlapped in NeMo before Megatron-Core's did.
    assert load_framework("nemo", release="2023-10").overlap.updated_weights
    assert not load_framework("megatron-core", release="2023-10").overlap.updated_weights


def test_the_engine_of_gpt_neox_is_that_of_deepspeed() -> None:
    neox, base = load_framework("gpt-neox"), load_framework("megatron-deepspeed")
    assert neox.launch_s == base.launch_s and neox.update.stale_gradients and not neox.overlap.dp
    assert neox.bucket.elements == 1.26e9 and (neox.regime, base.regime) == ("family", "program")


@pytest.mark.parametrize("name", ["megatron-core", "nemo"])
def test_older_releases_launch_more_slowly(name: str) -> None:
    times = [load_framework(name, {}, release).launch_s for release in ("2024-05", "2025-06", "2026-02", None)]
    assert times == [140e-6, 140e-6, 120e-6, 120e-6]

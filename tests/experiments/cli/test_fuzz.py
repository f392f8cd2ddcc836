"""Jobs with random slips: whatever is written, the answer is a forecast or one clear error."""

from __future__ import annotations

import copy
import json
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshcast.experiments.sweeps.jobs import forecast_lines
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from tests.fuzz.generate import ODD, places

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab": 96, "seq": 32}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "first_dense": 1, "capacity": 1.25}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 8}
FIGURE = {"value": 8, "kind": "assumed", "source": "a test"}
NODE = {
    "gpu": "a100-sxm-80",
    "gpus": FIGURE,
    "scale_up": {"link": "nvlink3", "domain": {**FIGURE, "value": 4}},
    "nics": {"link": "infiniband-hdr", "count": FIGURE, "rail_optimised": {**FIGURE, "value": True}},
}

JOBS: list[dict[str, Any]] = [
    {
        "id": "short",
        "model": {**MODEL, "gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm", "dropout": 0.1},
        "cluster": "dgx-h100:2",
        "framework": "torchtitan",
        "batch": {"global": 16, "micro": 1, "sequence": 32},
        "precision": "fp8-delayed",
        "plan": {"tp": 2, "pp": 2, "dp": 4, "cp": 1, "chunks": 2, "zero": 1, "recompute": "selective"},
        "run": {"tokens": 1e9, "price_per_gpu_hour": 2.5},
    },
    {
        "model": {**MODEL, "moe": EXPERTS, "window": 16, "full_every": 2, "mtp": 1},
        "cluster": {"gpu": "h100-sxm", "gpus": 16, "gpus_per_node": 8, "inter": {"kind": "roce", "gbps_per_gpu": 400}},
        "framework": {
            "name": "megatron-core",
            "release": "0.12",
            "set": {"overlap": {"dp": False}, "bucket": {"elements": 1000}, "rates": {"kernel": 1.1}, "launch_s": 1e-6},
        },
        "batch": {"global": 32, "micro": 2},
        "precision": {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32", "moments": "bf16"},
        "optimizer": "adam",
        "plan": {
            "mesh": {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
            "views": {"experts": {"edp": 2, "ep": 4, "etp": 1}},
            "schemes": [
                {"use": "pipeline/1f1b", "over": "pp"},
                {"use": "data/fsdp", "over": ["dp"]},
                {"use": "sequence/all-gather", "over": "cp"},
                {"use": "tensor/megatron-sp", "over": "tp"},
                {"use": "expert/all-to-all", "over": ["ep"]},
                {"use": "memory/recompute-selective", "modules": ["core_attn", "moe"]},
            ],
            "partition": [2, 2],
        },
    },
    {
        "model": {"preset": "gpt2-124m", "layers": 4, "mla": LATENT, "positions": "rope"},
        "cluster": {
            "groups": [{"node": NODE, "nodes": 2}, {"node": "dgx-h100", "nodes": 1}],
            "fabric": {"levels": [{"nodes": 2}, {"oversubscription": 2}], "hop_latency": {**FIGURE, "value": "1 us"}},
        },
        "plan": {"pp": 2, "schedule": "gpipe", "fsdp": True, "recompute": "full", "partition": "even"},
    },
]


@st.composite
def slipped(draw: st.DrawFn) -> Any:
    """A valid job with one to three slips in it."""
    job = copy.deepcopy(draw(st.sampled_from(JOBS)))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(job))
        if not found:
            break
        at, key = draw(st.sampled_from(found))
        slip = draw(st.sampled_from(["drop", "replace", "replace", "retype", "rename", "move", "scale", "double"]))
        if slip == "drop":
            del at[key]
        elif slip == "replace":
            at[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif slip == "retype":
            kinds = [str, lambda one: [one], lambda one: {"a": one}, lambda one: [one, one], repr, bool]
            at[key] = draw(st.sampled_from(kinds))(at[key])
        elif slip == "rename" and isinstance(at, dict):
            name, letter = str(key), draw(st.sampled_from(string.ascii_lowercase + "_ .é"))
            where = draw(st.integers(0, len(name)))
            at[name[:where] + letter + name[where + draw(st.integers(0, 1)) :]] = at.pop(key)
        elif slip == "move":
            other, name = draw(st.sampled_from(found))
            at[key] = (
                copy.deepcopy(other[name]) if name in (other if isinstance(other, dict) else range(len(other))) else 1
            )
        elif slip == "scale" and isinstance(at[key], int | float):
            at[key] = draw(
                st.sampled_from([at[key] * 2, at[key] * 3, at[key] + 1, at[key] - 1, -at[key], at[key] // 2])
            )
        elif slip == "double" and isinstance(at, list):
            at.insert(draw(st.integers(0, len(at))), copy.deepcopy(at[key]))
    return job


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """The file of a job with slips, of which some letters and lines are changed too."""
    job = draw(st.sampled_from(JOBS) if draw(st.booleans()) else slipped())
    flow = draw(st.sampled_from([None, True, False]))
    lines = yaml.safe_dump(job, sort_keys=False, allow_unicode=True, default_flow_style=flow).splitlines()
    for _ in range(draw(st.integers(0, 3))):
        i = draw(st.integers(0, len(lines) - 1))
        line = lines[i]
        at = draw(st.integers(0, len(line)))
        odd = draw(
            st.sampled_from([*"[]{}:,-#&*!|>'\"%@`?~ \t\0\r\x85\u2028é", "<<: ", "*a ", "&a ", "!!int ", "- ", "1e"])
        )
        kind = draw(st.sampled_from(["insert", "insert", "drop", "cut", "double", "indent", "swap"]))
        lines[i : i + 1] = {
            "insert": [line[:at] + odd + line[at:]],
            "drop": [],
            "cut": [line[:at]],
            "double": [line, line],
            "indent": [" " + line],
            "swap": [lines[at % len(lines)]],
        }[kind]
        if not lines:
            break
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    return "\n".join(lines).encode(encoding, "replace")


def check_answer(job: Any, base: Path, shared_work: SharedWork) -> None:
    """A forecast whose numbers are numbers, or an error that is one short line."""
    try:
        report = simulate(load_job(job, base=base), shared_work=shared_work).to_dict()
    except MeshcastError as error:
        assert error.where and error.rule and error.remedy
        assert "\n" not in str(error) and len(str(error)) < 1200, str(error)
        json.dumps(error.to_dict(), allow_nan=False)
        return
    json.dumps(report, allow_nan=False)
    assert report["step_time_s"] > 0


def fuzz(draws: int) -> None:
    """Asks for `draws` slipped jobs: as mappings, as lines of --jobs, and as files."""
    shared_work = SharedWork()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)

        @settings(max_examples=draws // 2, suppress_health_check=list(HealthCheck))
        @given(slipped())
        def mappings(job: Any) -> None:
            if isinstance(job, dict):
                check_answer(job, base, shared_work)
            (answer,) = forecast_lines([json.dumps(job)], "jobs.jsonl", base)
            assert "error" in answer or answer["step_time_s"] > 0

        @settings(max_examples=draws // 2, suppress_health_check=list(HealthCheck))
        @given(texts())
        def files(text: bytes) -> None:
            path = base / "job.yaml"
            path.write_bytes(text)
            check_answer(path, base, shared_work)

        mappings()
        files()


def test_slips_end_in_a_forecast_or_an_error() -> None:
    fuzz(30)


@pytest.mark.slow
def test_many_slips_end_in_a_forecast_or_an_error() -> None:
    fuzz(20_000)

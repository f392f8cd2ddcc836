"""The campaign for GPUs on a machine without one: all of its code runs, on tiny models and a fake of CUDA."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")

from meshcast.experiments.cli import campaign as command_line  # noqa: E402
from meshcast.simulator.costs.calibration.check import check_folder  # noqa: E402
from meshcast.validation.calibration.device import calibrate, describe, kernels, sustained_rate  # noqa: E402
from meshcast.validation.calibration.device.from_campaign import calibrate_from  # noqa: E402
from meshcast.validation.kernels import measure as kernel_measurement  # noqa: E402
from meshcast.validation.measurements import device, gpu_state  # noqa: E402
from meshcast.validation.measurements.measurement import Measurement, read  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {"hidden": 32, "heads": 4, "vocab": 64, "seq": 32, "dropout": 0.0, "layers": 4}
GPT = {**SIZES, "tied": True}
LLAMA = {**SIZES, "kv_heads": 4, "ffn": 64, "positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}
MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}
FEW = kernels.Sizes(
    (32, 64), ((64, 64), (128, 64)), ((1, 64, 2, 2, 32), (1, 96, 2, 1, 32)) * 3, ((32, 64), (64, 128)), ((32, 128),)
)


def tiny(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """A job of the campaign with a model of a few thousand weights, of the same family."""
    model = MOE if "moe" in name or name == "mixtral" else GPT if name.startswith("gpt") else LLAMA
    return {**job, "model": model, "batch": {**job["batch"], "sequence": 32}}


def chosen(runs: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The first runs of each kind, and those that differ from them."""
    found = [run for kind in ("kernels", "stages", "distributed") for run in of_kind(runs, kind)[:number]]
    others = "kernels-llama3-8b-2k", "step-llama3.2-1b-graph", "collectives-2", "tp-2"
    return found + [run for run in runs if run["name"] in others and run not in found]


def of_kind(runs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["measure"] == kind]


@pytest.fixture(params=[1, pytest.param(100, marks=pytest.mark.slow)])
def campaign(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The campaign that ships, or so many runs of each kind, with tiny models, few samples and nothing compiled."""
    text = (Path(str(resources.files("meshcast.validation"))) / "campaigns" / "gpu.yaml").read_text("utf-8")
    data = yaml.safe_load(text)
    data["runs"] = chosen(data["runs"], request.param)
    data["jobs"] = {name: tiny(name, job) for name, job in data["jobs"].items()}
    for run in data["runs"]:
        options = run.setdefault("options", {})
        if "set" in run and "batch" in run["set"]:
            run["set"]["batch"]["sequence"] = 32
        few = {"kernels": {"repeat": 1, "warmup": 1, "tps": [1]}, "stages": {"repeat": 1, "warmup": 0}}
        few["collectives"] = {"repeat": 1}
        options |= few.get(run["measure"], {"steps": 2, "warmup": 1})
        options["modes"] = [mode for mode in options.get("modes", ()) if mode != "compile"] or ["eager"]
        if run["measure"] != "kernels":
            del options["modes"]
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump(data), "utf-8")
    return path


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, fake_cuda: Any) -> Any:
    """A machine with one GPU, this process being the only rank, on which nothing takes long."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setitem(kernels.SIZES, "cuda", FEW)
    small = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2, "kv_heads": 2, "vocab": 128, "seq": 32}
    monkeypatch.setitem(sustained_rate.MODELS, "cuda", small)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    monkeypatch.setattr(describe, "LARGE", 2**20)
    monkeypatch.setattr(device, "FLUSH_BYTES", 2**16)
    monkeypatch.setattr(gpu_state, "INTERVAL", 1e-3)
    # A new process would know nothing of the fake.
    monkeypatch.setattr(command_line, "_call_in_own_process", operator.call)
    monkeypatch.setattr(kernel_measurement, "WARM_UP_SIZE", 32)
    monkeypatch.setattr(kernel_measurement, "COPIES", (2**10,))
    return fake_cuda


@pytest.mark.slow
def test_every_slice_of_the_gpu_campaign_runs(campaign: Path, tmp_path: Path, one_gpu: Any) -> None:
    out = tmp_path / "measured"
    command_line.run_campaign(campaign, out, None, as_json=True)
    runs = yaml.safe_load(campaign.read_text("utf-8"))["runs"]
    files = {run["name"]: out / f"{run['name']}.json" for run in runs}
    done: dict[str, Measurement] = {name: read(path) for name, path in files.items() if path.is_file()}
    jobs = yaml.safe_load(campaign.read_text("utf-8"))["jobs"]
    on_several = {run["name"] for run in runs if run["measure"] in ("distributed", "collectives")}
    on_several -= {run["name"] for run in runs if jobs[run["job"]]["cluster"]["gpus"] == 1}
    assert on_several and done.keys() == files.keys() - on_several
    assert read(out / "calibration" / "measured.json").machine.states
    for name, found in done.items():
        assert all(row.samples for row in found.rows), found.notes
        assert found.title in (out / f"{name}.txt").read_text("utf-8")
        assert set(found.machine.states) == {"before", "during", "after"}
        assert found.versions["commit"] and set(found.rows[0].forecasts) == {"catalog", "calibration"}
    page = (out / command_line.SUMMARY).read_text("utf-8")
    assert all(word in page for word in ("gemm bf16", "attention", "copy", "step", "memory device", "pipeline actions"))
    fitted = calibrate_from(out, tmp_path / "mine")
    kernel_files = sum(found.kind == "kernels" for found in done.values())
    kernels_of_calibration = len(read(out / "calibration" / "measured.json").rows) - 2
    (kernels_fitted,) = [int(word.replace(",", "")) for word in fitted["title"].split()[:1]]
    assert kernels_fitted > kernels_of_calibration + 10 * kernel_files
    check_folder(tmp_path / "mine")
    # One step is captured and replayed as often as steps are timed, after those of the warm-up.
    graphs = [graph for graph in one_gpu.graphs if graph.replays > 1]
    assert graphs and all(row.samples for row in done["step-llama3.2-1b-graph"].rows)
    # Each step and each pipeline device begins with an empty cache, and its peak is its own.
    measured = [row.name for found in done.values() for row in found.rows if row.name.endswith("peak reserved")]
    assert one_gpu.calls["reset_peaks"] == len(measured) + 1  # and that of the calibration
    assert one_gpu.calls["empty_cache"] >= len(measured)

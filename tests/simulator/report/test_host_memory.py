"""Host memory and disks: what the ranks of a node offload, against what the node has."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.render.terminal.forecast import page
from meshcast.hardware.units import GIB
from meshcast.simulator import Report, simulate
from meshcast.simulator.ir.ops import HostCopy
from meshcast.simulator.report.host_memory import host_uses
from tests.draws import drawn_grid
from tests.jobs import on_gpus

TB = 1e12
DGX_2 = {"cpu": 1536 * GIB, "nvme": 30 * TB}
SMALL = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "tied": False}


def infinity(parameters: str, optimizer: str, layers: int = 96) -> dict[str, Any]:
    """GPT-3 on one DGX-2."""
    job = on_gpus(16, {"dp": 16}, "data/zero-infinity over dp", "memory/recompute-full")
    job["plan"]["schemes"][0] |= {"parameters": parameters, "optimizer": optimizer}
    model = {"layers": layers, "hidden": 12288, "heads": 96, "head_dim": 128, "vocab": 50304, "seq": 1024}
    return {**job, "model": model, "cluster": "dgx-2:1", "precision": "fp16", "batch": {"global": 16}}


def offload(mesh: dict[str, int], batch: int, cluster: Any, **options: Any) -> dict[str, Any]:
    """A small GPT whose activations or optimizer states are offloaded."""
    uses = {"pp": "pipeline/1f1b over pp", "dp": "data/ddp over dp"}
    job = on_gpus(1, mesh, *(use for axis, use in uses.items() if axis in mesh), "memory/offload")
    job["plan"]["schemes"][-1] |= options
    return {**job, "model": SMALL, "cluster": cluster, "batch": {"global": batch}}


def needed(report: Report) -> dict[str, float]:
    return {use.place: use.needed for use in report.host_uses}


@pytest.mark.parametrize(("parameters", "optimizer"), [("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")])
def test_states_of_all_ranks_of_a_node_add_up(parameters: str, optimizer: str) -> None:
    """Sixteen bytes a parameter: 2 of weights, 2 of gradients, 12 of the optimizer (arXiv 2104.07857, section 3)."""
    job = infinity(parameters, optimizer, layers=2)
    report = simulate({**job, "precision": {"compute": "fp16", "gradients": "fp16"}})
    wanted = {"cpu": 0.0, "nvme": 0.0}
    for place, nbytes in ((parameters, 2), (optimizer, 14)):
        wanted[place] += nbytes * report.job.model.parameters
    assert needed(report) == pytest.approx({place: nbytes for place, nbytes in wanted.items() if nbytes}, rel=1e-6)


def test_states_that_exceed_the_host_memory_fit_on_its_disks() -> None:
    """175 B parameters need 3.2 TB on a DGX-2 with 1.5 TB of memory and 30 TB of disks."""
    report = simulate(infinity("cpu", "cpu"))
    assert max(report.excess) < 0, "the GPUs have room"
    (use,) = report.host_uses
    assert (use.capacity, use.excess) == (DGX_2["cpu"], use.needed - DGX_2["cpu"]) and use.excess > 0
    assert not report.fits and report.to_dict()["status"] == "does-not-fit"
    assert report.missing == f"{use.excess / GIB:,.1f} GiB more than the 1,536 GiB of host memory of a dgx-2"
    assert report.missing in report.limits and report.to_dict()["memory"]["host_gib"] == use.needed / GIB
    on_disks = simulate(infinity("cpu", "nvme"))
    assert on_disks.fits and {use.place: use.capacity for use in on_disks.host_uses} == DGX_2
    assert on_disks.to_dict()["memory"]["disk_gib"] == pytest.approx(14 / 16 * use.needed / GIB, rel=0.2)


def test_strict_and_the_page_say_what_the_host_lacks(tmp_path: Any) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(infinity("cpu", "cpu")), "utf-8")
    result = CliRunner().invoke(app, ["predict", str(path), "--strict"])
    assert result.exit_code == 3 and "GiB of host memory of a dgx-2" in result.output.replace("\n", " ")
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(page(simulate(path)))
    text = console.export_text()
    assert "host memory of a dgx-2" in text and "does not fit" in text


@pytest.mark.parametrize(("batch", "stages"), drawn_grid([1, 2, 3, 8], [1, 2, 3]))
def test_activations_of_the_micro_batches_in_flight_are_on_the_host(batch: int, stages: int) -> None:
    """1F1B: stage i holds those of min(m, p - i) micro-batches; each copies out what it later copies back."""
    report = simulate(offload({"pp": stages}, batch, {"gpu": "h100-sxm", "gpus": stages}))
    program = report.play.program
    wanted = []
    for device in range(stages):
        tasks = {program.tasks[slot] for slot in range(len(program.tasks)) if program.device_of(slot) == device}
        works = [(op.work, count) for task in tasks for op, count in task.count_ops()]
        out = sum(n * work.nbytes for work, n in works if isinstance(work, HostCopy) and not work.back)
        wanted.append(out * min(batch, stages - device))
    assert [by["cpu"] for by in report.play.offloaded] == wanted
    assert sum(use.needed for use in host_uses(report.play)) == pytest.approx(sum(wanted))


def test_each_data_parallel_rank_keeps_a_copy_of_its_own() -> None:
    """The main weights, two moments and the gradients that are sent: 16 bytes a parameter and rank."""
    for ranks in (1, 2, 8):
        report = simulate(offload({"dp": ranks}, ranks, {"gpu": "h100-sxm", "gpus": ranks}, what=["optimizer"]))
        assert needed(report) == {"cpu": pytest.approx(16 * ranks * report.job.model.parameters)}


def test_the_fullest_node_decides() -> None:
    """Stages of a pipeline on nodes of their own: the first holds more micro-batches than the last."""
    report = simulate(offload({"pp": 2, "dp": 8}, 64, "dgx-h100:2"))
    by = [device["cpu"] for device in report.play.offloaded]
    assert by[0] > by[1] > 0
    assert needed(report) == {"cpu": pytest.approx(8 * by[0])}


def test_without_a_known_capacity_nothing_is_checked_and_that_is_told() -> None:
    report = simulate(offload({"dp": 8}, 8, "hgx-h200:1", what=["optimizer"]))
    assert report.fits and any(text.startswith("not checked:") for text in report.assumed)
    checked = simulate(offload({"dp": 8}, 8, "dgx-h100:1", what=["optimizer"]))
    assert not any(text.startswith("not checked:") for text in checked.assumed)


def test_a_plan_that_offloads_nothing_uses_no_host() -> None:
    report = simulate({"model": SMALL, "cluster": "dgx-h100:1", "batch": {"global": 8}, "plan": {"tp": 4}})
    memory = report.to_dict()["memory"]
    assert report.host_uses == [] and memory["host_gib"] == memory["disk_gib"] == 0.0


def test_a_node_with_several_stages_holds_their_sum() -> None:
    """Four ranks of each of two stages share a node."""
    job = offload({"pp": 4, "dp": 4}, 64, "dgx-h100:2")
    report = simulate({**job, "model": {**SMALL, "layers": 8}})
    assert needed(report) == {"cpu": pytest.approx(4 * sum(by["cpu"] for by in report.play.offloaded[:2]))}


@pytest.mark.parametrize(("traits", "plan", "warned"), [
    ({}, {"fsdp": True}, True),
    ({}, {"zero": 3}, False),
    ({"memory": {"each_rank_loads": False}}, {"fsdp": True}, False),
])  # fmt: skip
def test_a_model_that_every_rank_loads_may_exceed_host_memory(traits: Any, plan: Any, warned: bool) -> None:
    """Eight times 4 bytes of each of 70.6e9 parameters are 2,103 GiB, and a DGX H100 has 2,048."""
    framework = {"name": "hf-trainer", "set": traits}
    batch = {"global": 8, "sequence": 512}
    job = {"model": "llama3-70b", "cluster": "dgx-h100:1", "framework": framework, "batch": batch, "plan": plan}
    assert any("2,102.7 of 2,048 GiB" in warning for warning in simulate(job).warnings) == warned

"""Checkpoints that tensor-parallel ranks partition: memory, bytes, data flow, and that nothing else changes."""

from __future__ import annotations

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, HostCopy
from meshcast.validation.contract.checked import lowered_layer
from meshcast.validation.contract.dataflow import run_problems
from meshcast.validation.contract.measure import make, sent_bytes
from meshcast.validation.contract.placement import Contents
from meshcast.validation.contract.played import Ideal, Played, play_job
from meshcast.validation.contract.step_dataflow import step_problems
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import GPT, job_on

LAYERS, SEQUENCE, HIDDEN = 4, 32, 64
PLACES = ["gpu", "cpu"]


def play(partition: str, tensor: str = "tensor/megatron", p: int = 4, batches: int = 2, pp: int = 1) -> Played:
    schemes = [{"use": "pipeline/1f1b", "over": "pp"}, {"use": "memory/recompute-full", "partition": partition}]
    model = {**GPT, "layers": LAYERS, "hidden": HIDDEN, "seq": SEQUENCE}
    job = job_on({"pp": pp, "tp": p}, *schemes, {"use": tensor, "over": "tp"}, samples=batches, model=model)
    return play_job(job, Ideal(links=1e7))


def input_bytes() -> int:
    """Bytes of the input of a layer."""
    return 2 * SEQUENCE * HIDDEN


@pytest.mark.parametrize(("place", "p"), drawn_grid(PLACES, [2, 4]))
def test_every_layer_gathers_its_input_once_and_keeps_a_part(place: str, p: int) -> None:
    plain, played = play("no", p=p), play(place, p=p)
    mesh, nbytes = played.plan.mesh, input_bytes()
    gathers = [op for _, op in played.instances() if op.name == "gather checkpoint"]
    assert len(gathers) == 2 * LAYERS
    assert sent_bytes(gathers, mesh) == 2 * LAYERS * nbytes * (p - 1) / p
    others = [[op for _, op in one.instances() if isinstance(op.work, Collective)] for one in (plain, played)]
    assert sent_bytes(others[1], mesh) == pytest.approx(sent_bytes(others[0], mesh) + sent_bytes(gathers, mesh))
    copies = [op.work for _, op in played.instances() if isinstance(op.work, HostCopy)]
    assert sum(work.nbytes for work in copies) == (2 * 2 * LAYERS * nbytes / p if place == "cpu" else 0)
    # In the last layer's backward pass the inputs of the others are kept in parts, or not on the GPU.
    kept = nbytes * (1 - 1 / p if place == "gpu" else 1)
    saved = plain.peaks[0].by["activations"] - played.peaks[0].by["activations"]
    assert (LAYERS - 1) * kept - 2 * nbytes <= saved <= LAYERS * kept
    assert played.peaks[0].left == 0
    assert played.times.span > plain.times.span


@pytest.mark.parametrize(("place", "attention"), drawn_grid(PLACES, ["flash", "unfused"]))
def test_data_flow(place: str, attention: str) -> None:
    mesh = Mesh({"tp": 4})
    schemes = [make("memory/recompute-full", mesh, partition=place), make("tensor/megatron", mesh, ("tp",))]
    run = lowered_layer(mesh, schemes, True, attention)
    assert [op.name for op in run.fragment.backward].count("gather checkpoint") == 1
    assert run_problems(run) == []
    assert not Contents(run.fragment, mesh).problems
    assert step_problems(play(place, pp=2, p=2, batches=4)) == []


@pytest.mark.parametrize(("tensor", "p"), [("tensor/megatron-sp", 4), ("tensor/megatron", 1)])
@pytest.mark.parametrize("place", PLACES)
def test_inputs_that_no_other_rank_has_stay_as_they_are(place: str, tensor: str, p: int) -> None:
    plain, played = play("no", tensor, p), play(place, tensor, p)
    assert played.times == plain.times
    assert played.peaks == plain.peaks

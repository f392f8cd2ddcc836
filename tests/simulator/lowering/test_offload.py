"""Offloading to the host: bytes out and back, memory on the GPU, and copies during the computation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.host import DISKS, MEMORIES, UPDATE_SHARE, HostShare
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Update
from meshcast.simulator.ir.ops import COMPUTE, Fragment, Gemm, HostCopy, HostUpdate, Memory, Op, TensorUse
from meshcast.simulator.lowering.offload import update_on_host
from meshcast.simulator.lowering.update import UPDATE
from meshcast.validation.contract.measure import saved_bytes
from meshcast.validation.contract.played import Ideal, Played, play_job
from tests.draws import drawn_grid

OFFLOAD = {"use": "memory/offload"}


def with_offload(job: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The job with a further scheme."""
    plan = job["plan"]
    return {**job, "plan": {**plan, "schemes": [*plan["schemes"], {**OFFLOAD, **options}]}}


def small(layers: int = 6, batch: int = 2, **plan: Any) -> dict[str, Any]:
    """A small GPT on one GPU."""
    model = {"layers": layers, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "tied": False}
    whole = {"mesh": {"pp": 1}, "schemes": [], **plan}
    return {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": batch}, "plan": whole}


def copies(found: Played, back: bool) -> int:
    """Bytes that all copies of one direction move on a device."""
    works = [op.work for _, op in found.instances(0)]
    return sum(work.nbytes for work in works if isinstance(work, HostCopy) and work.back == back)


def of_a_layer(found: Played) -> float:
    """Bytes that a layer saves."""
    return saved_bytes(next(unit_run for unit_run in found.stage_ops(0).unit_runs if unit_run.name == "layer"))


# ------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(("depth", "layers"), drawn_grid([3, 1, 2, 6], [None, 0, 1, 3, 6]))
def test_saved_activations_are_copied_out_and_back_once_per_micro_batch(depth: int, layers: int | None) -> None:
    """All but the layer in front of the loss."""
    bare, run = play_job(small(depth)), play_job(with_offload(small(depth), layers=layers))
    away = min(depth - 1, depth if layers is None else layers)
    assert copies(run, back=False) == copies(run, back=True) == 2 * away * of_a_layer(bare)
    assert run.flops("F") == bare.flops("F") and run.flops("B", "W") == bare.flops("B", "W")
    assert all(peak.left == 0 for peak in run.peaks)
    if layers == 0:
        counts, wanted = ([unit.count for unit in play.stage_ops(0).unit_runs] for play in (run, bare))
        assert counts == wanted


def test_two_layers_are_on_the_gpu_at_a_time() -> None:
    """Between its passes no layer but the last has activations on the GPU; at most those of two layers are there."""
    peaks = []
    for depth in (3, 4, 20):
        bare, run = play_job(small(depth)), play_job(with_offload(small(depth)))
        layer = of_a_layer(bare)
        ends = bare.most_kept(0) - depth * layer
        assert run.most_kept(0) == layer + ends
        peaks.append(run.category_peak(0, "activations"))
        assert peaks[-1] <= 2 * layer + run.most_kept(0) - layer + ends
        assert bare.category_peak(0, "activations") >= depth * layer
    assert peaks[1] == peaks[2]


def test_copies_hide_behind_the_computation_where_the_link_is_fast() -> None:
    """The copies of two layers overlap the passes of a layer; a layer waits if they take longer."""
    bare = play_job(small(8), Ideal(links=1e15)).times.span
    assert play_job(with_offload(small(8)), Ideal(links=1e15)).times.span == pytest.approx(bare)
    found = play_job(with_offload(small(8), layers=None), Ideal(links=1e4))
    # Seven layers leave one after another and come back so: nothing else takes time beside that.
    moved = copies(found, back=False) / 1e4
    assert found.times.span >= 2 * moved
    assert found.times.span == pytest.approx(2 * moved, rel=0.05)


def test_a_recomputed_layer_has_its_input_offloaded_only() -> None:
    """In either order of the schemes."""
    again = {"use": "memory/recompute-full"}
    for schemes in ([again, OFFLOAD], [OFFLOAD, again]):
        found = play_job(small(6, schemes=schemes))
        assert copies(found, back=False) == 2 * 5 * 2 * 32 * 64
        assert all(peak.left == 0 for peak in found.peaks)


@pytest.mark.parametrize(("layers", "pp", "wanted"), [(8, 2, [16, 12]), (4, 4, [4, 4, 4, 0])])
def test_the_last_layer_of_a_stage_is_offloaded_after_its_pass(layers: int, pp: int, wanted: list[int]) -> None:
    """Of four micro-batches, out and back; but not before the loss."""
    job = small(layers, 4, mesh={"pp": pp}, schemes=[{"use": "pipeline/1f1b", "over": "pp"}])
    job["cluster"]["gpus"] = pp
    bare, run = play_job(job), play_job(with_offload(job))
    for device, count in enumerate(wanted):
        works = [op.work.back for _, op in run.instances(device) if isinstance(op.work, HostCopy)]
        assert (works.count(False), works.count(True)) == (count, count)
    # Two micro-batches in flight.
    assert pp > 2 or run.most_kept(0) == bare.most_kept(0) - 2 * 4 * of_a_layer(bare)


# --------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize(
    ("overlap", "n", "data"), drawn_grid([True, False], [1, 2, 8], ["data/ddp", "data/zero-1", "data/fsdp"])
)
def test_optimizer_states_are_stored_on_the_host(data: str, n: int, overlap: bool) -> None:
    """2 + 4 bytes per parameter stay on the GPU, sharded by the data scheme; 4 go out and 2 come back for each updated
    one.
    """
    job = small(mesh={"dp": n}, schemes=[{"use": data, "over": "dp"}])
    job["cluster"]["gpus"] = job["batch"]["global"] = n
    job["framework"] = {"name": "megatron-core", "set": {"overlap": {"dp": overlap}}}
    found = play_job(with_offload(job, what=["optimizer"]))
    elements = found.plan.job.model.parameters
    cut = {"data/ddp": (1, 1, 1), "data/zero-1": (1, 1, n), "data/fsdp": (n, n, n)}[data]
    assert found.resting(0) == {"parameters": 2 * elements / cut[0], "gradients": 4 * elements / cut[1], "optimizer": 0}
    assert copies(found, back=False) == pytest.approx(4 * elements / cut[2], abs=8)
    assert copies(found, back=True) == pytest.approx(2 * elements / cut[2], abs=8)
    (step,) = [op.work for _, op in found.instances(0) if isinstance(op.work, HostUpdate)]
    assert step.nbytes == pytest.approx((4 + 12 + 12 + 2) * elements / cut[2], abs=16)
    assert (step.loaded, step.stored) == (0, 0)
    assert not any(isinstance(op.work, Memory) and op.work.what == "adam" for _, op in found.instances())


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_share_of_the_states_is_updated_on_the_host_and_the_rest_beside_it(share: float) -> None:
    """The GPU reads, writes and holds temporaries for what is left to it; a copy carries what the host is given."""
    module = Update("update", (), 2, 16.0, 14.0)
    adam, zero = (Op(name, work=Memory(name, 16_000, 14_000), phase="U") for name in ("adam", "zero-grad"))
    update = Fragment([adam, zero], tensor_uses=[TensorUse(UPDATE, 4_000, adam), TensorUse("grads", 2_000, zero)])
    moved = update_on_host(module, update, 2.0, "cpu", share=share)
    works: dict[type, Any] = {type(op.work): op.work for op in reversed(moved.forward)}
    kept, there, back = works[Memory], works[HostUpdate], works[HostCopy]
    assert (kept.read, kept.write) == (16_000 * (1 - share), 14_000 * (1 - share))
    assert (there.read, there.write) == (16_000 * share, 14_000 * share)
    assert back.nbytes == 2_000 * share
    assert {use.key: use.nbytes for use in moved.tensor_uses} == {UPDATE: 4_000 * (1 - share), "grads": 2_000}


def test_the_gpu_keeps_the_states_that_a_fraction_leaves() -> None:
    jobs = [with_offload(small(), what=["optimizer"], fraction=fraction) for fraction in (1.0, 0.25)]
    whole, part = map(play_job, jobs)
    elements = whole.plan.job.model.parameters
    assert (whole.resting(0)["optimizer"], part.resting(0)["optimizer"]) == (0, 0.75 * 12 * elements)
    for back in (False, True):
        assert copies(part, back) == copies(whole, back) / 4
    there = [simulate(job).host_uses[0].needed for job in jobs]
    assert there[1] == pytest.approx(there[0] / 4, rel=1e-6)


def test_parameters_are_copied_while_the_host_updates_others() -> None:
    """As many bytes as at once, in as many pieces as there are parameters; the host waits for the first piece alone."""
    plain, overlapped = (play_job(with_offload(small(), what=["optimizer"], overlap=on)) for on in (False, True))
    for back in (False, True):
        assert copies(plain, back) == copies(overlapped, back)
    steps = [number for number, op in overlapped.instances() if isinstance(op.work, HostUpdate)]
    stage_ops = overlapped.stage_ops(0)
    assert len(steps) == sum(count for _, count in stage_ops.params())
    runs, times = (plain, overlapped), overlapped.times
    late, early = (max(run.times.end[n] for n, op in run.instances() if op.name == "copy weights") for run in runs)
    assert early < late
    assert all(times.begin[later] == times.end[earlier] for earlier, later in pairwise(steps))


def test_gradients_go_out_then_the_host_works_then_weights_come_back() -> None:
    """States on disks are read and written once."""
    run = play_job(with_offload(small(), what=["optimizer"], to="nvme"))
    turns = [(op.name, number) for number, op in run.instances() if op.phase == "U" and op.stream != COMPUTE]
    assert [name for name, _ in turns] == ["copy gradients", "adam on the host", "copy weights"]
    for (_, before), (_, behind) in pairwise(turns):
        assert run.times.begin[behind] == run.times.end[before]
    (step,) = [op.work for _, op in run.instances(0) if isinstance(op.work, HostUpdate)]
    assert step.loaded == step.stored == 12 * run.plan.job.model.parameters


# ------------------------------------------------------------------------------------------------ prices


def test_the_gpus_behind_a_switch_share_its_link_to_the_host() -> None:
    """Two of a DGX A100, one of a DGX H100; the host's memory is shared by all."""
    a100, h100 = (HostShare.of(load_cluster(f"{name}:1")) for name in ("dgx-a100", "dgx-h100"))
    assert a100.link == pytest.approx(31e9 * 0.84 / 2)
    assert a100.memory == pytest.approx(409.6e9 / 8)
    assert h100.link > 3 * a100.link
    assert a100.assumed == h100.assumed == ()


def test_an_unknown_host_is_assumed_and_listed() -> None:
    job = with_offload(small(), what=["activations", "optimizer"], to="nvme")
    job["cluster"] = {"gpu": "mi300x", "gpus": 1}
    assumed = simulate(job).to_dict()["assumed"]
    assert len([text for text in assumed if text.startswith("host:")]) == 2
    assert not any(text.startswith("host:") for text in simulate(small()).to_dict()["assumed"])
    share = HostShare.of(load_cluster(job["cluster"]))
    assert (share.memory, share.read, share.write) == (MEMORIES["pcie5"], DISKS, DISKS)


@given(nbytes=st.integers(1, 10**11), other=st.integers(1, 10**11))
def test_more_bytes_never_copy_faster_and_disks_never_beat_the_link(nbytes: int, other: int) -> None:
    costs = Costs(load_cluster("dgx-a100:1"), Mesh({"x": 8}))
    small_one, large = sorted((nbytes, other))
    for back in (True, False):
        assert costs.estimate(HostCopy(small_one, back)).seconds <= costs.estimate(HostCopy(large, back)).seconds
        near, far = (costs.estimate(HostCopy(nbytes, back, to)).seconds for to in ("cpu", "nvme"))
        assert near <= far


@pytest.mark.parametrize(("elements", "measured"), [(1e9, 0.22), (4e9, 1.03), (10e9, 2.57)])
def test_the_update_on_the_host_takes_its_published_time(elements: float, measured: float) -> None:
    """One process with the whole of a DGX-2: arXiv 2101.06840, table 4."""
    memory = 16 * HostShare.of(load_cluster("dgx-2:1")).memory
    assert 30 * elements / (UPDATE_SHARE * memory) == pytest.approx(measured, rel=0.1)


def test_a_faster_link_to_the_host_shows_in_the_step() -> None:
    """Grace's NVLink against PCIe 4 behind switches; both report exposed copies."""
    job = with_offload(small())
    job["model"] = {"preset": "llama3-8b", "layers": 4}
    job["batch"] = {"global": 1, "micro": 1, "sequence": 4096}
    shares = {}
    for cluster in ({"gpu": "gb200", "gpus": 1}, {"gpu": "a100-sxm-80", "gpus": 1}):
        report = simulate({**job, "cluster": cluster})
        exposed = report.to_dict()["breakdown_s"]["exposed"]["copy"]
        shares[cluster["gpu"]] = exposed / report.step_time
    assert shares["gb200"] < shares["a100-sxm-80"]
    assert any(isinstance(op.work, Gemm) for _, op in play_job(job).instances())

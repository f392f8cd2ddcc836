"""ZeRO-Offload: bytes over the links to the hosts, memory left on the GPU, and the delayed update."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, HostUpdate, Op
from meshcast.validation.contract.played import Ideal, Played, play_job
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import GPT, copied, job_on

USE = "data/zero-offload"
DELAYED = {"delayed_update": True}


def job(n: int, batches: int = 1, use: str = USE, **options: Any) -> dict[str, Any]:
    """A small GPT on n ranks with 16-bit gradients, at a host that takes no time."""
    more = {"framework": {"set": {"launch_s": 0.0, "step_overhead_s": 0.0}}, "precision": {"gradients": "bf16"}}
    scheme = {"use": use, "over": "dp", **options}
    return job_on({"dp": n}, scheme, samples=n * batches, model={**GPT, "seq": 32}, **more)


def updates(found: Played) -> list[tuple[int, Op]]:
    return [(n, op) for n, op in found.instances() if op.name.startswith("adam")]


@pytest.mark.parametrize(("n", "batches", "delayed"), drawn_grid([1, 2, 8], [1, 3], [False, True]))
def test_four_bytes_a_parameter_go_over_the_links(n: int, batches: int, delayed: bool) -> None:
    """2 M of gradients out and 2 M of weights back, for M parameters (section 4.2), by all ranks together."""
    found = play_job(job(n, batches, delayed_update=delayed))
    elements = found.plan.job.model.parameters
    assert n * copied(found, False) == pytest.approx(2 * elements * batches, rel=1e-3)
    assert n * copied(found, True) == pytest.approx(2 * elements, rel=1e-3)
    ((_, step),) = updates(found)
    assert isinstance(step.work, HostUpdate)
    assert n * step.work.nbytes == pytest.approx(28 * elements, rel=1e-3)
    assert (n > 1) == any(isinstance(op.work, Collective) for _, op in found.instances())


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_gpu_holds_the_weights_and_gradients_of_two_units(n: int) -> None:
    found, whole = play_job(job(n)), play_job(job(n, use="data/zero-2"))
    elements = found.plan.job.model.parameters
    assert found.resting(0) == {"parameters": 2 * elements, "gradients": 0, "optimizer": 0}
    assert 0 < found.category_peak(0, "gradients") < elements
    if n > 1:
        assert found.category_peak(0, "gradients") == whole.category_peak(0, "gradients")
    assert found.peaks[0].left == 0
    report = simulate(job(n))
    assert [(use.place, use.needed) for use in report.host_uses] == [("cpu", pytest.approx(14 * elements))]


def test_gradients_leave_during_the_backward_pass() -> None:
    """But for those of the last unit, the embedding."""
    found = play_job(job(1), Ideal(links=1e9))
    copies = [n for n, op in found.instances() if op.name == "copy gradients"]
    kernels = [n for n, op in found.instances() if op.stream == "compute" and op.phase in "BW" and op.work]
    assert len(copies) == 6
    assert all(found.times.end[n] <= found.times.end[kernels[-1]] for n in copies[:-1])


def prices(update: float, links: float = 1e7) -> Any:
    """Ideal prices but for the update on the host."""

    def price(work: Any) -> tuple[float, float, float]:
        return (update, 0.0, 0.0) if isinstance(work, HostUpdate) and work.read > 1e5 else Ideal(links=links)(work)

    return price


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("update", [0.0, 1e-4, 1e-2, 1.0])
def test_a_delayed_update_takes_the_longer_of_the_update_and_the_passes(n: int, update: float) -> None:
    """Section 5.2, figure 6. Weights are copied back after both."""
    plain, late = (play_job(job(n, **options), prices(update)) for options in ({}, DELAYED))
    passes = max(plain.times.end[i] for i, op in plain.instances() if op.phase != "U" and op.work)
    rest = plain.times.span - passes - update
    assert plain.times.span > passes + update
    assert late.times.span == pytest.approx(max(passes, update) + rest, rel=0.02)
    ((number, _),) = updates(late)
    assert late.times.begin[number] == 0


def test_delaying_is_never_slower() -> None:
    for batches in (1, 2, 4):
        for update in (1e-5, 1e-3):
            spans = [play_job(job(4, batches, **options), prices(update)).times.span for options in ({}, DELAYED)]
            assert spans[1] <= spans[0]


def test_activations_are_offloaded_beside_it() -> None:
    both = job(2)
    both["plan"]["schemes"].append({"use": "memory/offload", "what": ["activations"]})
    assert play_job(both).peaks[0].left == 0


def test_a_model_of_thirteen_billion_parameters_trains_on_one_v100() -> None:
    """Section 6.2.1, and DeepSpeed's page of ZeRO-3 Offload; without offloading it needs 16 bytes a parameter."""
    model = {"layers": 65, "hidden": 4096, "heads": 32, "vocab": 50304, "seq": 1024, "positions": "learned"}
    report = simulate(
        {
            "model": model,
            "cluster": {"node": "dgx-2", "nodes": 1, "gpus": 1},
            "precision": {"compute": "fp16", "gradients": "fp16"},
            "batch": {"global": 1},
            "plan": {"mesh": {"dp": 1}, "schemes": [{"use": USE, "over": "dp"}, {"use": "memory/recompute-full"}]},
        }
    )
    assert 13e9 < report.job.model.parameters < 14e9
    assert report.fits
    assert 16 * report.job.model.parameters > 6 * report.capacity


# ------------------------------------------------------------------------------------------------ FSDP


@pytest.mark.parametrize(("batches", "replicas"), drawn_grid([1, 3], [1, 2]))
def test_fsdp_copies_shards_in_before_each_gather_and_gradients_out(batches: int, replicas: int) -> None:
    ranks = 4
    config = job(ranks * replicas, batches, "data/fsdp")
    entry = {"use": "data/fsdp", "over": "dp", "offload": True}
    named = {"replicate": "copies"} if replicas > 1 else {}
    config["plan"] = {"mesh": {"copies": replicas, "dp": ranks}, "schemes": [entry | named]}
    config["plan"]["mesh"] = {axis: n for axis, n in config["plan"]["mesh"].items() if n > 1}
    config["framework"]["set"]["root_stays_gathered"] = False
    played = play_job(config)
    weights = played.plan.job.model.parameters
    assert copied(played, True) == pytest.approx(2 * batches * 4 * weights / ranks)
    assert copied(played, False) == pytest.approx(batches * 2 * weights / ranks)
    assert sum(played.resting(0).values()) == 0
    assert played.peaks[0].left == 0
    ((_, update),) = updates(played)
    assert isinstance(update.work, HostUpdate)


def test_a_root_that_stays_gathered_is_on_the_gpu_though_its_shards_are_not() -> None:
    config = job(4)
    config["plan"]["schemes"] = [{"use": "data/fsdp", "over": "dp", "offload": True, "reshard": False}]
    played = play_job(config)
    assert sum(played.resting(0).values()) == 2 * played.plan.job.model.parameters

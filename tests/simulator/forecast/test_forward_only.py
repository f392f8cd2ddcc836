"""Forward-only jobs from job to report: time, utilisation, memory, the answer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import BYTES
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.validation.reference.supported import check

FORWARD_ONLY = {"mode": "forward-only"}

MODEL = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 1024, "seq": 128, "tied": True}

SERIAL = {"launch_s": 0, "cuda_graphs": True}


def job(gpus: int = 1, **more: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "batch": {"global": 4 * gpus}}
    return fields | {"train": FORWARD_ONLY} | more


def long_plan(mesh: dict[str, int], *schemes: dict[str, Any]) -> dict[str, Any]:
    return {"mesh": mesh, "schemes": list(schemes)}


def test_one_gpu_takes_the_sum_of_its_forward_ops_and_the_constant_of_the_framework() -> None:
    report = simulate(job(framework={"name": "megatron-core", "set": SERIAL}))
    flat = report.play.step.flat
    assert {op.phase for op in flat.ops} == {"F"}
    constant = report.job.framework.step_overhead_s
    assert report.step_time == pytest.approx(sum(flat.seconds) + constant, rel=1e-12)
    training = simulate(job(framework={"name": "megatron-core", "set": SERIAL}, train={"mode": "full"}))
    flat = training.play.step.flat
    forward = (seconds for op, seconds in zip(flat.ops, flat.seconds, strict=True) if op.phase == "F")
    assert report.step_time == pytest.approx(sum(forward) + constant, rel=1e-12)


def test_it_needs_a_third_of_the_flops() -> None:
    forward, training = simulate(job()), simulate(job(train={"mode": "full"}))
    for convention in ("palm", "causal"):
        assert forward.flops_per_token(convention) == pytest.approx(training.flops_per_token(convention) / 3)
        at_equal_time = training.mfu[convention] * training.step_time / forward.step_time
        assert forward.mfu[convention] == pytest.approx(at_equal_time / 3)
    published = {"tflops_per_gpu": 100, "flops": "palm", "source": "here"}
    beside = simulate(job(published=published)).to_dict()["published"]
    assert beside["forecast"] == pytest.approx(forward.flops_per_token("palm") * forward.tokens_per_s_per_gpu / 1e12)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_and_offload_have_no_effect(recompute: str) -> None:
    plain = simulate(job(8, plan={"tp": 2, "pp": 2}))
    again = simulate(job(8, plan={"tp": 2, "pp": 2, "recompute": recompute}))
    assert (again.step_time, again.peak_allocated) == (plain.step_time, plain.peak_allocated)
    data = {"use": "data/zero-1", "over": "dp"}
    away = {"use": "memory/offload", "what": ["activations", "optimizer"]}
    plain, offloaded = (simulate(job(2, plan=long_plan({"dp": 2}, data, *more))) for more in ([], [away]))
    assert (offloaded.step_time, offloaded.peak_allocated) == (plain.step_time, plain.peak_allocated)
    few, many = (simulate(job(4, plan={"pp": 4, "schedule": "gpipe"}, batch={"global": n})) for n in (4, 64))
    assert few.peak_allocated == many.peak_allocated, "whatever the number of micro-batches"


def test_the_answer_has_no_optimizer() -> None:
    answer = simulate(job(8, plan={"tp": 2, "pp": 2})).to_dict()
    assert answer["job"]["train"] == FORWARD_ONLY
    assert load_job(answer["job"]).forward_only
    assert answer["breakdown_s"]["optimizer"] == answer["breakdown_s"]["exposed"]["dp"] == 0
    for stage in answer["memory"]["stages"]:
        assert stage["by"]["gradients"] == stage["by"]["optimizer"] == 0


def test_slices_of_sequences_hold_the_keys_and_values_of_the_slices_before() -> None:
    plan = long_plan({"pp": 2}, {"use": "pipeline/terapipe", "over": "pp", "slices": 4})
    report = simulate(job(2, plan=plan, batch={"global": 4, "micro": 2}))
    moments, by = report.play.memory(0)
    activations = by[:, CATEGORIES.index("activations")]
    behind = [report.play.step.times.end[report.play.step.flat.behind[action] - 1] for action in range(4)]
    held = [float(activations[moments <= end][-1]) for end in behind]
    # Two layers a stage; keys and values of a token are as wide as two of the four heads each.
    per_slice = 2 * 2 * 2 * (128 // 4) * 128 * BYTES["bf16"]
    assert held == [per_slice, 2 * per_slice, 3 * per_slice, 0]


def test_a_tied_table_stays_whole_until_the_output_layer() -> None:
    """FSDP does not free the root unit after its forward pass."""
    framework = {"name": "torchtitan", "set": {"gathers_apart": False}}
    report = simulate(job(2, plan={"fsdp": True}, framework=framework, batch={"global": 2}))
    states = report.play.resting[0]["parameters"]
    _, by = report.play.memory(0)
    whole = (by[:, CATEGORIES.index("parameters")] - states).tolist()
    first = next(i for i, nbytes in enumerate(whole) if nbytes > 0)
    table = 1024 * 256 * BYTES["bf16"]
    assert min(whole[first:-2]) >= table
    assert whole[-1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_by_cost_balances_forward_passes(schedule: str) -> None:
    model = {"preset": "llama3-8b", "layers": 22}
    plan = {"pp": 4, "schedule": schedule}
    balanced, even = (
        simulate(job(4, model=model, plan=plan | {"partition": partition}, batch={"global": 16}))
        for partition in ("by-cost", [3, 3, 3, 3, 3, 3, 2, 2])
    )
    assert balanced.step_time <= even.step_time


@pytest.mark.parametrize(
    "data", [{"use": "data/zero-offload", "delayed_update": True}, {"use": "data/zero-infinity", "tiles": 2}], ids=str
)
def test_hosts_update_nothing(data: dict[str, Any]) -> None:
    report = simulate(job(2, plan=long_plan({"dp": 2}, data | {"over": "dp"})))
    assert {op.phase for op in report.play.step.flat.ops} == {"F"}
    weights = report.job.model.parameters * BYTES["bf16"] / 2
    offloaded = weights if data["use"] == "data/zero-infinity" else 0
    assert report.play.offloaded[0] == pytest.approx({"cpu": offloaded, "nvme": 0})
    horovod = simulate(job(2, plan=long_plan({"dp": 2}, {"use": "data/horovod", "over": "dp"})))
    assert "buffers" not in horovod.play.resting[0]


def test_noise_plays_forward_passes_rank_by_rank() -> None:
    noise = {"jitter": 0.1, "steps": 2}
    report = simulate(job(4, plan={"pp": 4, "schedule": "varuna", "recompute": "full"}, noise=noise))
    assert min(report.step_times) > report.step_time * 0.9


@pytest.mark.parametrize("train", [FORWARD_ONLY, {"mode": "lora"}])
def test_the_reference_trainer_trains_all_weights(train: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"train\.mode.*trains all weights"):
        check(resolve_plan(load_job(job(train=train))))

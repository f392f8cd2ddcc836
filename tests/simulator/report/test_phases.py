"""Memory in the phases of a run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from meshcast.simulator.forecast.evaluation import make_evaluation
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.simulator.report.phases import find_deciding_phase, heights_of_devices, list_phases
from meshcast.simulator.report.report import Report

FSDP: dict[str, Any] = {"plan": {"zero": 3, "recompute": "full"}}


def forecast(**job: Any) -> Report:
    return simulate(
        {
            "model": {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq": 512},
            "cluster": {"gpu": "h100-sxm", "gpus": 8},
            "framework": {"name": "torchtitan", "set": job.pop("traits", {})},
            **FSDP,
            **job,
        }
    )


def totals(report: Report) -> dict[str, float]:
    return {phase.name: phase.total for phase in list_phases(report.play)}


@pytest.mark.parametrize("made_early", [False, True])
def test_first_step_has_no_moments_unless_the_optimizer_makes_them_before(made_early: bool) -> None:
    report = forecast(traits={"update": {"moments_at_start": made_early}})
    phases = totals(report)
    moments = 0 if made_early else 2 * 4 * report.play.plan.job.model.parameters / 8
    assert phases["step"] - phases["first step"] == pytest.approx(moments, rel=1e-3)
    assert max(phases["step"], phases["update"]) == report.peak_allocated


def test_evaluation_holds_forward_passes_of_its_own_batch_beside_the_states_of_training() -> None:
    batch = {"global": 8 * 64, "micro": 64, "sequence": 1024}
    training = forecast(run={"evaluation": {"micro": 64, "sequence": 1024}})
    alone = forecast(train={"mode": "forward-only"}, batch=batch)
    weights, states = alone.play.resting[0], training.play.resting[0]
    expected = alone.peak_allocated - sum(weights.values()) + sum(states.values())
    assert totals(training)["evaluation"] == pytest.approx(expected)
    assert find_deciding_phase(training.play).name == "evaluation"
    assert training.peak_allocated == pytest.approx(expected) and training.needs[0] > expected


def test_evaluations_hold_the_copies_in_fp32_that_losses_make() -> None:
    """Of 8 bytes a logit in fp32 four are made from the logits, in 16 bits, and four are kept by a backward pass."""
    sizes = {"micro": 8, "sequence": 512}
    plain, copied = (
        totals(forecast(traits={"loss": {"kept": 4, "peak": peak}}, run={"evaluation": sizes}))["evaluation"]
        for peak in (0, 12)
    )
    assert copied - plain == 8 * 512 * 32000 * 4


def test_every_replica_of_a_pipeline_evaluates_a_micro_batch_for_each_device() -> None:
    report = forecast(plan={"dp": 4, "pp": 2, "zero": 1}, run={"evaluation": {"micro": 3}})
    job = make_evaluation(report.play.plan)
    assert job is not None and (job.batch.total, job.batch.micro) == (3 * 4 * 2, 3)
    # Each device has moments of its own parameters: two of three numbers of its optimizer.
    outside, states = report.play.outside_steps, [resting["optimizer"] for resting in report.play.resting]
    assert [own.moments for own in outside] == pytest.approx([2 / 3 * nbytes for nbytes in states])
    assert outside[0].moments != outside[1].moments


@pytest.mark.parametrize(("plan", "framework"), [
    ({"zero": 3}, "deepspeed"),
    ({"fsdp": True, "recompute": "full"}, "hf-trainer"),
    ({"tp": 2, "pp": 2, "zero": 1, "recompute": "full"}, "megatron-core"),
    ({"pp": 2, "dp": 4, "chunks": 2, "zero": 0}, "megatron-core"),
    ({"zero": 1, "offload": ["optimizer"], "recompute": "full"}, "deepspeed"),
])  # fmt: skip
def test_evaluations_of_the_micro_batches_of_training_hold_less_than_its_steps(
    plan: dict[str, Any], framework: str
) -> None:
    """Launch files that evaluate as they train need state no evaluation."""
    batch = {"global": 64, "micro": 4, "sequence": 512}
    phases = totals(forecast(plan=plan, framework=framework, batch=batch, run={"evaluation": {"micro": 4}}))
    assert phases["evaluation"] < max(phases["step"], phases.get("update", 0.0))


def test_losses_that_are_fused_in_training_alone_have_logits_in_evaluations() -> None:
    traits = {"loss": {"forward": 2, "backward": 2, "kept": 0, "chunk_tokens": "liger"}}
    report = forecast(traits=traits, run={"evaluation": {"micro": 1}})
    job = make_evaluation(report.play.plan)
    assert job is not None and job.framework.loss == load_framework("torchtitan").loss


def test_a_step_decides_where_the_first_one_needs_as_much() -> None:
    assert find_deciding_phase(forecast(optimizer="sgd").play).is_step


def test_whole_weights_may_decide_while_they_are_loaded() -> None:
    model = {"layers": 12, "hidden": 4096, "heads": 8, "ffn": 16384, "vocab": 1024, "seq": 128}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 64}}
    ways = ("compute", "fp32", "shards")
    whole, cast, shards = (forecast(**job, traits={"memory": {"loads": way}}) for way in ways)
    parameters = whole.play.plan.job.model.parameters
    assert totals(whole)["loading"] == pytest.approx(2 * parameters)
    assert totals(cast)["loading"] == pytest.approx(4 * parameters)
    assert totals(shards)["loading"] == pytest.approx(2 * parameters / 64, rel=1e-1)
    assert whole.peak_allocated == totals(whole)["loading"] > shards.peak_allocated


def test_forecasts_keep_their_phases_when_they_are_pickled() -> None:
    report = forecast(run={"evaluation": {"micro": 2}})
    assert list_phases(pickle.loads(pickle.dumps(report.play))) == list_phases(report.play)


@pytest.mark.parametrize(("saves", "whole"), [("shards", 0), ("modules", 2 * 32000), ("units", 4 * (32000 + 512))])
def test_saving_holds_the_weights_that_it_gathers(saves: str, whole: int) -> None:
    """The table of the vocabulary in 16 bits; or it and that of positions, which are one unit, in 32."""
    report = forecast(traits={"memory": {"saves": saves}})
    assert totals(report)["checkpoint"] - sum(report.play.resting[0].values()) == whole * 1024


def test_programs_save_as_their_code_does() -> None:
    kinds = {name: load_framework(name).memory.saves for name in framework_names()}
    gathering = {"hf-trainer", "axolotl", "llama-factory", "llm-foundry"}
    assert {name for name, kind in kinds.items() if kind != "shards"} == gathering


SLOW_NETWORK: dict[str, Any] = {
    **{"gpu": "a100-sxm-80", "gpus": 16, "gpus_per_node": 1},
    "inter": {"kind": "ethernet", "gbps_per_gpu": 1},
}


def test_stage_3_reserves_what_its_host_has_freed_before_the_gpu_used_it() -> None:
    """DeepSpeed reserves all weights that a forward pass gathers, and gradients of buckets where a backward pass frees
    fewer activations; nothing where gathers or the host are slower than kernels."""

    def cached(cluster: Any = "dgx-a100:1", recompute: str = "none", **traits: Any) -> float:
        report = forecast(
            **{"model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 1024, "seq": 4096}, "cluster": cluster},
            **{"batch": {"global": 64, "micro": 4, "sequence": 4096}, "plan": {"zero": 3, "recompute": recompute}},
            framework={"name": "deepspeed", "set": traits},
        )
        return heights_of_devices(report.play)[0][1] / 2 / report.play.plan.job.model.parameters

    assert cached() == pytest.approx(1, rel=0.02)
    assert 1.2 < cached(recompute="full") < 2
    assert cached(memory={"frees_behind": False}) == cached(overlap={"sharded_weights": False}) == 0
    assert cached(launch_s=0.01) == cached(SLOW_NETWORK) == 0

"""Memory of a GPU: loss, root unit of FSDP, unread results of recomputation, remainders of weights, cached blocks."""

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report

HIDDEN, VOCAB, TOKENS, LAYERS = 256, 65536, 1024, 4
PARAMETERS_OF_TABLE = VOCAB * HIDDEN


def report(
    plan: dict[str, Any], gpus: int = 1, name: str = "torchtitan", release: str | None = None,
    shared_work: SharedWork | None = None, **settings: Any,
) -> Report:  # fmt: skip
    """A small model whose peak is in the backward pass of the loss: its vocabulary is 256 times its hidden size."""
    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": 2, "ffn": 4 * HIDDEN, "gated": True, "tied": False}
    model = {**shape, "vocab": VOCAB, "seq": TOKENS, "norm": "rmsnorm", "positions": "rope"}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": gpus, "gpus_per_node": 8}, "plan": plan}
    job["framework"] = {"name": name, "release": release, "set": settings}
    return simulate({**job, "batch": {"global": gpus, "micro": 1, "sequence": TOKENS}}, shared_work=shared_work)


def loss(peak: int, sharded_peak: int = 0) -> dict[str, int]:
    return {"forward": 22, "backward": 18, "kept": 4, "peak": peak, "sharded_peak": sharded_peak}


def test_the_loss_holds_its_temporaries_in_the_backward_pass() -> None:
    """Log-softmax, the gradient of the log-likelihood and that of the log-softmax: three fp32 numbers a logit. Without
    temporaries log-softmax and the gradient of the logits in bf16."""
    unfused, fused = (report({}, loss=loss(peak)).peak_allocated for peak in (12, 6))
    assert unfused - fused == (12 - 6) * TOKENS * VOCAB
    assert report({}, loss=loss(0)).peak_allocated == fused


def test_a_sharded_loss_has_a_peak_of_its_own() -> None:
    plan = {"tp": 2, "sequence_parallel": False}
    heterogeneous, alike = (report(plan, 2, loss=loss(12, sharded)).peak_allocated for sharded in (16, 0))
    assert heterogeneous - alike == (16 - 12) * TOKENS * VOCAB / 2
    assert report({}, loss=loss(12, 16)).peak_allocated == report({}, loss=loss(12)).peak_allocated


def test_the_root_unit_of_fsdp_stays_gathered() -> None:
    """Sharded fp32 weights; whole in bf16 embedding, final norm and output layer, behind whose loss the last layer is
    gathered."""
    plan = {"mesh": {"dp": 2}, "schemes": [{"use": "data/fsdp", "over": "dp"}]}
    shared_work = SharedWork()
    stays, freed = (report(plan, 2, shared_work=shared_work, root_stays_gathered=word) for word in (True, False))
    peaks = [dict(report.play.peaks[0].by) for report in (stays, freed)]
    states = 4 * stays.job.model.parameters / 2
    root = 2 * PARAMETERS_OF_TABLE + HIDDEN
    assert peaks[0]["parameters"] == states + 2 * root
    assert peaks[1]["parameters"] < peaks[0]["parameters"]
    assert stays.step_time <= freed.step_time  # one all-gather less


def test_results_that_no_backward_pass_reads_are_stored_without_a_compiler() -> None:
    """Of the seven products of a layer, the first, third, fifth and seventh are kept; nothing reads the seventh."""
    scheme = {"use": "memory/recompute-operators", "early_stop": True}
    plan = {"mesh": {}, "schemes": [scheme]}
    shared_work = SharedWork()
    eager, compiled = (report(plan, shared_work=shared_work, compile=word).peak_allocated for word in (False, True))
    assert eager - compiled == LAYERS * 2 * TOKENS * HIDDEN


def test_nemo_keeps_remainders_of_weights_until_nemo_2() -> None:
    """2 bytes a parameter instead of 4; with fp16, which is not the upper half of fp32, a whole copy."""
    old, new = (report({}, name="nemo", release=month) for month in ("2024-07", "2025-01"))
    optimizer = [report.play.peaks[0].by["optimizer"] / report.job.model.parameters for report in (old, new)]
    assert optimizer == [10, 12]
    fp16 = report({}, name="nemo", release="2024-07", weights="fp16")
    assert fp16.play.peaks[0].by["optimizer"] == 12 * fp16.job.model.parameters


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("share", [1.1, 1e2])
def test_cached_blocks_end_at_the_capacity(share: float, expandable: bool) -> None:
    """In segments that grow, states have what they take, and gradients, which are made on a stream of their own."""
    found = report({}, memory={"reserved_share": share, "context_gib": 2.0, "expandable": expandable})
    room, gradients = found.usable[0] - 2 * 2**30, found.play.peaks[0].cached
    apart = sum(found.play.resting[0].values()) + gradients if expandable else 0.0
    reserved = apart + share * (found.peak_allocated + gradients - apart)
    assert found.peak_reserved == pytest.approx(min(room, reserved))
    assert found.fits and found.peak_device <= found.usable[0] < found.capacity


def test_tensors_that_exceed_the_capacity_do_not_fit() -> None:
    found = report({}, memory={"reserved_share": 1.5, "context_gib": 79.0})
    assert not found.fits
    assert found.peak_device == found.peak_allocated + 79 * 2**30


def test_the_gradient_of_the_embedding_is_made_whole_beside_the_accumulated_one() -> None:
    """In bf16 at the end of the backward pass, also where GEMMs accumulate the gradients of linear layers."""
    stage = report({"pp": 2}, 2, name="megatron-core").play.peaks[0]
    gradient = TOKENS * HIDDEN * 2
    assert stage.by["workspace"] == 2 * PARAMETERS_OF_TABLE + gradient


@pytest.mark.parametrize(("gated", "more"), [(True, 1), (False, 0)])
def test_swiglu_of_megatron_before_2024_also_saves_the_factor_of_the_gate(gated: bool, more: int) -> None:
    model = {"preset": "llama2-7b", "layers": LAYERS, "gated": gated, "seq": TOKENS}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1, "micro": 1}}
    frameworks = [{"name": "megatron-core", "release": release} for release in ("2023-12", "2024-03")]
    reports = [simulate({**job, "framework": framework}) for framework in frameworks]
    kept = [report.play.peaks[0].by["activations"] for report in reports]
    assert kept[0] - kept[1] == more * 2 * LAYERS * TOKENS * 11008

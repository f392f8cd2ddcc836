"""Habits of plain PyTorch: gradients made aside, gradients exchanged behind weight gradients, FSDP2's buffers."""

import itertools
import math
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Collective, Gemm, Memory, Op
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.memory_profile import CATEGORIES

JOB: dict[str, Any] = {
    "model": "llama3.2-1b", "cluster": {"gpu": "h100-sxm", "gpus": 2, "gpus_per_node": 8},
    "framework": {"name": "reference"}, "batch": {"global": 4, "micro": 1, "sequence": 1024},
    "plan": {"tp": 2, "sequence_parallel": False},
}  # fmt: skip


def job(plan: dict[str, Any], **framework: Any) -> dict[str, Any]:
    return {**JOB, "plan": plan, "framework": {"name": "reference", "set": framework}}


def ops(job: dict[str, Any]) -> list[Op]:
    """Of one rank's stage, each unit as often as it stands there."""
    stages, _ = lower_stages(resolve_plan(load_job(job)))
    found = []
    for unit_run in stages[0].unit_runs:
        found += [op for op in (*unit_run.fragment.forward, *unit_run.fragment.backward) for _ in range(unit_run.count)]
    return found


def moved(every: list[Op], name: str) -> float:
    return sum(op.work.bytes for op in every if isinstance(op.work, Memory) and op.name.startswith(name))


PLAIN = {"tp": 1, "dp": 2, "zero": 0}


def test_gradients_made_aside_are_added_once_each() -> None:
    temporary_gradient_work, fused = ops(job(PLAIN)), ops(job(PLAIN, fused_gradients=True))
    plan = resolve_plan(load_job(job(PLAIN)))
    weights = plan.job.model.parameters
    tied = plan.model_parts.vocab * plan.job.model.hidden  # the table, whose gradient the output layer makes once more
    assert moved(temporary_gradient_work, "add w") == 3 * 2 * (weights + tied) and moved(fused, "add w") == 0
    products = {op.work.accumulate for op in temporary_gradient_work if isinstance(op.work, Gemm) and op.phase == "W"}
    assert products == {False}
    assert {op.work.accumulate for op in fused if isinstance(op.work, Gemm) and op.phase == "W"} == {True}
    flops = [sum(op.work.flops for op in ops_ if op.work) for ops_ in (temporary_gradient_work, fused)]
    assert flops[0] == flops[1]


def test_gradients_accumulated_in_a_wider_format_are_converted_first() -> None:
    """18 bytes a parameter: the conversion reads 2 and writes 4, the addition reads 8 and writes 4."""
    narrow, wide = ops(job(PLAIN)), ops(job(PLAIN, gradients="fp32"))
    added = moved(narrow, "add w")
    assert moved(wide, "add w") == 2 * added and moved(wide, "convert w") == added and not moved(narrow, "convert w")
    wider, usual, fused = (simulate(job(PLAIN, **s)) for s in ({"gradients": "fp32"}, {}, {"fused_gradients": True}))
    assert wider.step_time > usual.step_time > fused.step_time and usual.peak_allocated > fused.peak_allocated


@pytest.mark.parametrize(("formats", "nbytes"), [
    ({}, 4),
    ({"gradients": "fp32"}, 0),
    ({"moments": "bf16"}, 0),
    ({"weight_remainders": True}, 0),
    ({"update": {"converts": False}}, 0),
])  # fmt: skip
def test_an_optimizer_whose_states_have_one_format_reads_gradients_in_it(formats: dict[str, Any], nbytes: int) -> None:
    usual = {"gradients": "bf16", "main_weights": "fp32", "moments": "fp32", "update": {"converts": True}}
    framework = load_framework("deepspeed", usual | formats)
    assert framework.update.make_workspace(framework, True, False, False).converted == nbytes


def test_sharded_gradients_are_added_as_shards() -> None:
    assert moved(ops(job({"dp": 2, "fsdp": True})), "add w") == 0


@pytest.mark.parametrize("sequence", [True, False])
def test_gradients_of_activations_may_wait_for_those_of_weights(sequence: bool) -> None:
    plan = {"tp": 2, "sequence_parallel": sequence}
    behind, during = ops(job(plan)), ops(job(plan, overlap={"gradients": True}))
    assert sorted(op.name for op in behind) == sorted(op.name for op in during)
    # Behind: no product of weights is issued between an exchange and the next op that waits for it.
    for every, hidden in ((behind, False), (during, True)):
        waiting = [
            isinstance(following.work, Gemm) and following.phase == "W" and op not in following.after
            for op, following in itertools.pairwise(every)
            if isinstance(op.work, Collective) and op.phase == "B"
        ]
        assert any(waiting) == hidden
    times = [simulate(job(plan, overlap={"gradients": word})).step_time for word in (False, True)]
    assert times[0] > times[1]


def test_alone_there_is_nothing_to_wait_for() -> None:
    plan = {"tp": 1, "dp": 2, "zero": 1}
    times = [simulate(job(plan, overlap={"gradients": word})).step_time for word in (False, True)]
    assert times[0] == times[1]


def test_fsdp_copies_gathered_weights_out_and_gradients_into_a_buffer() -> None:
    plan = {"dp": 2, "fsdp": True}
    separate, within = ops(job(plan)), ops(job(plan, gathers_apart=False))
    model = resolve_plan(load_job(job(plan))).job.model
    weights, table = model.parameters, model.vocab * model.hidden
    # Weights in bf16 are read and written in both passes, but for the table of both ends, which stays; gradients once.
    assert moved(separate, "copy params") == 2 * 2 * (2 * weights - table) and moved(within, "copy params") == 0
    assert moved(separate, "pack grads") == 2 * 2 * weights and moved(within, "pack grads") == 0
    reports = [simulate(job(plan, gathers_apart=word)) for word in (True, False)]
    # The largest buffer is that of the gradient of the table, in bf16.
    buffers = [report.play.memory(0)[1][:, CATEGORIES.index("buffers")].max() for report in reports]
    assert buffers == [2 * table, 0] and reports[0].step_time > reports[1].step_time


def test_a_unit_waits_for_its_own_weights_and_not_for_its_neighbours() -> None:
    copies = [op for op in ops(job({"dp": 2, "fsdp": True})) if op.name == "copy params"]
    gathered = [other.work for op in copies for other in op.after if isinstance(other.work, Collective)]
    # Only where a pass begins does a unit gather its own; all others' were on their way while the one before computed.
    assert len(copies) == 2 * 18 - 1 and len(gathered) == 2


def test_gradients_are_no_narrower_than_fp32_weights() -> None:
    job = {**JOB, "cluster": {"gpu": "cpu-core", "gpus": 2}, "precision": "fp32"}
    assert load_job(job).framework.gradients == "fp32"
    assert load_job({**job, "precision": {"compute": "fp32", "gradients": "bf16"}}).framework.gradients == "bf16"
    assert load_job(JOB).framework.gradients == "bf16"


@pytest.mark.parametrize(("mode", "kept"), [("lora", "fp32"), ("full", "bf16")])
def test_adapters_are_kept_in_the_format_of_their_program(mode: str, kept: str) -> None:
    stated = {"compute": "bf16", "gradients": "bf16", "main_weights": "bf16"}
    adapted = {**JOB, "plan": {}, "framework": "hf-trainer", "train": {"mode": mode}, "precision": stated}
    precision = load_job(adapted).precision
    assert (precision.gradients, precision.main_weights) == (kept, kept)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_compiler_fuses_the_kernels_of_adapters(compiles: bool) -> None:
    framework = {"name": "hf-trainer", "set": {"compile": compiles}}
    adapters = load_job({**JOB, "plan": {}, "framework": framework, "train": {"mode": "lora"}}).adapters
    assert adapters is not None and adapters.kernels.separate and adapters.kernels.eager is not compiles


@pytest.mark.parametrize(
    ("program", "compiles", "stops"),
    [("torchtitan", True, True), ("torchtitan", False, False), ("torchtune", False, True), ("xtuner", True, False)],
)
def test_recomputation_stops_early_where_its_program_does(program: str, compiles: bool, stops: bool) -> None:
    framework = {"name": program, "set": {"compile": compiles}}
    entries = load_job({**JOB, "plan": {"recompute": "full"}, "framework": framework}).plan.schemes
    (recompute,) = (entry for entry in entries if entry.use == "memory/recompute-full")
    assert (recompute.model_extra or {}).get("early_stop", False) is stops


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden"), [(32768, 128256, 4096), (16384, 32000, 4096), (3000, 50257, 768)]
)
def test_liger_cuts_logits_into_chunks_as_large_as_the_hidden_states(tokens: int, vocab: int, hidden: int) -> None:
    """Up to the next power of two of their tokens; a single chunk where the vocabulary is no larger."""
    count = load_framework("torchtitan", {"loss": {"chunk_tokens": "liger"}}).loss.count_chunks
    assert vocab / hidden / 2 <= count(tokens, vocab, hidden) <= math.ceil(vocab / hidden)
    assert count(tokens, hidden, hidden) == 1


@pytest.mark.parametrize("plan", [PLAIN, {"tp": 2}, {"dp": 2, "fsdp": True}, {"pp": 2, "tp": 1}])
def test_all_engines_agree_on_framework_settings(plan: dict[str, Any]) -> None:
    times = [simulate(job(plan), engine).step_time for engine in ("matrices", "sweep", "simpy")]  # type: ignore[arg-type]
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)


@pytest.mark.parametrize(("compute", "zero", "kept"), [("bf16", 1, "fp32"), ("bf16", 2, "bf16"), ("fp16", 1, "fp16")])
def test_whole_gradients_of_bf16_weights_alone_are_accumulated_in_fp32(compute: str, zero: int, kept: str) -> None:
    """BF16_Optimizer of DeepSpeed; its FP16_Optimizer, and ZeRO-2, accumulate in the format of the weights."""
    stated = {"framework": "megatron-deepspeed", "precision": {"compute": compute}, "plan": {"zero": zero}}
    assert load_job({**JOB, **stated}).precision.gradients == kept

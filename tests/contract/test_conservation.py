"""Conserved quantities of any plan: FLOPs, parameters, bytes between stages and of gradients, over all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshcast.simulator.ir.operators import Boundary
from meshcast.simulator.ir.ops import BYTES, Attention, Collective, Op
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.scheduling.schedule import ACTIVATION_TRANSFERS, MEETINGS, Action
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme
from meshcast.validation.contract.measure import backward_ops, forward_ops, params_of, side_ops_of
from meshcast.validation.contract.played import Played, copies_of, play_job, sent_between_stages, summed_over
from tests.strategies import EVERY, FREE, WHOLE, changed, examples, jobs, jobs_of_all


@examples(50)
@given(job=jobs_of_all(WHOLE, recompute=False))
def test_flops_are_conserved(job: dict[str, Any]) -> None:
    """All ranks do the model's products once forward; backward the GEMMs twice and fused attention 2.5 times."""
    played = play_job(job)
    wanted = played.wanted
    assert played.flops("F", dispatch=False) == pytest.approx(wanted, rel=1e-12)
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    assert played.flops("B", "W", dispatch=False) == pytest.approx(backward, rel=1e-12)
    assert played.flops("R") == {"gemm": 0, "attention": 0}


@examples(50)
@given(job=jobs(FREE))
def test_recomputed_flops_come_on_top(job: dict[str, Any]) -> None:
    """Memory schemes add work of phase R and change nothing of F, B and W."""
    schemes = job["plan"]["schemes"]
    kept = [entry for entry in schemes if not entry["use"].startswith("memory/")]
    played, bare = play_job(job), play_job({**job, "plan": {**job["plan"], "schemes": kept}})
    for phase in "FBW":
        assert played.flops(phase) == pytest.approx(bare.flops(phase), rel=1e-12)
    if len(kept) == len(schemes):
        assert sum(played.flops("R").values()) == 0


@examples(50)
@given(job=jobs(WHOLE, recompute=False), layers=st.integers(0, 2))
def test_full_recompute_does_the_layers_forward_pass_again(job: dict[str, Any], layers: int) -> None:
    """The first layers of every stage, whatever they are; embedding, output layer and predicted layers are not."""
    schemes = [*job["plan"]["schemes"], {"use": "memory/recompute-full", "layers": layers}]
    played = play_job({**job, "plan": {**job["plan"], "schemes": schemes}})
    again = {"gemm": 0.0, "attention": 0.0}
    for stage, stage_ops in enumerate(played.stages):
        left = layers
        for unit_run in stage_ops.unit_runs:
            if unit_run.name == "layer":
                for op in unit_run.fragment.forward:
                    kind = "attention" if isinstance(op.work, Attention) else "gemm"
                    flops = op.work.flops if op.work is not None else 0.0
                    again[kind] += min(left, unit_run.count) * flops * played.ranks * passes(played, stage)
                left -= min(left, unit_run.count)
    assert played.flops("R") == pytest.approx(again, rel=1e-12)


TIED: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "tied": True}


def tied_job(gpus: int, plan: dict[str, int], **model: Any) -> dict[str, Any]:
    """A model whose table lies at both ends."""
    cluster = {"gpu": "h100-sxm", "gpus": gpus}
    return {"model": TIED | model, "cluster": cluster, "batch": {"global": gpus}, "plan": plan}


@examples(100)
@given(job=jobs_of_all(EVERY))
@example(job=tied_job(8, {"pp": 2, "tp": 2, "chunks": 2}))
@example(job=tied_job(2, {"pp": 2}, mtp=1))
def test_any_step(job: dict[str, Any]) -> None:
    """Conserves parameters and bytes between stages, gives all memory back, and runs every action and op once."""
    played = play_job(job)
    parameters_are_conserved(played)
    bytes_between_stages_are_conserved(played)
    memory_returns_to_its_baseline(played)
    every_action_happens_once(played)


def parameters_are_conserved(played: Played) -> None:
    """Over all ranks: the model's parameters times the declared copies, and a table that both ends need twice."""
    plan = played.plan
    once = 0.0
    for stage in range(plan.shape.stages):
        for param in params_of(played.stage_ops(stage)):
            copies = copies_of(param, plan)
            assert param.size * played.ranks / copies == pytest.approx(param.total)
            once += param.size * played.ranks / copies
    model = plan.model_parts.model
    # Where several ways have stages of their own, each end lies on as many devices.
    alone = set(plan.model_parts.holders(plan.model_parts.count - 1)) - set(plan.model_parts.holders(0))
    copied = len(alone) * model.vocab * model.hidden if model.tied or model.mtp else 0
    assert once == pytest.approx(plan.schedule.directions * model.parameters + copied)


def memory_returns_to_its_baseline(played: Played) -> None:
    for peak in played.peaks:
        assert peak.left == 0
        assert peak.total == pytest.approx(sum(peak.by.values()))
        assert min(peak.by.values()) >= 0


ASIDE = (*ACTIVATION_TRANSFERS, *MEETINGS, "O")
"""Actions that are no passes."""


def every_action_happens_once(played: Played) -> None:
    plan, table, flat = played.plan, played.program.timetable, played.flat
    counts = Counter(action for action in table.actions if action.kind not in ASIDE)
    assert set(counts.values()) == {1}
    units: dict[int, int] = {}
    for stage in range(plan.shape.stages):
        passing = [
            (k, part)
            for k in plan.schedule.microbatches(plan.passes.played_shape, stage)
            for part in range(plan.shape.slices)
        ]
        units[stage] = len(passing)
        for k, part in passing:
            done = [kind for kind in ["F", "BW", "B", "W", "R"] if Action(stage, kind, k, part) in counts]
            assert done[0] == "F" and [kind for kind in done[1:] if kind != "R"] in (["BW"], ["B", "W"])
    assert sum(units.values()) == sum(1 for action in counts if action.kind == "F")
    # All actions together run all ops of their stages, of every pass and layer.
    ran = Counter(flat.ops[at] for number in range(len(table.actions)) for at in played.ops(number))
    wanted: Counter[Op] = Counter()
    for number, action in enumerate(table.actions):
        task = played.task(number)
        wanted.update(side_ops_of((*task.ahead, *task.behind)))
        if action.kind == "F":
            stage_ops = played.stage_ops(action.stage, action.slice)
            wanted.update((*forward_ops(stage_ops), *backward_ops(stage_ops)))
        elif action.kind in ASIDE:
            wanted.update(op for part in task.parts for op in part.block.ops)
    assert ran == wanted
    # Each op has a time of its own, after all that it waits for.
    times = played.times
    assert sorted(n for queue in flat.queues.values() for n in queue) == list(range(len(flat.ops)))
    for number, after in enumerate(flat.after):
        assert times.end[number] == pytest.approx(times.begin[number] + flat.seconds[number])
        for other in after:
            assert other < number
            assert times.begin[number] >= times.end[other] + flat.latency[other] - 1e-12


def test_key_and_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    """Eight ranks share two key/value heads: each holds one of them whole, four copies of each, and computes it."""
    model = {"layers": 1, "hidden": 64, "heads": 8, "kv_heads": 2, "vocab": 64, "seq": 16, "norm": "rmsnorm"}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 8}, "plan": {"tp": 8}}
    played = play_job(job)
    sizes = {param.name: param.size * 8 / param.total for param in params_of(played.stages[0])}
    assert (sizes["wq"], sizes["wk"], sizes["wv"], sizes["wo"]) == (1, 4, 4, 1)
    attention = [op.work for _, op in played.instances() if isinstance(op.work, Attention)]
    assert {(work.heads, work.kv_heads) for work in attention} == {(1, 1)}
    forward = forward_matmul_flops(played.plan.job.model, 16, 16, causal=True)
    surplus = 3 * 2 * 16 * 64 * (2 * 2 * 8)  # keys and values, two heads of eight elements, three copies too many
    assert sum(played.flops("F").values()) == pytest.approx(sum(forward.values()) + surplus)


def test_one_device_holds_a_tied_table_once() -> None:
    """Two chunks on one device: the table is there already, and its last chunk needs no copy of its own."""
    model = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "tied": True}
    schemes = [{"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 2}]
    plan = {"mesh": {"pp": 1}, "schemes": schemes}
    played = play_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "plan": plan})
    assert sum(param.size for param in played.list_held(0)) == played.plan.job.model.parameters


def passes(played: Played, stage: int) -> int:
    """How often a stage is passed forward, slice by slice."""
    plan = played.plan
    return len(plan.schedule.microbatches(plan.passes.played_shape, stage)) * plan.shape.slices


def boundaries(played: Played) -> dict[tuple[int, str], int]:
    """Bytes of one message that every crossing of a stage boundary must carry, per rank."""
    plan = played.plan
    assert plan.job.batch.sequence is not None
    tokens = plan.job.batch.micro * plan.job.batch.sequence // plan.shape.slices
    # A rank has its part of the samples, positions and elements that the schemes divide between units.
    border = Boundary("border", (plan.model_parts.architecture.residual,), (plan.model_parts.architecture.residual,))
    cut = {
        part for part, dim in Scope(plan.mesh, plan.stage_schemes).division(border).items() if dim in ("s", "h", "b")
    }
    if plan.job.framework.scatter_gather_tensors_in_pipeline:
        # Ranks that hold copies send a share each.
        cut |= {part for scheme in plan.family("tensor") for part in scheme.over}
    ranks = plan.mesh.size(cut - {part for scheme in plan.family("data") for part in scheme.over})
    each = tokens * plan.job.model.hidden * BYTES["bf16"] // ranks
    found = {}
    for stage in range(plan.shape.stages):
        for before in plan.schedule.predecessors(plan.shape, stage):
            if plan.model_parts.device(before) != plan.model_parts.device(stage):
                found[before, "F"] = found[stage, "B"] = each
    return found


def bytes_between_stages_are_conserved(played: Played) -> None:
    """A micro-batch sends b s h elements over every boundary each way, a rank its cut of the positions."""
    wanted = {key: [each] * passes(played, key[0]) for key, each in boundaries(played).items()}
    sent: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (stage, kind), messages in sent_between_stages(played).items():
        # What a pass has saved may move, too; its bytes are those of memory.
        if kind not in ACTIVATION_TRANSFERS:
            sent[stage, kind[0]] += messages
    assert sent == wanted


PLAIN = tuple(
    f"data/{name}" for name in ("ddp", "zero-1", "zero-2", "zero-3", "fsdp", "mics", "weight-update-sharding")
)
"""Data schemes whose gradients travel as they are, and by no clock."""


@examples(50)
@given(job=jobs(EVERY, datas=PLAIN), elements=st.sampled_from([1.0, 100.0, 3000.0, 1e12]))
def test_gradients_are_reduced_once(job: dict[str, Any], elements: float) -> None:
    """Every gradient byte of a rank is in exactly one bucket of one reduction over the ranks that hold the same weights
    and see other tokens: once a step, with sharded gradients once a micro-batch. Shards of weights that are stored
    whole are all-gathered once a step.
    """
    played = play_job(changed(job, bucket={"elements": elements, "elements_per_rank": 0.0}))
    plan = played.plan
    (data,) = plan.family("data")
    assert isinstance(data, DataScheme)
    # Without a flush once an update.
    updates = plan.passes.played_shape.m // plan.passes.update_interval if plan.passes.update_interval else 1
    for device in range(plan.shape.p):
        reduced, gathered, wanted, returned = (defaultdict[tuple[str, ...], int](int) for _ in range(4))
        for _, op in played.instances(device):
            if op.stream.startswith("data") and op.work is not None:
                assert isinstance(op.work, Collective)
                of = gathered if op.work.operation == "all_gather" else reduced
                of[op.work.axes] += op.work.nbytes
        cut = False
        stages = [stage for stage in range(plan.shape.stages) if plan.model_parts.device(stage) == device]
        for stage in stages:
            turns = played.weight_moves(stage)[1] if "gradients" in data.shards else updates
            for param in params_of(played.stage_ops(stage)):
                axes = summed_over(param, plan)
                if axes and plan.mesh.size(axes) > 1:
                    wanted[axes] += 4 * turns * param.size
                    cut |= bool(data.shards_at_rest("parameters", param))
                    if "optimizer" in data.shards:
                        returned[axes] += 2 * updates * param.size
        assert reduced == wanted
        # Without a flush what the last updates of a run have made comes together behind its end.
        if not cut and not plan.passes.update_interval:
            assert gathered == returned


@examples(50)
@given(job=jobs(EVERY, datas=("data/fsdp",)))
def test_whole_weights_are_gathered_for_every_pass(job: dict[str, Any]) -> None:
    """Of every unit before its forward and its backward pass; a table that the output layer borrows once."""
    played = play_job(job)
    plan = played.plan
    for device in range(plan.shape.p):
        gathered = sum(
            op.work.nbytes
            for _, op in played.instances(device)
            if isinstance(op.work, Collective) and op.stream == "data" and op.work.operation == "all_gather"
        )
        wanted = 0
        for stage in range(plan.shape.stages):
            stage_ops = played.stage_ops(stage)
            if plan.model_parts.device(stage) == device:
                borrowed = any(unit_run.fragment.shared_weights for unit_run in stage_ops.unit_runs)
                for number, unit_run in enumerate(stage_ops.unit_runs):
                    cut = [param for param in unit_run.fragment.params if plan.mesh.size(summed_over(param, plan)) > 1]
                    times = played.weight_moves(stage)[0]
                    if borrowed and plan.model_parts.of_stage(stage) == number == 0 and not stage_ops.whole_weights:
                        times //= 2
                    wanted += 2 * sum(param.size for param in cut) * times * unit_run.count
        assert gathered == wanted

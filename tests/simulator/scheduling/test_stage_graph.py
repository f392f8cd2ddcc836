"""Graphs of stages: models with branches, GraphPipe, and joins and forks in every engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.engine.peak_memory import peaks
from meshcast.simulator.engine.play import play
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Memory, Op, StageOps, Transfer, UnitRun
from meshcast.simulator.program.build import build
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.report.breakdown import breakdown
from meshcast.simulator.scheduling.schedule import Action, PipelineShape, Schedule, one_forward_one_backward
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import PAID, play_job, sent_between_stages, summed_over
from meshcast.validation.pipelines.cases import answer
from tests.simulator.engine.drawn_kinds import graph_entry, graph_jobs
from tests.simulator.engine.engines import WAYS
from tests.simulator.models.test_branches import EQUAL, branched
from tests.simulator.scheduling.schedules import make_schedule
from tests.strategies import SECONDS, examples


def job(plan: dict[str, Any], gpus: int, model: Any = EQUAL, **more: Any) -> dict[str, Any]:
    cluster, framework = {"gpu": "h100-sxm", "gpus": gpus}, {"set": {"dummy_gradients": False}}
    return {"model": model, "cluster": cluster, "framework": framework, "plan": plan, "batch": {"global": 8}, **more}


def joined(pp: int, *others: dict[str, Any], trunk: int = 1, **mesh: int) -> dict[str, Any]:
    """A plan of a graph of stages, with two branches."""
    return {"mesh": {"pp": pp, **mesh}, "schemes": [graph_entry(2, trunk), *others]}


# ---------------------------------------------------------------------------------------------- the schedule


def test_two_branches_of_two_stages_run_as_a_pipeline_of_three() -> None:
    found = answer({"schedule": "graphpipe", "p": 5, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1, "order": True})
    assert [" ".join(order) for order in found["order"]] == [
        "0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3",
        "1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3",
        "2F0 2F1 2F2 2BW0 2F3 2BW1 2BW2 2BW3",
        "3F0 3F1 3BW0 3F2 3BW1 3F3 3BW2 3BW3",
        "4F0 4BW0 4F1 4BW1 4F2 4BW2 4F3 4BW3",
    ]
    assert found["in_flight_b"] == [3, 2, 3, 2, 1]


@given(branches=st.integers(1, 4), d=st.integers(1, 4), trunk=st.integers(1, 4), m=st.integers(1, 12))
def test_every_stage_holds_one_more_than_its_successors(branches: int, d: int, trunk: int, m: int) -> None:
    """k_x from the last stage backwards (arXiv 2406.17145): one more than the largest of a stage's successors. With one
    branch it is 1F1B."""
    shape, schedule = PipelineShape(branches * d + trunk, m), make_schedule("graphpipe", branches=branches, trunk=trunk)
    k = dict.fromkeys(range(shape.p), 1)
    for stage in reversed(range(shape.p)):
        for other in schedule.predecessors(shape, stage):
            k[other] = max(k[other], k[stage] + 1)
    table, chain = timetable(schedule, shape), timetable(make_schedule("1f1b"), shape)
    for stage, order in enumerate(table.orders):
        forward, backward = ([Action(stage, kind, i) for i in range(m)] for kind in ("F", "BW"))
        assert order == one_forward_one_backward(forward, backward, k[stage] - 1)
    assert sum(not others for others in table.stages.predecessors) == branches
    assert [len(others) for others in table.stages.successors].count(0) == 1
    assert k[0] == d + trunk
    if branches == 1:
        assert (table.orders, table.need, table.sequence) == (chain.orders, chain.need, chain.sequence)
        assert not table.further_needs and not table.extra_results


@pytest.mark.parametrize(("branches", "trunk"), [(1, 1), (2, 1), (2, 3), (3, 1), (3, 2), (4, 4)])
def test_a_number_of_stages_that_does_not_fit_is_refused_with_one_that_does(branches: int, trunk: int) -> None:
    schedule = make_schedule("graphpipe", branches=branches, trunk=trunk)
    for p in range(1, 9):
        if p > trunk and (p - trunk) % branches == 0:
            schedule.check(PipelineShape(p, 4))
            continue
        with pytest.raises(PlanError) as refused:
            schedule.check(PipelineShape(p, 4))
        words = refused.value.remedy.replace(",", "").split()
        schedule.check(PipelineShape(int(words[2]), 4))
        if "trunk:" in words:
            make_schedule("graphpipe", branches=branches, trunk=int(words[-1])).check(PipelineShape(p, 4))


def test_a_join_takes_an_input_of_every_branch_and_sends_each_a_gradient() -> None:
    found = timetable(make_schedule("graphpipe"), PipelineShape(3, 2))
    number = {str(action): i for i, action in enumerate(found.actions)}
    named = {i: name for name, i in number.items()}
    for k in (0, 1):
        join, back = number[f"2F{k}"], number[f"2BW{k}"]
        assert [named[i] for i in (found.need[join], *found.further_needs[join])] == [f"0F{k}", f"1F{k}"]
        (second,) = found.extra_results[back]
        assert [found.need[number[f"{branch}BW{k}"]] for branch in (0, 1)] == [back, second]
    assert found.results == len(found.actions) + 2
    assert len(found.further_needs) == len(found.extra_results) == 2
    assert found.rounds is None


# --------------------------------------------------------------------------------- joins and forks, every engine


class Given(Schedule):
    """1F1B over any graph: a stage has one warm-up pass per stage that follows on its longest path."""

    name = "given"
    graph: list[tuple[int, ...]] = []

    def predecessors(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        return self.graph[stage]

    def device(self, shape: PipelineShape, stage: int) -> int:
        return stage

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        ahead = [0] * shape.p
        for stage in reversed(range(shape.p)):
            for other in self.graph[stage]:
                ahead[other] = max(ahead[other], ahead[stage] + 1)
        forward, backward = ([Action(device, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
        return one_forward_one_backward(forward, backward, ahead[device])


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """The predecessors of every stage: any earlier stages, in any order, or none."""
    found: list[tuple[int, ...]] = []
    for stage in range(draw(st.integers(1, 6))):
        earlier = st.lists(st.sampled_from(range(stage)), max_size=3, unique=True) if stage else st.just([])
        found.append(tuple(draw(earlier)))
    return found


def a_stage(times: tuple[float, float, float], starts: bool, ends: bool, nbytes: int) -> StageOps:
    """Forward a kernel and a collective before the output; backward one kernel, and one for gradients of weights."""
    entry, gradient = Op("in"), Op("gradient in", phase="B")
    forward = Op("f", work=Memory("f", int(8 * times[0]), 0), after=[entry])
    summed = Op("sum", "tensor", Collective("all_reduce", int(4 * times[1]), ("tp",)), [forward])
    inputs = Op("b", work=Memory("b", int(8 * times[1]), 0), after=[gradient], phase="B")
    weights = Op("w", work=Memory("w", int(8 * times[2]), 0), phase="W")
    marks = ({"x": entry}, {"y": summed}, {"y": gradient}, {"x": inputs})
    fragment = Fragment([forward, summed], [inputs, weights], *marks)
    return StageOps(
        [UnitRun("stage", fragment, 1, None if starts else "x", None if ends else "y", nbytes=nbytes, nbytes_in=nbytes)]
    )


@examples(100)
@given(
    graph=graphs(),
    m=st.integers(1, 8),
    data=st.data(),
    latency=st.sampled_from([0.0, 0.25, 3.0]),
    host=st.sampled_from([0.0, 0.125, 2.0]),
    overlap=st.booleans(),
)
def test_all_engines_agree_on_any_graph(
    graph: list[tuple[int, ...]], m: int, data: st.DataObject, latency: float, host: float, overlap: bool
) -> None:
    p = len(graph)
    schedule = Given(("pp",))
    schedule.graph = graph
    times = st.tuples(SECONDS, SECONDS, SECONDS)
    leads = {other for others in graph for other in others}
    sizes = [data.draw(st.integers(0, 24)) for _ in range(p)]
    stages = [a_stage(data.draw(times), not graph[i], i not in leads, sizes[i]) for i in range(p)]

    def price(work: Any) -> tuple[float, float, float]:
        return work.nbytes / 8 if hasattr(work, "nbytes") else work.bytes / 8, 0.1, isinstance(work, Transfer) * latency

    program = build(timetable(schedule, PipelineShape(p, m)), stages, price, None, overlap, host=host)
    steps = [play(program, engine, skip) for engine, skip in WAYS]
    for step in steps[1:]:
        assert step.span == pytest.approx(steps[0].span, rel=1e-9)
        for device in range(p):
            one, other = (breakdown(program, each.span, each.occupancy(device), device) for each in (step, steps[0]))
            assert one.parts == pytest.approx(other.parts, rel=0, abs=1e-9 * step.span)
        assert step.times.begin == pytest.approx(steps[0].times.begin, rel=1e-9, abs=1e-9)
    # On every edge each micro-batch sends one message of its sender's size forward, and one of that size back.
    flat = steps[0].flat
    edges = Counter((flat.device[number], receiver) for number, _, receiver in flat.sent)
    wanted = [(one, other) for other, others in enumerate(graph) for one in others]
    assert edges == dict.fromkeys([*wanted, *((other, one) for one, other in wanted)], m)
    for number, sender, receiver in flat.sent:
        work = flat.ops[number].work
        assert isinstance(work, Transfer) and (work.source, work.target) == (sender, receiver)
        assert work.nbytes == sizes[min(sender, receiver)]
    # No stage begins before the messages of all its predecessors have arrived.
    arrived: dict[tuple[str, int], float] = defaultdict(float)
    for number, _, receiver in flat.sent:
        name, end = flat.ops[number].name.removeprefix("send "), steps[0].times.end[number] + latency
        kind, k = ("F" if "F" in name else "BW"), name.partition("F")[2] or name.partition("BW")[2]
        key = f"{receiver}{kind}{k}", 0
        arrived[key] = max(arrived[key], end)
    for i, action in enumerate(program.timetable.actions):
        assert steps[0].times.begin[flat.first[i]] >= arrived[str(action), 0] - 1e-9
    assert all(peak.left == 0 for peak in peaks(program, [{}] * p))


# ------------------------------------------------------------------------------------------------- whole jobs


@given(job=graph_jobs(recompute=False))
def test_a_graph_conserves_flops_and_parameters(job: dict[str, Any]) -> None:
    run = play_job(job, engine="matrices")
    wanted = run.wanted
    assert run.flops("F") == pytest.approx(wanted, rel=1e-12)
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    assert run.flops("B", "W") == pytest.approx(backward, rel=1e-12)
    (tensor,) = run.plan.family("tensor")
    once = 0.0
    for param in (param for stage in run.stages for param in params_of(stage)):
        cut = set(tensor.over) & set(param.partial) or param.size < param.total
        copies = run.plan.mesh.size(param.partial) * (1 if cut else run.plan.mesh.size(tensor.over))
        once += param.size * run.ranks / copies
    model, ranks = run.plan.model_parts.model, run.plan.mesh.size(tensor.over)
    shares_heads = any(ranks > (tower.kv_heads or tower.heads) for tower in (model, *model.branches))
    assert once == pytest.approx(model.parameters) or (shares_heads and once > model.parameters)


@examples(25)
@given(job=graph_jobs())
def test_a_branch_sends_its_own_part_of_a_sequence(job: dict[str, Any]) -> None:
    """And gets a gradient of that size back from the join."""
    run = play_job(job, engine="matrices")
    plan, shape = run.plan, run.plan.shape
    assert plan.job.batch.sequence is not None
    whole = plan.job.batch.micro * plan.job.batch.sequence * plan.job.model.hidden * BYTES["bf16"]
    sp = any(scheme.use == "tensor/megatron-sp" for scheme in plan.stage_schemes)
    shared = sp or plan.job.framework.scatter_gather_tensors_in_pipeline
    each = whole // plan.mesh.size("cp") // (plan.mesh.size("tp") if shared else 1)
    wanted: dict[tuple[int, str], list[int]] = {}
    trunk = getattr(plan.schedule.options, "trunk", 1)
    for stage, other in ((a, b) for b in range(shape.stages) for a in plan.schedule.predecessors(shape, b)):
        nbytes = each if stage >= shape.p - trunk else each // len(plan.job.model.branches)
        for key in ((stage, "F"), (other, "BW")):
            wanted[key] = wanted.get(key, []) + [nbytes] * shape.m
    assert sent_between_stages(run) == wanted


@examples(40)
@given(job=graph_jobs(), bucket=st.sampled_from([1.0, 3000.0, 1e12]))
def test_gradients_of_a_graph_are_reduced_once(job: dict[str, Any], bucket: float) -> None:
    """And sharded weights are all-gathered for every pass, also where a branch's embedding has no unit before it."""
    framework = {**job["framework"]["set"], "bucket": {"elements": bucket, "elements_per_rank": 0.0}}
    run = play_job({**job, "framework": {**job["framework"], "set": framework}}, engine="matrices")
    plan = run.plan
    (data,) = plan.family("data")
    sharded = data.use == "data/fsdp"
    for device in range(plan.shape.p):
        found: dict[str, int] = Counter()
        for _, op in run.instances(device):
            if op.stream == "data":
                assert isinstance(op.work, Collective)
                found["gathered" if op.work.operation == "all_gather" else "reduced"] += op.work.nbytes
        stages = [stage for stage in range(plan.shape.stages) if plan.model_parts.device(stage) == device]
        sizes = {
            stage: sum(p.size for p in params_of(run.stage_ops(stage)) if plan.mesh.size(summed_over(p, plan)) > 1)
            for stage in stages
        }
        moves = {stage: run.weight_moves(stage) if sharded else (data.use == "data/zero-1", 1) for stage in stages}
        assert found["reduced"] == 4 * sum(moves[stage][1] * size for stage, size in sizes.items())
        assert found["gathered"] == 2 * sum(moves[stage][0] * size for stage, size in sizes.items())


def test_a_graph_is_as_deep_as_its_longest_path() -> None:
    """Each stage holds at most k_x micro-batches: k_x times the activations of one."""
    model = branched(layers=4) | {"layers": 2, "seq": 64}
    run, alone = (play_job(job(joined(5), 5, model, batch={"global": m}), PAID) for m in (8, 1))
    assert [[unit_run.name for unit_run in stage_ops.unit_runs] for stage_ops in run.stages] == [
        *[["embedding", "layer"], ["layer"]] * 2,
        ["join", "layer", "ending"],
    ]
    assert run.plan.layers == (2, 2, 2, 2, 2)
    for device, k in enumerate((3, 2, 3, 2, 1)):
        assert run.most_kept(device) == pytest.approx(k * alone.most_kept(device))


def test_both_branches_run_at_once() -> None:
    run = play_job(job(joined(3), 3, framework={"name": "megatron-core", "set": {"launch_s": 0.0}}), PAID)
    assert run.stages[0] is run.stages[1], "equal branches are lowered once"
    first = [run.ops(run.actions(device)[0]) for device in range(3)]
    begins, ends = ([times[ops[at]] for ops in first] for times, at in ((run.times.begin, 0), (run.times.end, -1)))
    assert begins[0] == begins[1] == 0 and ends[0] == ends[1]
    # The messages of both branches are sent at the same time: each device has links of its own.
    sent = [n for n, _, receiver in run.flat.sent if receiver == 2]
    arrival = max(run.times.end[n] for n in sent if run.flat.ops[n].name in ("send 0F0", "send 1F0"))
    assert begins[2] == pytest.approx(arrival) and arrival > ends[0]
    # Their gradients are sent one after the other, by one device.
    back = {run.flat.ops[n].name: n for n, sender, _ in run.flat.sent if sender == 2}
    assert len(back) == run.plan.shape.m
    shares = [n for n, sender, _ in run.flat.sent if sender == 2 and run.flat.ops[n].name == "send 2BW0"]
    assert len(shares) == 2 and run.times.begin[shares[1]] == pytest.approx(run.times.end[shares[0]])


def test_the_shipped_model_runs_on_a_graph() -> None:
    plan = joined(6, {"use": "data/zero-1", "over": "dp"}, trunk=2, dp=4)
    found = simulate(job(plan, 24, "two-towers-2.3b", batch={"global": 128})).play
    assert found.plan.layers == (8, 8, 8, 8, 4, 4)
    assert [found.peaks[i].by for i in (0, 1)] == [found.peaks[i].by for i in (2, 3)]
    # A layer of a branch has half the work of one of the trunk, so all but the first and last stages are equally busy.
    busy = [breakdown(found.program, found.step.span, found.step.occupancy(i), i).parts["gemm"] for i in range(5)]
    assert busy == pytest.approx([busy[0]] * 5, rel=0.2)

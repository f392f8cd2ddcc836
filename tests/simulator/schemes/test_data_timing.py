"""Step times of data-parallel ranks: bounds of every scheme, and closed forms of some."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.capabilities import HoldsStates
from meshcast.simulator.ir.ops import COMPUTE, Collective, HostLaunch, Memory, Op, Work
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.program import Program
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.measure import sent_bytes
from meshcast.validation.contract.played import FREE, Ideal, Played, play_job, summed_over
from tests.simulator.schemes.small_jobs import GPT, job_on
from tests.strategies import examples

ONE_AXIS = [use for use in scheme_names() if use.startswith("data/") and getattr(find_scheme(use), "least_axes", 0) < 2]
"""The data schemes that can be over a single axis."""


def job(use: str, n: int = 4, batches: int = 1, overlap: bool = True, **options: Any) -> dict[str, Any]:
    """`batches` micro-batches on each of `n` ranks, at a host that takes no time."""
    framework = {"set": {"launch_s": 0.0, "step_overhead_s": 0.0, "overlap": {"dp": overlap}}}
    return job_on({"dp": n}, {"use": use, "over": "dp", **options}, samples=n * batches, framework=framework)


def busy(played: Played, communication: bool) -> float:
    """Seconds of all kernels, or of all collectives."""
    return sum(
        played.flat.seconds[number]
        for number, op in played.instances()
        if isinstance(op.work, Collective) == communication and op.work is not None
    )


unit_runs = st.sampled_from([1e6, 3e6, 1e7, 1e8])


@given(
    use=st.sampled_from(ONE_AXIS),
    n=st.sampled_from([2, 3, 8]),
    m=st.integers(1, 3),
    wire=unit_runs,
    overlap=st.booleans(),
)
@examples(60)
def test_a_step_takes_the_longer_of_both_at_least_and_their_sum_at_most(
    use: str, n: int, m: int, wire: float, overlap: bool
) -> None:
    """Computation and communication are streams of ops that only wait for each other."""
    played = play_job(job(use, n, m, overlap), Ideal(links=wire))
    by_stream: dict[str, float] = defaultdict(float)
    for number, op in played.instances():
        by_stream[op.stream] += played.flat.seconds[number]
    waits = sum(played.flat.latency)  # for ticks of a clock
    span = played.times.span
    assert max(by_stream.values()) * (1 - 1e-12) <= span <= (sum(by_stream.values()) + waits) * (1 + 1e-12)


def test_buckets_can_be_too_small_and_too_large() -> None:
    """Small ones pay the latency of a collective each, a single one hides behind nothing: the best lie in between."""

    def price(work: Work) -> tuple[float, float, float]:
        seconds, spread, latency = Ideal(links=4e6)(work)
        return seconds + 2e-3 * isinstance(work, Collective), spread, latency

    spans = []
    for elements in (1e3, 1e4, 1e5, 1e9):
        config = job("data/ddp")
        config["framework"]["set"]["bucket"] = {"elements": elements, "elements_per_rank": 0.0}
        spans.append(play_job(config, price).times.span)
    assert min(spans) < min(spans[0], spans[-1])


def test_one_rank_sends_nothing_and_all_schemes_that_do_not_offload_take_the_same_time() -> None:
    spans = {}
    for use in ONE_AXIS:
        played = play_job(job(use, 1))
        assert not any(isinstance(op.work, Collective) for _, op in played.instances())
        if find_scheme(use).offloaded_to is HoldsStates.offloaded_to:
            spans[use] = played.times.span
    assert len(spans) > 5 and len(set(spans.values())) == 1, spans


@pytest.mark.parametrize("use", [f"data/{name}" for name in ("ddp", "local-sgd", "weight-update-sharding", "zero-1")])
def test_without_overlap_a_step_of_late_reductions_is_the_sum(use: str) -> None:
    """Schemes that meet around the update alone hide nothing there."""
    for m in (1, 2, 3):
        played = play_job(job(use, 4, m, overlap=False))
        assert {op.phase for _, op in played.instances() if isinstance(op.work, Collective)} == {"U"}
        assert played.times.span == pytest.approx(busy(played, False) + busy(played, True))


# ------------------------------------------------------------------------------- sharding of the update


@given(n=st.sampled_from([2, 4, 8, 64, 1024]))
def test_a_cut_update_saves_all_but_one_part_of_its_time(n: int) -> None:
    """The optimizer, and the norm of the gradients that clips them; gradients are zeroed whole. So of a share s of a
    step it gains 1 / (1 - s + s/N): 1.8 times for 0.45 and many ranks (Google's Transformer of MLPerf 0.6).
    """
    whole, cut = (play_job(job(use, n, overlap=False), FREE) for use in ("data/ddp", "data/weight-update-sharding"))
    kernels = [i for i, op in whole.instances() if op.name in ("adam", "grad-norm") and op.work.flops == 0]  # type: ignore[union-attr]
    update = sum(whole.flat.seconds[i] for i in kernels)
    assert whole.times.span - cut.times.span == pytest.approx(update * (1 - 1 / n), rel=1e-3)


def test_gathered_states_cost_their_bytes_and_are_stored_whole() -> None:
    cut, whole = (play_job(job("data/weight-update-sharding", keep_state=k)) for k in ("sharded", "gathered"))
    parameters = cut.plan.job.model.parameters
    states = 12 * parameters
    one, other = (sent_bytes((op for _, op in played.instances()), played.plan.mesh) for played in (cut, whole))
    assert other - one == pytest.approx(3 / 4 * states)
    assert whole.resting(0)["optimizer"] == states == 4 * cut.resting(0)["optimizer"]
    adam = [{op.work for _, op in played.instances() if op.name == "adam"} for played in (cut, whole)]
    assert adam[0] == adam[1], "the update is cut in both"


# -------------------------------------------------------------------------------------------- Horovod


def on_data(played: Played) -> list[tuple[int, Op]]:
    """The ops on the data stream, in their order."""
    return [(number, played.flat.ops[number]) for number in played.flat.queues[0, "data"]]


@given(ticks=st.floats(0.5, 60.0), wire=unit_runs, m=st.integers(1, 3))
@examples(40)
def test_sums_begin_at_ticks_of_a_clock_that_the_backward_pass_starts(ticks: float, wire: float, m: int) -> None:
    ddp = play_job(job("data/ddp", 4, m), FREE)
    begin = ddp.times.begin[ddp.flat.first[2 * m - 1]]
    cycle = (ddp.times.span - begin) / ticks
    played = play_job(job("data/horovod", 4, m, cycle=cycle), Ideal(links=wire))
    agreed = played.flat.queues[0, "data-control"]
    assert 1 <= len(agreed) <= ticks + 1
    for number in agreed:
        ready = max(played.times.end[other] for other in played.flat.after[number])
        tick = ready + played.flat.latency[number] - begin
        assert tick / cycle == pytest.approx(round(tick / cycle), abs=1e-6)
        assert 0 <= played.flat.latency[number] <= cycle * (1 + 1e-9)
    reduced = sum(op.work.nbytes for _, op in on_data(played) if isinstance(op.work, Collective))
    assert reduced == 4 * played.plan.job.model.parameters
    copied = sum(op.work.bytes for _, op in on_data(played) if isinstance(op.work, Memory))
    assert copied <= 4 * reduced, "packed and unpacked once: each reads and writes"


@given(fusion=st.integers(0, 200_000))
@examples(30)
def test_fused_gradients_fit_into_the_buffer(fusion: int) -> None:
    played = play_job(job("data/horovod", 4, cycle=1.0, fusion=fusion), FREE)
    sizes = {4 * param.size for param in played.list_held(0)}
    works = [op.work for _, op in on_data(played) if isinstance(op.work, Collective)]
    assert all(work.nbytes <= fusion or work.nbytes in sizes for work in works)
    if fusion == 0:
        assert len(works) == len(played.list_held(0)) and len(on_data(played)) == len(works), "nothing is packed"
    assert sum(work.nbytes for work in works) == 4 * played.plan.job.model.parameters


def test_a_clock_reduces_each_gradient_over_the_ranks_that_see_other_tokens() -> None:
    """Gradients of experts over their copies alone."""
    schemes = {"use": "data/horovod", "over": "dp"}, {"use": "expert/all-to-all", "over": "ep"}
    model, views = {**GPT, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}, {"experts": {"edp": 2, "ep": 2}}
    played = play_job(job_on({"dp": 4}, *schemes, samples=4, model=model, views=views))
    reduced, wanted = (defaultdict[tuple[str, ...], int](int) for _ in range(2))
    for _, op in on_data(played):
        if isinstance(op.work, Collective):
            reduced[op.work.axes] += op.work.nbytes
    for param in played.list_held(0):
        wanted[summed_over(param, played.plan)] += 4 * param.size
    assert reduced == wanted and len(reduced) == 2


def test_of_a_slow_clock_one_sum_follows_its_first_tick() -> None:
    price = Ideal(links=1e7)
    alone = play_job(job("data/ddp", 1), price).times.span
    slow = play_job(job("data/horovod", 4, cycle=10 * alone), price)
    parameters, held = slow.plan.job.model.parameters, len(slow.list_held(0))
    backward = slow.times.begin[slow.flat.first[1]]
    copied = 2 * 8 * parameters / price.memory
    wanted = 10 * alone + (-(-held // 8) + 4 * parameters) / price.links + copied + update_of(slow)
    assert slow.times.span - backward == pytest.approx(wanted)


def update_of(played: Played) -> float:
    """Seconds of the update's kernels."""
    return sum(played.flat.seconds[i] for i, op in played.instances() if op.phase == "U")


def test_horovod_keeps_a_buffer_and_no_states_of_its_own() -> None:
    for n, nbytes in ((1, 0), (4, 5000)):
        one, other = play_job(job("data/ddp", n)), play_job(job("data/horovod", n, fusion=5000))
        assert other.peaks[0].total - one.peaks[0].total == nbytes
        assert other.peaks[0].by.get("buffers", 0.0) - one.peaks[0].by.get("buffers", 0.0) == nbytes


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 2 * 3 / 4),  # as a ring
        ({"servers": 1}, 2 * 4 * 3 / (16 + 4 - 2)),
        ({"servers": 4}, 1),
        ({"servers": 9}, 1),
        ({"servers": 2, "colocated": False}, 2),
    ],
)
def test_a_push_and_pull_takes_as_long_as_the_busiest_port(options: dict[str, Any], factor: float) -> None:
    """Theorem 1 of the paper, for four machines of one GPU and one bucket."""
    config = job("data/byteps", 4, **options)
    config["plan"] = {
        "mesh": {"across": 4, "within": 1},
        "schemes": [{"use": "data/byteps", "over": ["across", "within"], **options}],
    }
    played = play_job(config, Ideal(links=1e6))
    (pushed,) = [op.work for _, op in played.instances() if op.name == "push and pull"]
    assert isinstance(pushed, Collective) and pushed.operation == "push_pull"
    assert pushed.nbytes == pytest.approx(factor * 4 * played.plan.job.model.parameters, rel=1e-6)
    names = [op.name for _, op in sorted(played.instances(), key=lambda one: played.times.begin[one[0]])]
    steps = ["copy gradients", "push and pull", "copy sums", "adam"]
    assert [name for name in names if name in steps] == steps


DATA = [name for name in scheme_names() if name.startswith("data/")]


@pytest.mark.parametrize("use", DATA)
def test_side_ops_lie_on_one_stream_where_parameters_are_summed_over_different_axes(use: str) -> None:
    """Experts over nodes alone, all others inside nodes, too; the engines agree."""
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 256}
    config = {
        "model": {"layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 512, "seq": 128, "moe": moe},
        "cluster": "dgx-h100:2",
        "framework": {"name": "megatron-core", "rules": False},
        "batch": {"global": 16, "micro": 1},
        "plan": {"ep": 8, "dp_scheme": use.partition("/")[2]},
    }
    by_matrices, by_ops = (simulate(config, engine=engine) for engine in ("matrices", "sweep"))
    assert by_matrices.step_time == pytest.approx(by_ops.step_time, rel=1e-12)
    sides = [side for task in by_matrices.play.step.program.tasks for side in (*task.ahead, *task.behind)]
    assert all(len({op.stream for op in side.ops}) == 1 for side in sides)


# ------------------------------------------------------------------------------------------ local SGD


def of_a_period(job: dict[str, Any], price: Ideal) -> tuple[Report, list[Program]]:
    """A job of local SGD at ideal prices: the report, and its two kinds of steps."""
    plan = resolve_plan(load_job(job), price=price)
    both = [build_program(plan, price, periodic=periodic) for periodic in (True, False)]
    plays = [play_forecast(plan, stages, program) for stages, program in both]
    shares = 1 / plan.passes.period, 1 - 1 / plan.passes.period
    return Report(plays[0], list(zip(shares, plays, strict=True))), [program for _, program in both]


def met(program: Program) -> float:
    """Seconds of the collectives of one step."""
    found = 0.0
    for task, turns in program.turns():
        for part in task.parts:
            pairs = zip(part.block.ops, part.seconds, strict=True)
            found += turns * part.count * sum(s for op, s in pairs if isinstance(op.work, Collective))
    return found


@given(period=st.integers(1, 50), wire=unit_runs, m=st.integers(1, 3), moments=st.booleans())
@examples(40)
def test_a_step_of_local_sgd_computes_and_pays_its_part_of_an_average(
    period: int, wire: float, m: int, moments: bool
) -> None:
    average = "weights and moments" if moments else "weights"
    report, (rare, usual) = of_a_period(job("data/local-sgd", 4, m, period=period, average=average), Ideal(links=wire))
    nbytes = (12 if moments else 4) * report.job.model.parameters
    alone, _ = of_a_period(job("data/local-sgd", 1, m), Ideal())
    assert met(usual) == 0 and met(rare) == pytest.approx(nbytes / wire)
    assert report.seconds == pytest.approx(alone.seconds + met(rare) / period)
    assert sum(report.breakdown.parts.values()) == pytest.approx(report.seconds)


@pytest.mark.parametrize(("options", "width"), [({}, 4), ({"outer_gradients": "bf16"}, 2), ({"outer": "cpu"}, 4)])
def test_an_outer_step_pays_for_its_reduction_and_its_kernels(options: dict[str, Any], width: int) -> None:
    """Inner steps send nothing; the outer one also reads and writes the states of the outer optimizer."""
    wire = 1e6
    report, (rare, usual) = of_a_period(job("data/diloco", 4, period=7, **options), Ideal(links=wire))
    alone, _ = of_a_period(job("data/ddp", 1), Ideal())
    weights = report.job.model.parameters
    assert met(usual) == 0 and met(rare) == pytest.approx(width * weights / wire)
    assert report.seconds > alone.seconds + met(rare) / 7
    on_gpu = report.play.resting[0]["optimizer"] - 12 * weights
    assert on_gpu == pytest.approx(0 if options.get("outer") else 8 * weights)
    assert report.play.offloaded[0]["cpu"] == pytest.approx(8 * weights if options.get("outer") else 0)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 1), (3, 0), (3, 2), (4, 1), (6, 3)])
def test_fragments_send_as_much_in_a_period_as_all_weights(fragments: int, delay: int) -> None:
    """With a delay beside the steps, which are as long as alone where the wire is fast, but for their kernels."""
    options = {"period": 12, "fragments": fragments, "delay": delay, "outer_gradients": "fp4"}
    report, (rare, usual) = of_a_period(job("data/diloco", 4, **options), Ideal(links=1e12))
    period, weights = report.play.plan.passes.period, report.job.model.parameters
    assert period == max(1, 12 // (fragments * max(1, delay)))
    ops = [op for task in {*rare.tasks} for side in task.ahead for op in side.ops]
    ops += [op for update in rare.updates for part in update.parts for op in part.block.ops]
    assert bool(delay) == any(op.stream == "data-outer" for op in ops)
    sums = [op.work.nbytes for op in ops if op.name == "reduce outer gradients" and isinstance(op.work, Collective)]
    assert sum(sums) == pytest.approx(0.5 * weights * period / 12, rel=1e-3)
    assert period == 1 or not any(task.ahead for task in {*usual.tasks})
    on_gpu = report.play.resting[0]["optimizer"] - 12 * weights
    assert on_gpu == pytest.approx((8 + bool(delay) * 0.5 / fragments) * weights)


@pytest.mark.parametrize("slow", [0.5, 2.0])
def test_a_step_takes_the_longer_of_its_passes_and_of_the_reduction_beside_them(slow: float) -> None:
    """A fragment is sent in two parts, beside as many steps."""
    alone, _ = of_a_period(job("data/ddp", 1), Ideal())
    weights = alone.job.model.parameters
    options = {"period": 8, "fragments": 2, "delay": 2, "outer_gradients": "fp4"}
    wire = 0.5 * weights / 4 / (slow * alone.seconds)
    report, _ = of_a_period(job("data/diloco", 4, **options), Ideal(links=wire, memory=1e15))
    swift, _ = of_a_period(job("data/ddp", 1), Ideal(memory=1e15))
    longer = 0.5 * weights / 4 / wire
    assert report.seconds == pytest.approx((max(swift.seconds, longer) + swift.seconds) / 2, rel=1e-3)


@pytest.mark.parametrize("use", ["data/local-sgd", "data/diloco", "data/parallel-sgd"])
def test_ranks_of_a_worker_reduce_gradients_in_every_step_and_meet_with_a_share_each(use: str) -> None:
    config = job(use, 4, period=3)
    entry = {"use": use, "over": "dp", "within": "near", "period": 3}
    config["plan"] = {"mesh": {"dp": 2, "near": 2}, "schemes": [entry]}
    _, (rare, usual) = of_a_period(config, Ideal(links=1e6))
    weights = resolve_plan(load_job(config)).job.model.parameters
    sizes: list[dict[tuple[str, ...], int]] = []
    for program in (rare, usual):
        found: dict[tuple[str, ...], int] = defaultdict(int)
        sides = [side for task in {*program.tasks} for side in task.behind]
        works = [op.work for side in sides for op in side.ops]
        works += [op.work for update in program.updates for part in update.parts for op in part.block.ops]
        for work in works:
            if isinstance(work, Collective) and work.nbytes > 4:
                found[work.axes] += work.nbytes
        sizes.append(dict(found))
    assert sizes[1] == {("near",): 4 * weights}
    assert sizes[0] == {("near",): 8 * weights, ("dp",): 2 * weights}


def test_the_mean_of_a_whole_run_goes_to_one_rank_at_its_end() -> None:
    wire, run = 1e6, 1000
    report, (rare, usual) = of_a_period(job("data/parallel-sgd", 4, period=run), Ideal(links=wire))
    alone, _ = of_a_period(job("data/ddp", 1), Ideal())
    assert met(usual) == 0 and met(rare) == pytest.approx(4 * report.job.model.parameters / wire)
    assert report.seconds == pytest.approx(alone.seconds + met(rare) / run)


def test_sequence_ranks_of_a_worker_still_sum_their_gradients() -> None:
    """Along the axis of a sequence ranks see parts of the same samples: they are one worker."""
    config = job("data/local-sgd", 4, period=3)
    config["plan"] = {
        "mesh": {"dp": 2, "cp": 2},
        "schemes": [{"use": "data/local-sgd", "over": "dp"}, {"use": "sequence/all-gather", "over": "cp"}],
    }
    played = play_job(config)
    works = [op.work for _, op in played.instances() if op.stream == "data"]
    by_axis = {work.axes: 0 for work in works if isinstance(work, Collective)}
    for work in works:
        assert isinstance(work, Collective)
        by_axis[work.axes] += work.nbytes
    assert by_axis == dict.fromkeys([("cp",), ("dp",)], 4 * played.plan.job.model.parameters)


def test_workers_share_no_norm_of_gradients() -> None:
    played = play_job(job("data/local-sgd", 4))
    assert not [op for _, op in played.instances() if op.stream == COMPUTE and isinstance(op.work, Collective)]


def test_the_answer_is_the_mean_over_a_period() -> None:
    answers = {h: simulate(job("data/local-sgd", 8, 2, period=h)) for h in (1, 2, 1000)}
    steps = {h: answer.step_time for h, answer in answers.items()}
    assert steps[2] == pytest.approx((steps[1] + (1000 * steps[1000] - steps[1]) / 999) / 2, rel=1e-9)
    assert any("mean of 2 steps" in text for text in answers[2].assumed)
    parts = answers[2].to_dict()["breakdown_s"]
    total = sum(parts["compute"].values()) + sum(parts["exposed"].values())
    assert total + parts["bubble"] + parts["optimizer"] + parts["host"] + parts["idle"] == pytest.approx(steps[2])
    assert answers[1].play.peaks == answers[2].play.peaks
    assert inf > steps[1] > steps[2] > steps[1000]


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_write_the_bits_that_are_gathered(n: int) -> None:
    """A server reads the bits of all ranks and the error of its part of the momentum; it writes that error and a bit of
    each element."""
    works = {op.name: op.work for _, op in play_job(job("data/one-bit-adam", n)).instances()}
    sent, average, gathered = (works[f"{verb} bits"] for verb in ("exchange", "average", "gather"))
    assert isinstance(sent, Collective) and isinstance(average, Memory) and isinstance(gathered, Collective)
    error = average.read - sent.nbytes
    assert error == 4 * 8 * sent.nbytes / n and n * (average.write - error) == gathered.nbytes


def test_a_list_of_shards_takes_the_host_as_long_as_it_has_ranks() -> None:
    ranks, launch, of_a_shard = 8, 1e-7, 1e4
    times, numbers = list[float](), list[float]()
    for shard_launches in (0.0, of_a_shard):
        given = job("data/zero-3", ranks, overlap=False, persistence=0)
        given["framework"]["set"].setdefault("bucket", {})["shard_launches"] = shard_launches
        given["model"] = {**GPT, "layers": 1}
        given["framework"]["set"]["launch_s"] = launch
        times.append(simulate(load_job(given)).step_time)
        ops = [op for _, op in play_job(given).instances()]
        numbers = [op.work.number for op in ops if isinstance(op.work, HostLaunch)]
        of_passes = sum(isinstance(op.work, Collective) and op.phase != "U" for op in ops)
        assert len(numbers) == (of_passes if shard_launches else 0)
    assert set(numbers) == {ranks * of_a_shard}
    assert times[1] - times[0] == pytest.approx(len(numbers) * ranks * of_a_shard * launch, rel=0.01)

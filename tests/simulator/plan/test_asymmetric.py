"""Plans whose stages, or whose replicas, differ: equal ones are today's plans, different ones obey hand formulas."""

import random
from typing import Any

import pytest

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn, drawn_grid
from tests.jobs import on_gpus
from tests.simulator.plan.ideally import HOP, answers, pass_seconds, play_ideally

MODEL = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "seq": 1024}
MIXED = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}
_SCHEMES = ("pipeline/1f1b over pp", "data/zero-1 over dp", "tensor/megatron-sp over tp")
REPLICAS = on_gpus(16, {"dp": 4, "pp": 2, "tp": 2}, *_SCHEMES)["plan"]


def job(plan: dict[str, Any], batch: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "cluster": "dgx-h100:2", "plan": plan, "batch": batch, **more}


@pytest.mark.parametrize(
    ("stage", "schedule"),
    drawn_grid(
        [
            {"tp": 2, "dp": 4},
            {"tp": 2, "dp": 4, "zero": 0},
            {"tp": 2, "dp": 4, "zero": 3},
            {"tp": 1, "dp": 8, "fsdp": True},
            {"tp": 2, "dp": 2, "cp": 2},
            {"tp": 2, "dp": 4, "recompute": "full"},
            {"tp": 4, "dp": 2, "sequence_parallel": False},
        ],
        ["1f1b", "gpipe", "zb-h1"],
    ),
    ids=str,
)
def test_equal_stages_are_a_uniform_plan(stage: dict[str, Any], schedule: str) -> None:
    """To the bit: time, its parts, and memory."""
    microbatches = 64 // stage["dp"]
    uniform = job({"pp": 2, "schedule": schedule, **stage}, {"global": 64})
    stages = job({"schedule": schedule, "stages": [stage, stage]}, {"global": 64, "microbatches": microbatches})
    assert answers(stages) == answers(uniform)


def test_equal_stages_in_chunks_are_a_uniform_plan() -> None:
    stage = {"tp": 4, "dp": 2, "layers": [2, 2]}
    uniform = job({"pp": 2, "chunks": 2, "tp": 4, "dp": 2}, {"global": 64})
    assert answers(job({"chunks": 2, "stages": [stage, stage]}, {"global": 64, "microbatches": 32})) == answers(uniform)


def test_equal_replicas_are_a_uniform_plan() -> None:
    shared = {**REPLICAS, "replicas": [{"dp": 2, "microbatches": 16}, {"dp": 2, "microbatches": 16}]}
    assert answers(job(shared, {"global": 64})) == answers(job(REPLICAS, {"global": 64}))


def test_equal_classes_of_replicas_take_as_long_as_one() -> None:
    """Played as two pipelines that meet at the norm of the gradients."""
    plan = {**REPLICAS, "replicas": [{"dp": 2, "microbatches": 16}, {"dp": 2, "microbatches": 16}]}
    one = {"cluster": {"groups": [{"node": "dgx-h100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}}
    found, wanted = (simulate(job(each, {"global": 64}, **one)) for each in (plan, REPLICAS))
    assert len(found.play.plan.every_pipeline) == 2
    assert found.step_time == pytest.approx(wanted.step_time, rel=1e-12)


def test_two_list_heterogeneous_stages_take_as_long_as_the_formula() -> None:
    """1F1B of a fast stage before a slow one: f0 + m (f1 + b1) + b0 and two hops."""
    stages = [{"layers": 2, "tp": 4, "dp": 2}, {"layers": 6, "tp": 2, "dp": 4}]
    step = play_ideally(job({"stages": stages}, {"global": 64, "microbatches": 8}))
    f0, b0, f1, b1 = (pass_seconds(step)[stage, kind, 0] for stage in (0, 1) for kind in ("F", "BW"))
    assert f1 + b1 > f0 + b0
    assert step.span == pytest.approx(f0 + 8 * (f1 + b1) + b0 + 2 * HOP, rel=1e-12)


@pytest.mark.parametrize("counts", [(5, 19), (19, 5), (8, 8)])
def test_asymmetric_replicas_take_as_long_as_the_slower(counts: tuple[int, int]) -> None:
    """One replica of a single stage, one of two stages: both end with the norm of the gradients."""
    replicas = [
        {"microbatches": counts[0], "stages": [{"tp": 8}]},
        {"microbatches": counts[1], "stages": [{"tp": 4, "layers": 2}, {"tp": 4, "layers": 6}]},
    ]
    step = play_ideally(job({"replicas": replicas}, {"global": sum(counts)}))
    f, b, f0, b0, f1, b1 = (pass_seconds(step)[stage, kind, 0] for stage in (0, 1, 2) for kind in ("F", "BW"))
    assert step.span == pytest.approx(max(counts[0] * (f + b), f0 + counts[1] * (f1 + b1) + b0 + 2 * HOP), rel=1e-12)


def test_heterogeneous_shares_take_as_long_as_the_larger() -> None:
    plan = {**REPLICAS, "replicas": [{"dp": 1, "microbatches": 3}, {"dp": 3, "microbatches": 7}]}
    step = play_ideally(job(plan, {"global": 24}))
    f0, b0, f1, b1 = (pass_seconds(step)[stage, kind, 0] for stage in (0, 1) for kind in ("F", "BW"))
    assert step.span == pytest.approx(7 * (f1 + b1) + f0 + b0 + 2 * HOP)


@pytest.mark.parametrize("widths", [(4, 2), (2, 4)])
def test_meetings_have_names(widths: tuple[int, int]) -> None:
    """A tied table across tp 4 and tp 2 is one collective of two devices, and all devices meet for the norm."""
    stages = [{"layers": 4, "tp": tp, "dp": 8 // tp} for tp in widths]
    tied = {**MODEL, "tied": True}
    report = simulate(job({"stages": stages}, {"global": 64, "microbatches": 8}) | {"model": tied})
    assert [sorted(device for device, _ in meeting) for meeting in report.play.program.meetings] == [[0, 1], [0, 1]]
    updates = report.play.program.updates
    works = [updates[device].parts[0].block.ops[place].work for device, place in report.play.program.meetings[0]]
    assert works[0] == works[1] and works[0].ranks == (0, 8)
    rows = report.play.plan.model_parts.vocab
    assert works[0].nbytes == 4 * MODEL["hidden"] * rows // 2  # the widest shard, of tp 2


def test_shares_follow_the_speed() -> None:
    """A batch of B micro-batches over rates r1 and r2 takes B / (r1 + r2): an H100 node gets twice as many."""
    plan = on_gpus(16, {"dp": 2, "tp": 8}, "data/zero-1 over dp", "tensor/megatron-sp over tp")["plan"]
    even, fast = (
        simulate(job({**plan, "share": share}, {"global": 96}, cluster=MIXED, model="llama3-8b"))
        for share in ("even", "by-speed")
    )
    counts = [pipeline.shape.m for pipeline in fast.play.plan.pipelines]
    assert sum(counts) == 96 and counts[0] < counts[1]
    assert fast.step_time < even.step_time
    # Rates in micro-batches of the even plan's slower half, and what the shares say of the faster one.
    assert fast.step_time == pytest.approx(even.step_time * counts[0] / 48, rel=0.02)


def test_mfu_counts_every_gpu_by_its_peak() -> None:
    """As many FLOPs in half of the time are twice the MFU, whichever ranks they run on."""
    plan = on_gpus(16, {"dp": 2, "tp": 8}, "data/ddp over dp", "tensor/megatron over tp")["plan"]
    reports = [simulate(job({**plan, "share": share}, {"global": 64}, cluster=MIXED)) for share in ("even", "by-speed")]
    assert reports[0].mfu["palm"] * reports[0].step_time == pytest.approx(reports[1].mfu["palm"] * reports[1].step_time)
    peaks = {"dgx-a100": 312e12, "dgx-h100": 989.4e12}
    needed = reports[0].flops_per_token("palm") * reports[0].tokens
    mean = sum(peaks.values()) / 2
    assert reports[0].mfu["palm"] == pytest.approx(needed / (reports[0].step_time * 16 * mean), rel=2e-3)


def draw_stages(rng: random.Random, gpus: int, experts: bool) -> list[dict[str, Any]]:
    """Stages with drawn degrees on `gpus` GPUs. experts: whether the model has some, which ranks share."""
    found = []
    while gpus:
        size = rng.choice([n for n in (1, 2, 4, 8) if n <= gpus])
        tp = rng.choice([n for n in (1, 2, 4) if size % n == 0])
        cp = rng.choice([n for n in (1, 2) if size // tp % n == 0])
        stage = {"tp": tp, "cp": cp, "dp": size // tp // cp}
        stage |= {"sequence_parallel": rng.random() < 0.5, "recompute": rng.choice(["none", "none", "full"])}
        stage |= {"zero": rng.choice([0, 1, 1, 2, 3])}
        if experts:
            stage |= {"ep": rng.choice([n for n in (1, 2, 4) if size % n == 0]), "sequence_parallel": True}
        found.append(stage)
        gpus -= size
    return found


def draw_heterogeneous(seed: int) -> dict[str, Any]:
    """A job with heterogeneous stages, heterogeneous replicas, or both, on equal or on mixed nodes."""
    rng = random.Random(seed)
    layers = rng.choice([8, 16])
    model = {**MODEL, "layers": layers, "tied": rng.random() < 0.5}
    if experts := rng.random() < 0.3:
        model["moe"] = {"experts": 8, "top_k": 2, "expert_ffn": 512}
    cluster: Any = rng.choice(["dgx-h100:2", MIXED])
    kind = rng.choice(["stages", "stages", "shares", "asymmetric"])
    if kind == "shares":
        counts = [rng.randint(1, 6), rng.randint(1, 6)]
        plan = {**REPLICAS, "replicas": [{"dp": 2, "microbatches": n} for n in counts]}
        return draw_lengths(rng, job(plan, {"global": 2 * sum(counts)}, cluster=cluster, model=model), 1)
    schedule = rng.choice(["1f1b", "1f1b", "gpipe", "zb-h1"])
    if kind == "stages":
        stages = draw_stages(rng, 16, experts)
        while len(stages) > layers:
            stages = draw_stages(rng, 16, experts)
        batch = {"global": 8 * (m := rng.choice([1, 3, 8])), "microbatches": m}
        plan = {"schedule": schedule, "partition": "by-cost", "stages": stages}
        return draw_lengths(rng, job(plan, batch, cluster=cluster, model=model), 8)
    sides = [draw_stages(rng, 8, experts) for _ in range(2)]
    replicas = [{"microbatches": rng.randint(1, 6), "stages": stages} for stages in sides]
    batch = {"global": 8 * sum(replica["microbatches"] for replica in replicas)}
    plan = {"schedule": schedule, "partition": "by-cost", "replicas": replicas}
    return draw_lengths(rng, job(plan, batch, cluster=cluster, model=model), 8)


def draw_lengths(rng: random.Random, one: dict[str, Any], samples: int) -> dict[str, Any]:
    """The job, in one case of three with micro-batches of different lengths, as many as before, in a drawn order.

    samples: of a micro-batch, those of all ranks of a stage together where the plan counts them so.
    """
    if rng.random() < 2 / 3:
        return one
    lengths = [{"samples": samples * rng.choice([1, 2]), "sequence": rng.choice([256, 512, 1024])} for _ in range(3)]
    replicas = one["plan"].get("replicas")
    counts = [each["microbatches"] for each in replicas or [one["batch"]]]
    orders = [[rng.randrange(3) for _ in range(count)] for count in counts]
    used = sorted({number for order in orders for number in order})
    batch: dict[str, Any] = {"lengths": [lengths[number] for number in used]}
    orders = [[used.index(number) for number in order] for order in orders]
    if not replicas:
        return {**one, "batch": {**batch, "order": orders[0]}}
    own = [{**each, "microbatches": order} for each, order in zip(replicas, orders, strict=True)]
    return {**one, "plan": {**one["plan"], "replicas": own}, "batch": batch}


def check_engines_agree(seed: int) -> None:
    one, shared = draw_heterogeneous(seed), SharedWork()
    engines: tuple[Engine, ...] = ("matrices", "sweep", "simpy")
    matrices, sweep, simpy = (simulate(one, engine=engine, shared_work=shared) for engine in engines)
    for other in (sweep, simpy):
        assert other.step_time == pytest.approx(matrices.step_time, rel=1e-9)
        assert other.breakdown.parts == pytest.approx(matrices.breakdown.parts, rel=1e-6, abs=1e-9)
    assert 0 < matrices.hfu < 1 and matrices.mfu["causal"] <= matrices.mfu["palm"] < 1


@pytest.mark.parametrize("seed", drawn(range(6), keep=(3,)))
def test_engines_agree_on_heterogeneous_plans(seed: int) -> None:
    check_engines_agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 500))
def test_engines_agree_on_many_heterogeneous_plans(seed: int) -> None:
    check_engines_agree(seed)


def test_the_answer_names_the_same_plan() -> None:
    """The job of an answer, read again, is the same job."""
    for seed in range(12):
        one = load_job(draw_heterogeneous(seed))
        again = load_job(one.to_dict())
        assert again.plan == one.plan and again.batch == one.batch

"""Micro-batches of different lengths: equal ones are today's plans, different ones obey hand formulas and an own
replay."""

import random
from collections import defaultdict
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.scheduling.schedule import actions_of
from tests.draws import drawn
from tests.ideal_costs import IdealCosts
from tests.simulator.plan.ideally import HOP, answers, pass_seconds, play_ideally

MODEL = {"layers": 8, "hidden": 512, "heads": 16, "vocab": 32000, "seq": 1024}
FIVE = [{"samples": n, "sequence": length} for n, length in ((16, 64), (8, 128), (4, 512), (1, 1024), (1, 2048))]


def job(batch: dict[str, Any], plan: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "cluster": "dgx-h100:1", "plan": plan, "batch": batch, **more}


PLANS = [
    {"pp": 2, "tp": 2, "dp": 2}, {"pp": 4, "schedule": "gpipe", "dp": 2}, {"pp": 2, "chunks": 2, "tp": 2, "zero": 3},
    {"pp": 4, "schedule": "zb-h1", "recompute": "full"}, {"pp": 4, "schedule": "zb-auto"},
    {"pp": 4, "schedule": "dualpipe"}, {"pp": 4, "schedule": "bpipe", "dp": 2}, {"tp": 2, "fsdp": True},
]  # fmt: skip


@pytest.mark.parametrize("plan", drawn(PLANS, keep=2), ids=str)
def test_one_class_is_a_batch_of_equal_micro_batches(plan: dict[str, Any]) -> None:
    """To the bit: time, its parts, MFU and memory. Padding in a second class takes time and no credit."""
    full = {"samples": 2, "sequence": 512}
    classes = job({"lengths": [full], "order": [0] * 8}, plan)
    equal = simulate(job({"micro": 2, "sequence": 512, "global": load_job(classes).batch.total}, plan))
    assert answers(classes) == answers(equal)
    padded = simulate(job({"lengths": [full, {**full, "tokens": 512.0}], "order": [0, 1, 1, 0, 1, 0, 0, 1]}, plan))
    assert padded.step_time == pytest.approx(equal.step_time, rel=1e-12)
    assert [peak.by for peak in padded.play.peaks] == [peak.by for peak in equal.play.peaks]
    assert padded.tokens == equal.tokens * 3 // 4 and padded.hfu == pytest.approx(equal.hfu, rel=1e-12)
    assert padded.mfu["palm"] < equal.mfu["palm"] * 3 / 4


def test_one_class_is_a_batch_of_equal_micro_batches_on_list_heterogeneous_stages() -> None:
    stages = {"stages": [{"tp": 2, "dp": 2, "layers": 3}, {"tp": 4, "layers": 5}]}
    equal = job({"sequence": 512, "global": 32, "microbatches": 8}, stages)
    assert answers(job({"lengths": [{"samples": 4, "sequence": 512}], "order": [0] * 8}, stages)) == answers(equal)


def test_one_class_is_a_batch_of_equal_micro_batches_on_heterogeneous_replicas() -> None:
    def replicas(*shares: Any) -> dict[str, Any]:
        return {"pp": 2, "dp": 4, "replicas": [{"dp": 2, "microbatches": share} for share in shares]}

    equal = job({"micro": 2, "sequence": 512}, replicas(4, 8))
    classes = job({"lengths": [{"samples": 2, "sequence": 512}]}, replicas([0] * 4, [0] * 8))
    assert answers(classes) == answers(equal)


def test_model_flops_are_those_of_every_class() -> None:
    """MFU x step of a mixture is the sum over the classes alone."""
    plan = {"pp": 2, "tp": 4}

    def flops(order: list[int]) -> float:
        report = simulate(job({"lengths": [FIVE[i] for i in dict.fromkeys(order)], "order": _renumber(order)}, plan))
        return report.mfu["causal"] * report.step_time

    alone = sum(count * flops([i] * 4) / 4 for i, count in ((0, 3), (2, 1), (4, 2)))
    assert flops([0, 4, 0, 2, 4, 0]) == pytest.approx(alone, rel=1e-12)


def _renumber(order: list[int]) -> list[int]:
    return [[*dict.fromkeys(order)].index(i) for i in order]


@pytest.mark.parametrize("order", [[0, 1, 1], [1, 0, 0, 1, 0], [0] * 4 + [1] * 4], ids=str)
def test_two_stages_take_as_long_as_the_formula(order: list[int]) -> None:
    """1F1B of a fast stage before a slow one: f0 of the first, f1 + b1 of all, b0 of the last, and two hops."""
    classes = [{"samples": 3, "sequence": 512}, {"samples": 1, "sequence": 2048}]
    step = play_ideally(job({"lengths": classes, "order": order}, {"pp": 2, "tp": 4, "partition": [1, 7]}))
    seconds = pass_seconds(step)
    slow = sum(seconds[1, "F", k] + seconds[1, "BW", k] for k in order)
    wanted = seconds[0, "F", order[0]] + slow + seconds[0, "BW", order[-1]] + 2 * HOP
    assert seconds[1, "F", 0] != pytest.approx(seconds[1, "F", 1], rel=0.05)
    assert step.span == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", drawn(range(20), keep=4))
def test_random_orders_of_five_lengths_take_as_long_as_a_replay(seed: int) -> None:
    """Every pass begins when its device is free and its input has arrived."""
    rng = random.Random(seed)
    schedule, chunks = rng.choice([("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2)])
    p = rng.choice([2, 4])
    order = [*range(5), *rng.choices(range(5), k=rng.randrange(1, 6) * p)]
    order = order[: len(order) // p * p] if set(order[: len(order) // p * p]) == set(range(5)) else [*range(5), 0, 1, 2]
    rng.shuffle(order)
    plan = {"pp": p, "tp": 1, "schedule": schedule, "chunks": chunks}
    step = play_ideally(job({"lengths": FIVE, "order": order}, plan))
    table, seconds = step.program.timetable, pass_seconds(step)
    last, ends = p * chunks - 1, dict[tuple[int, str, int], float]()
    queues = [actions_of(items) for items in table.orders]
    free = defaultdict[int, float](float)
    while any(queues):
        before = len(ends)
        for device, queue in enumerate(queues):
            while queue:
                stage, kind, k, _ = queue[0]
                back = next((one for one in ("BW", "B") if kind == one), "")
                inputs = [(stage - 1, "F", k)] * (kind == "F" and stage > 0)
                inputs += [(stage + 1, back, k)] * bool(back and stage < last)
                if any(pass_ not in ends for pass_ in inputs):
                    break
                hops = (HOP * (table.stages.devices[pass_[0]] != device) for pass_ in inputs)
                arrived = max((ends[one] + hop for one, hop in zip(inputs, hops, strict=True)), default=0.0)
                free[device] = max(free[device], arrived) + seconds[stage, kind, order[k]]
                ends[stage, kind, k] = free[device]
                queue.pop(0)
        assert len(ends) > before
    assert step.span == pytest.approx(max(ends.values()), rel=1e-12)


@pytest.mark.parametrize("seed", drawn(range(12), keep=6))
def test_engines_agree_on_drawn_orders(seed: int) -> None:
    rng = random.Random(seed)
    plan = {**rng.choice(PLANS), "sequence_parallel": rng.random() < 0.5}
    lengths = [*FIVE[: rng.randrange(2, 6)]]
    order = [*range(len(lengths)), *rng.choices(range(len(lengths)), k=20)][: 20 if plan.get("pp") == 4 else 16]
    rng.shuffle(order)
    one = load_job(job({"lengths": lengths, "order": order}, plan))
    shared, engines = SharedWork(), ("matrices", "sweep", "simpy")
    found, *others = (simulate(one, engine, shared_work=shared) for engine in engines)  # type: ignore[arg-type]
    for other in others:
        assert other.step_time == pytest.approx(found.step_time, rel=1e-9)
        assert other.breakdown.parts == pytest.approx(found.breakdown.parts, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("i", drawn(range(5), keep=3))
def test_a_micro_batch_in_flight_takes_the_memory_of_its_class(i: int) -> None:
    """Under GPipe one more micro-batch adds what it adds to a batch of its class alone."""

    def peak(lengths: list[int]) -> float:
        order = _renumber(lengths)
        one = job(
            {"lengths": [FIVE[i] for i in dict.fromkeys(lengths)], "order": order}, {"pp": 4, "schedule": "gpipe"}
        )
        return simulate(one).play.peaks[0].by["activations"]

    assert peak([i, 2, 3, 4]) - peak([2, 3, 4]) == peak([i, i, i]) - peak([i, i])


def test_messages_are_those_of_their_class() -> None:
    plan = resolve_plan(load_job(job({"lengths": FIVE, "order": [0, 1, 2, 3, 4]}, {"pp": 2, "tp": 4})))
    program = build_program(plan, IdealCosts(1e12).estimate)[1]
    sent = {program.timetable.slots[slot].variant: send.work.nbytes for slot, send in program.sent}
    width, ranks = MODEL["hidden"], 4
    assert sent == {i: 2 * one["samples"] * one["sequence"] * width / ranks for i, one in enumerate(FIVE)}


def test_list_heterogeneous_stages_divide_the_sequences_of_every_class() -> None:
    classes = [{"samples": 4, "sequence": 512}, {"samples": 2, "sequence": 2048}]
    stages = [{"tp": 2, "dp": 2, "layers": 1}, {"tp": 4, "layers": 7}]
    step = play_ideally(job({"lengths": classes, "order": [0, 1, 1, 0]}, {"stages": stages}))
    seconds = pass_seconds(step)
    slow = sum(seconds[1, "F", k] + seconds[1, "BW", k] for k in (0, 1, 1, 0))
    assert step.span == pytest.approx(seconds[0, "F", 0] + slow + seconds[0, "BW", 0] + 2 * HOP, rel=1e-12)


def test_replicas_run_classes_of_their_own() -> None:
    """Both end with the norm of the gradients: the step takes as long as the slower replica alone."""
    orders = [[0, 1, 0], [1, 1, 2, 2]]
    classes = [FIVE[0], FIVE[2], FIVE[4]]

    def plan(*replicas: list[int]) -> dict[str, Any]:
        return {"pp": 2, "tp": 2, "replicas": [{"dp": 1, "microbatches": order} for order in replicas]}

    span = play_ideally(job({"lengths": classes}, plan(*orders))).span
    alone = [
        play_ideally(job({"lengths": [classes[i] for i in dict.fromkeys(order)]}, plan(*[_renumber(order)] * 2))).span
        for order in orders
    ]
    assert alone[0] < alone[1]
    assert span == pytest.approx(max(alone), rel=1e-12)
    report = simulate(job({"lengths": classes}, plan(*orders)))
    assert report.tokens == sum(classes[i]["samples"] * classes[i]["sequence"] for order in orders for i in order)


def test_asymmetric_replicas_run_classes_of_their_own() -> None:
    replicas = [
        {"microbatches": [0, 1], "stages": [{"tp": 4}]},
        {"microbatches": [1, 1, 0], "stages": [{"tp": 2}, {"tp": 2}]},
    ]
    report = simulate(job({"lengths": [FIVE[1], FIVE[2]]}, {"replicas": replicas}))
    assert report.tokens == 2 * 8 * 128 + 3 * 4 * 512
    assert simulate(report.job, "sweep").step_time == pytest.approx(report.step_time, rel=1e-9)


def test_every_class_runs_once_without_an_order() -> None:
    plan, three = {"pp": 2, "tp": 4}, FIVE[:3]
    assert answers(job({"lengths": three}, plan)) == answers(job({"lengths": three, "order": [0, 1, 2]}, plan))


@pytest.mark.parametrize(
    "plan", [{"pp": 2, "tp": 4}, {"pp": 2, "dp": 4, "replicas": [{"dp": 2, "microbatches": [0, 1]}] * 2}], ids=str
)
def test_the_long_form_is_the_same_job(plan: dict[str, Any]) -> None:
    classes = [{"samples": 2, "sequence": 512, "tokens": 700.5}, {"sequence": 1024, "documents": [100, 924]}]
    one = load_job(job({"lengths": classes}, plan))
    assert load_job({**one.to_dict(), "model": MODEL}) == one
    assert one.batch.total == (3 if "tp" in plan else 12)


def test_documents_of_a_class_keep_attention_within_them() -> None:
    plan = {"pp": 2, "tp": 4}
    whole, parts = ({"lengths": [{"sequence": 2048, **more}]} for more in ({}, {"documents": 256}))
    seconds = [simulate(job(one, plan)).breakdown.parts["attention"] for one in (whole, parts)]
    assert seconds[1] < seconds[0]

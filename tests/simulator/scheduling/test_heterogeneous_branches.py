"""Branches of different shapes on graphs of stages: different depths, degrees of their own, parts of a sequence."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Transfer
from meshcast.simulator.lowering.scatter_gather import has_backward
from meshcast.simulator.program.program import one_of
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import PipelineShape
from meshcast.validation.contract.played import PAID, play_job
from tests.draws import drawn_grid
from tests.simulator.plan.ideally import HOP, pass_seconds, play_ideally
from tests.simulator.scheduling.schedules import make_schedule
from tests.strategies import EVERY_EXAMPLE

VISION = {"name": "vision", "layers": 4, "hidden": 256, "heads": 4, "tokens": 128, "input_width": 48}
TEXT = {"name": "text", "layers": 0, "tokens": 128}
AUDIO = {"name": "audio", "layers": 2, "hidden": 128, "heads": 2, "input_width": 80, "projector": "mlp"}
MODEL = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512, "positions": "rope"}
HETEROGENEOUS = {**MODEL, "branches": [VISION, TEXT, AUDIO]}
"""Encoders of 128 and 256 tokens and 128 tokens of text in front of a trunk."""


def graph(*branches: int, trunk: int = 1) -> dict[str, Any]:
    return {"use": "graphpipe", "branches": list(branches), "trunk": trunk}


def job(
    stages: list[dict[str, Any]], schedule: Any, model: Any = HETEROGENEOUS, microbatches: int = 4
) -> dict[str, Any]:
    gpus = sum(one.get("dp", 1) * one.get("tp", 1) * one.get("cp", 1) for one in stages)
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "batch": {"global": 4 * microbatches, "microbatches": microbatches},
        "plan": {"schedule": schedule, "stages": stages},
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0, "dummy_gradients": False}},
    }


# ---------------------------------------------------------------------------------------------- the schedule


def test_every_stage_of_heterogeneous_branches_is_one_deeper_than_its_successor() -> None:
    table = timetable(make_schedule("graphpipe", branches=(3, 1), trunk=2), PipelineShape(6, 8))
    assert table.stages.predecessors == [(), (0,), (1,), (), (2, 3), (4,)]
    assert [[action.kind for action in order].index("BW") for order in table.orders] == [5, 4, 3, 3, 2, 1]


@pytest.mark.parametrize("m", [1, 5])
def test_heterogeneous_branches_take_as_long_as_the_formula(m: int) -> None:
    """Where the trunk is the slowest stage: the longer path there, m micro-batches of the trunk, and the path back."""
    model = {**MODEL, "layers": 16, "branches": [{**VISION, "layers": 4}, AUDIO]}
    step = play_ideally(job([{"tp": 1}] * 4, graph(2, 1), model, m))
    seconds = {(stage, kind): time for (stage, kind, _), time in pass_seconds(step).items()}
    there, back = (max(seconds[0, kind] + seconds[1, kind] + 2 * HOP, seconds[2, kind] + HOP) for kind in ("F", "BW"))
    assert seconds[3, "F"] > there - 2 * HOP
    assert step.span == pytest.approx(there + m * (seconds[3, "F"] + seconds[3, "BW"]) + back, rel=1e-12)


def test_equal_branches_in_a_list_are_those_of_a_number() -> None:
    model = {**MODEL, "branches": [{"layers": 2}] * 2}
    stages = [{"tp": 2}] * 5
    one, other = (simulate(job(stages, {"use": "graphpipe", "branches": n}, model)) for n in (2, [2, 2]))
    assert (one.step_time, one.mfu, one.breakdown.parts) == (other.step_time, other.mfu, other.breakdown.parts)


# -------------------------------------------------------------------------------------- degrees of their own


def test_a_trunk_receives_every_branch_at_its_place_of_the_sequence() -> None:
    """384 arriving tokens on four ranks of 96: vision is the first 128, audio the rest."""
    stages = [{"dp": 2}, {"tp": 2}, {"tp": 4}]
    play = simulate(job(stages, graph(1, 1))).play
    pairs = {}
    for number, sender, receiver in play.step.flat.sent:
        work = play.step.flat.ops[number].work
        assert isinstance(work, Transfer)
        pairs[sender, receiver] = work.pairs
    token = 4 * 512 * 2  # of a micro-batch of four sequences, in bf16
    received: dict[tuple[int, int], int] = defaultdict(int)
    for sender in (0, 1):
        for _, rank, nbytes in pairs[sender, 2]:
            received[sender, rank] += nbytes
    assert dict(received) == {
        (0, 4): 96 * token,
        (0, 5): 32 * token,
        **{(1, 5): 64 * token, (1, 6): 96 * token, (1, 7): 96 * token},
    }
    for sender in (0, 1):
        assert sorted((b, a, n) for a, b, n in pairs[sender, 2]) == sorted(pairs[2, sender]), "gradients come back"


def draw_job(seed: int) -> dict[str, Any]:
    """A model of heterogeneous branches on stages with drawn degrees."""
    rng = random.Random(seed)

    def branch(number: int) -> dict[str, Any]:
        found = {"layers": rng.randint(1, 4), "hidden": 64 * rng.choice([2, 4, 8]), "heads": 4}
        found |= {"tokens": 64 * rng.randint(1, 3), "projector": rng.choice(["linear", "mlp"])}
        kind = rng.choice([{"input_width": 48}, {"input_width": 48, "bidirectional": False}, {}])
        return {**found, **kind, "frozen": rng.random() < 0.25, "final_norm": rng.random() < 0.5}

    branches = [branch(number) for number in range(rng.randint(1, 3))]
    places = rng.randint(0, len(branches))
    every = [*branches[:places], {"layers": 0, "tokens": 64}, *branches[places:]][: rng.choice([99, len(branches)])]
    every = every if any(one["layers"] for one in every) else branches
    layered = [one for one in every if one["layers"]]
    model = {**MODEL, "layers": rng.randint(2, 6), "branches": every, "seq": sum(one["tokens"] for one in every)}
    stages = [rng.randint(1, one["layers"]) for one in layered]
    trunk = rng.randint(1, 2)
    degrees = [{"dp": rng.choice([1, 2, 4]), "tp": rng.choice([1, 2, 4])} for _ in range(sum(stages) + trunk)]
    for one in degrees:
        one |= {"sequence_parallel": rng.random() < 0.5, "zero": rng.choice([0, 1, 2, 3])}
        one |= {"recompute": rng.choice(["none", "none", "full"])}
    counts = [(one["layers"], n) for one, n in zip(layered, stages, strict=True)] + [(model["layers"], trunk)]
    layers = [layers // n + (i < layers % n) for layers, n in counts for i in range(n)]
    found = job(degrees, graph(*stages, trunk=trunk), model, rng.choice([1, 3, 8]))
    found["plan"]["partition"] = layers
    return found


@pytest.mark.parametrize("seed", range(300) if EVERY_EXAMPLE else (0, 2))
def test_engines_agree_on_heterogeneous_branches(seed: int) -> None:
    job, shared = draw_job(seed), SharedWork()
    engines: tuple[Engine, ...] = ("matrices", "sweep", "simpy")
    matrices, *others = (simulate(job, engine=engine, shared_work=shared) for engine in engines)
    for other in others:
        assert other.step_time == pytest.approx(matrices.step_time, rel=1e-9)
        assert other.breakdown.parts == pytest.approx(matrices.breakdown.parts, rel=1e-6, abs=1e-9)
    assert all(peak.left == 0 for peak in matrices.play.peaks)


# --------------------------------------------------------------------------------------------------- one mesh


@pytest.mark.parametrize(("tensor", "pp"), drawn_grid(["megatron", "megatron-sp"], [5, 1]))
def test_heterogeneous_branches_conserve_flops(tensor: str, pp: int) -> None:
    """Forward what the model needs; backward twice that, but for the gradients of inputs that are data."""
    first = {"use": "pipeline/graphpipe", "branches": [2, 1], "trunk": 2} if pp > 1 else {"use": "pipeline/1f1b"}
    schemes = [{**first, "over": "pp"}, {"use": "data/zero-1", "over": "dp"}, {"use": f"tensor/{tensor}", "over": "tp"}]
    plan = {"mesh": {"pp": pp, "dp": 2, "tp": 2}, "schemes": schemes}
    one = {"cluster": {"gpu": "h100-sxm", "gpus": 4 * pp}, "batch": {"global": 8, "micro": 1}, "plan": plan}
    run = play_job({**one, "model": HETEROGENEOUS, "framework": {"set": {"dummy_gradients": False}}}, PAID)
    wanted = run.wanted
    assert run.flops("F") == pytest.approx(wanted, rel=1e-12)
    inputs = 8 * 2 * (128 * 256 * 48 + 256 * 128 * 80) * (1 if tensor == "megatron-sp" else 2)
    backward = {"gemm": 2 * wanted["gemm"] - inputs, "attention": 2.5 * wanted["attention"]}
    assert run.flops("B", "W") == pytest.approx(backward, rel=1e-12)


def test_one_branch_of_layers_is_a_chain_with_the_trunk() -> None:
    """A border between stages may lie anywhere, and `by-cost` finds it."""
    model = {**MODEL, "branches": [{**VISION, "tokens": 256}, {**TEXT, "tokens": 256}]}
    chain = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "batch": {"global": 8}}
    even, by_cost = (simulate({**chain, "plan": {"pp": 2, "partition": word}}).play for word in ("even", "by-cost"))
    assert even.plan.layers == (6, 6) and by_cost.plan.layers[0] >= 6
    names = [[unit_run.name for unit_run in one_of(stage).unit_runs] for stage in lower_stages(even.plan)[0]]
    assert names == [["embedding", "layer", "projector", "join", "layer"], ["layer", "ending"]]


def test_a_frozen_branch_runs_forward_alone() -> None:
    """No gradients but those of its projector; nothing comes back between its stages."""
    frozen = {**HETEROGENEOUS, "branches": [{**VISION, "frozen": True}, TEXT, AUDIO]}
    stages = [{"tp": 1}] * 4
    found, whole = (simulate(job(stages, graph(2, 1), model)) for model in (frozen, HETEROGENEOUS))
    assert found.step_time < whole.step_time
    own, other = ([one_of(stage) for stage in lower_stages(report.play.plan)[0]] for report in (found, whole))
    assert [has_backward(stage) for stage in own] == [False, True, True, True] and has_backward(other[0])
    trained = [[p for p, _ in stage.params() if p.trained] for stage in own]
    assert [p.name for p in trained[0]] == [] and {p.name for p in trained[1]} == {"wproject", "bproject"}
    back = [op.work for op in found.play.step.flat.ops if op.name.startswith("send 1BW")]
    assert back and all(isinstance(work, Transfer) and work.nbytes == 0 for work in back)
    assert found.play.peaks[0].total < whole.play.peaks[0].total / 2


def test_a_ring_computes_bidirectional_attention() -> None:
    """It leaves no rank idle, whose help `dist-flash-attn` would ask for (tests/refusals)."""
    plan = {"mesh": {"cp": 2}, "schemes": [{"use": "sequence/ring", "over": "cp"}]}
    job = {"model": HETEROGENEOUS, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "batch": {"global": 2}, "plan": plan}
    assert simulate(job).step_time > 0

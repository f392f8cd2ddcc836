"""Shards of the vocabulary on all devices: orders of the paper's program, 1F1B's bubble, equal memory, messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.scheduling.schedule import ActionKind, PipelineShape, actions_of
from meshcast.simulator.scheduling.vocabulary import find_shards
from meshcast.validation.contract.played import Played, play_job
from meshcast.validation.pipelines.cases import ScheduleCase, replay
from tests.simulator.scheduling.schedules import make_schedule
from tests.strategies import SECONDS

PRINTED = {
    (
        1,
        0,
    ): "IF0 IF1 LF0 IF2 LF1 IF3 LF2 IF4 LF3 OF0 LF4 OB0 OF1 OB1 OF2 OB2 OF3 IF5 LB0 LF5 OB3 OF4 LB1 OB4 OF5 IB0 LB2 "
    "IB1 LB3 IB2 LB4 IB3 LB5 IB4 IB5 OB5",
    (
        1,
        3,
    ): "IF0 IF1 IF2 IF3 IF4 LF0 OF0 LF1 LB0 OB0 OF1 LF2 LB1 OB1 OF2 LF3 LB2 OB2 OF3 IF5 LF4 LB3 OB3 OF4 LF5 LB4 OB4 "
    "OF5 IB0 LB5 IB1 IB2 IB3 IB4 IB5 OB5",
    (
        2,
        1,
    ): "IF0 IF1 IF2 LF0 IF3 LF1 IF4 LF2 OF0 IF5 LF3 OB0 OF1 LF4 OB1 OF2 OB2 OF3 LB0 OB3 OF4 LF5 LB1 OB4 OF5 LB2 OB5 "
    "IB0 LB3 IB1 LB4 IB2 LB5 IB3 IB4 IB5",
}
"""What forward_backward_pipelining_with_vocab_parallel of sail-sg/VocabularyParallelism @6191c3bf runs on a device of
four for six micro-batches, where a backward pass takes two forward passes: layers (L), and shards of the embedding (I)
and of the output layer (O); OB is the pass of weight gradients. By barriers and device."""


@pytest.mark.parametrize(("barriers", "device"), PRINTED)
def test_orders_are_those_of_the_program_of_the_paper(barriers: int, device: int) -> None:
    shape = PipelineShape(4, 6, 3)
    order = make_schedule("vocabulary-1f1b", barriers=barriers).orders(shape)[device]
    passes = {"F": "F", "BW": "B", "W": "B"}
    words = [
        f"{'LIO'[action.stage // 4]}{passes[action.kind]}{action.microbatch}"
        for action in actions_of(order)
        if action.kind in passes
    ]
    assert " ".join(words) == PRINTED[barriers, device]


@given(st.integers(2, 6), st.integers(0, 8), SECONDS, SECONDS, SECONDS, st.sampled_from([1, 2]))
def test_the_bubble_is_that_of_1f1b_whatever_the_output_layer_takes(
    p: int, more: int, forward: float, ratio: float, output: float, barriers: int
) -> None:
    """Backward passes take as long as forward passes or longer, as the program demands; look-ups take no time."""
    m, backward = p + more, forward * (1 + min(ratio, 3.0))

    def times(layers: float, shard: float) -> list[float]:
        return [3 * seconds for seconds in (layers, 0.0, shard) for _ in range(p)]

    case = {"t_f": times(forward, output), "t_b": times(backward, 0.0), "t_w": times(0.0, output)}
    run = replay(ScheduleCase(schedule="vocabulary-1f1b", p=p, m=m, barriers=barriers, **case))
    alone = replay(ScheduleCase(schedule="1f1b", p=p, m=m, t_f=forward, t_b=backward))
    assert run.makespan == pytest.approx(alone.makespan + 2 * m * output)


MODEL = {"layers": 8, "hidden": 64, "heads": 4, "vocab": 4096, "seq": 32, "tied": False, "positions": "rope"}


def play(barriers: int = 1, **changes: Any) -> Played:
    schemes = [{"use": "pipeline/vocabulary-1f1b", "over": "pp", "barriers": barriers}, *changes.pop("beside", [])]
    mesh = changes.pop("mesh", {"pp": 4})
    gpus = 4 * (2 if len(mesh) > 1 else 1)
    plan = {"mesh": mesh, "schemes": schemes}
    job = {"model": MODEL, "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "batch": {"global": 8 * gpus // 4, "micro": 1}}
    return play_job({**job, "plan": plan, **changes})


def test_every_device_holds_an_equal_share_of_embedding_and_output_layer() -> None:
    played = play()
    names = [
        sorted(param.name for param in played.list_held(device) if "layer" not in param.name) for device in range(4)
    ]
    tables = [
        {param.name: param.size for param in played.list_held(device) if param.name in ("wte", "head", "embedding")}
        for device in range(4)
    ]
    assert all(table == tables[0] for table in tables), names
    assert sum(sum(table.values()) for table in tables) == 2 * MODEL["vocab"] * MODEL["hidden"]


@pytest.mark.parametrize("barriers", [1, 2])
def test_bytes_of_collectives_are_those_of_the_program(barriers: int) -> None:
    """A broadcast in fp32 with a gradient of each token; three sums of fp32; gradients of the input in 16 bits."""
    played = play(barriers)
    tokens, width = MODEL["seq"], MODEL["hidden"]
    table, shards = played.program.timetable, find_shards(played.plan.schedule, played.plan.shape)
    assert shards is not None
    sent: dict[tuple[str, str], list[int]] = {}
    for number, action in enumerate(table.actions):
        if action.kind in (ActionKind.SPREAD, ActionKind.JOIN, ActionKind.JOIN_GRADIENTS):
            works = [op.work.nbytes for part in played.task(number).parts for op in part.block.ops if op.work]
            sent[shards.role(action.stage), action.kind] = works
    gradients = [2 * tokens * width]
    wanted = {
        ("input", "J"): [2 * tokens * width],
        ("input", "V"): [2 * tokens * width],
        ("output", "V"): [4 * tokens * (width + 1)],
        ("output", "J"): [4 * tokens] * 3 + (gradients if barriers == 1 else []),
    }
    assert sent == wanted | ({("output", "Q"): gradients} if barriers == 2 else {})


def test_a_collective_waits_for_all_shards_and_the_layers_wait_for_it() -> None:
    played = play(2)
    table, flat, times = played.program.timetable, played.flat, played.times
    at = {action: number for number, action in enumerate(table.actions)}

    def begin(number: int) -> float:
        return min(times.begin[op] for op in played.ops(number))

    def end(number: int) -> float:
        return max(times.end[op] + flat.latency[op] for op in played.ops(number))

    for action, number in at.items():
        if action.kind == ActionKind.JOIN_GRADIENTS:
            passes = [at[action._replace(stage=stage, kind="BW")] for stage in range(8, 12)]
            assert begin(number) >= max(map(end, passes))
            assert begin(at[action._replace(stage=3, kind="BW")]) >= end(at[action._replace(stage=11)])


def test_a_shorter_last_stage_makes_a_shorter_step_at_a_large_vocabulary() -> None:
    usual = play_job(
        {
            "model": {**MODEL, "vocab": 65536},
            "cluster": {"gpu": "h100-sxm", "gpus": 4},
            "batch": {"global": 16, "micro": 1},
            "plan": {"mesh": {"pp": 4}, "schemes": [{"use": "pipeline/1f1b", "over": "pp"}]},
        }
    )
    sharded = play(model={**MODEL, "vocab": 65536}, batch={"global": 16, "micro": 1})
    assert sharded.step.span < usual.step.span

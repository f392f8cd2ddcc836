"""The tensors of a device are those of the forecast, and two steps find what the allocator reserves."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.allocator import CachedBlock, CachingAllocator
from meshcast.simulator.engine.reserved_memory import (
    StateTensors,
    TensorReplay,
    play_first_step,
    play_passes,
    play_update,
)
from meshcast.simulator.program.block import TensorKind
from meshcast.simulator.report.forecast import Forecast

MODEL = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32768, "seq": 1024}
JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {"plan": {"tp": 2, "pp": 2}},
    "interleaved": {"plan": {"pp": 4, "chunks": 2, "recompute": "full"}},
    "dualpipe": {"plan": {"pp": 4, "schedule": "dualpipe"}, "batch": {"global": 16, "micro": 1}},
    "backward passes of half a batch": {
        "plan": {
            "mesh": {"pp": 8},
            "schemes": [{"use": "pipeline/chimera", "over": "pp", "concatenation": "forward-doubling"}],
        },
        "batch": {"global": 16, "micro": 1},
    },
    "torchtitan": {"plan": {"fsdp": True}, "framework": "torchtitan"},
    "deepspeed": {"plan": {"zero": 1, "pp": 2}, "framework": "megatron-deepspeed"},
    "adapters": {"plan": {"zero": 1}, "train": {"mode": "lora", "rank": 8}},
}


class CountedReplay(TensorReplay):
    """Counts the bytes of all tensors, by category."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__(allocator)
        self.kinds: dict[CachedBlock, TensorKind] = {}
        self.held = self.peak = 0

    def allocate(self, kind: TensorKind, stream: str = "") -> CachedBlock:
        block = super().allocate(kind, stream)
        self.kinds[block] = kind
        self.held += kind[1]
        self.peak = max(self.peak, self.held)
        return block

    def free(self, block: CachedBlock) -> None:
        self.held -= self.kinds.pop(block)[1]
        super().free(block)


@pytest.fixture(scope="module", params=JOBS)
def play(request: pytest.FixtureRequest) -> Forecast:
    base = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}}
    return simulate({**base, **JOBS[request.param]}).play


def play_step(replay: TensorReplay, play: Forecast, device: int) -> None:
    for _ in play_passes(replay, play.program, device):
        pass
    for _ in play_update(replay, play.program, device):
        pass


def test_tensors_add_up_to_the_forecast(play: Forecast) -> None:
    """States to what rests, a whole step to the peak; and a step leaves nothing but the states."""
    for device, peak in enumerate(play.peaks):
        states = play.list_tensors(device)
        kept = [kind for kinds in (states.buffers, states.held, states.late) for kind in kinds]
        for category, nbytes in play.resting[device].items():
            assert sum(size for name, size in kept if name == category) == pytest.approx(nbytes, abs=len(kept))
        replay = CountedReplay(CachingAllocator())
        play_first_step(replay, play.program, device, states)
        assert replay.held == pytest.approx(sum(size for _, size in kept))
        replay.peak = 0
        play_step(replay, play, device)
        assert replay.peak == pytest.approx(peak.total, rel=1e-6)
        assert replay.allocator.reserved >= replay.peak
        replay.end_step()
        assert replay.held == pytest.approx(sum(play.resting[device].values()), rel=1e-6)


def test_a_third_step_needs_nothing_new(play: Forecast) -> None:
    replay = TensorReplay(CachingAllocator())
    play_first_step(replay, play.program, 0, play.list_tensors(0))
    reserved = []
    for _ in range(2):
        play_step(replay, play, 0)
        replay.end_step()
        reserved.append(replay.allocator.reserved)
    assert reserved[0] == reserved[1]


def test_moments_of_the_first_update_leave_the_second_step_without_room() -> None:
    """They take the places of activations, so the second step needs segments where the first had enough."""
    play = simulate({"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}, "plan": {}}).play
    replay = TensorReplay(CachingAllocator())
    states = play.list_tensors(0)
    play_first_step(replay, play.program, 0, states)
    first = replay.allocator.reserved
    play_step(replay, play, 0)
    later = replay.allocator.reserved
    assert first < later
    replay = TensorReplay(CachingAllocator())
    eager = StateTensors(states.copied, states.buffers, [*states.held, *states.late])
    play_first_step(replay, play.program, 0, eager)
    assert first < replay.allocator.reserved <= later


def test_states_lie_as_the_program_lays_them() -> None:
    """Of a sharded optimizer: a part of every parameter, or whole parameters of a part; or one tensor a state."""
    job = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}, "plan": {"dp": 8, "zero": 1}}
    found = {}
    for layout in ("apart", "buffers", "flat"):
        play = simulate({**job, "framework": {"name": "megatron-core", "set": {"memory": {"states": layout}}}}).play
        found[layout] = states = play.list_tensors(0)
        total = play.resting[0]["parameters"]
        assert sum(nbytes for _, nbytes in states.copied) == (total if layout == "buffers" else 0)
        assert len(states.buffers) == (0 if layout == "apart" else 2)
    apart, buffers, flat = (sorted(nbytes for _, nbytes in found[layout].late) for layout in found)
    assert sum(apart) == pytest.approx(sum(buffers)) == pytest.approx(sum(flat))
    assert len(flat) == 2 < len(buffers) < len(apart) / 4
    table = 4 * MODEL["vocab"] * MODEL["hidden"]
    assert apart[-1] == table / 8 and buffers[-1] <= table

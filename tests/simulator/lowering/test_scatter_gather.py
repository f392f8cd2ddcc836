"""Scatter-gather of pipeline messages: what is sent, what is gathered, and by whom."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.ops import Collective, Op, Transfer
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.validation.contract.played import Ideal, Played, play_job

FIELD = "scatter_gather_tensors_in_pipeline"
B_S_H = 2 * 32 * 64 * 2
"""Bytes of the residual stream of a micro-batch of two sequences of 32 tokens."""


def job(
    on: bool = True, tensor: str = "megatron", pp: int = 4, tp: int = 4, m: int = 8, **pipeline: Any
) -> dict[str, Any]:
    schemes = [{"use": "pipeline/1f1b", "over": "pp", **pipeline}, {"use": "data/ddp", "over": "dp"}]
    return {
        "model": {"layers": 8, "hidden": 64, "heads": 8, "ffn": 256, "vocab": 512, "seq": 32},
        "cluster": {"gpu": "a100-sxm-80", "gpus": pp * tp},
        "framework": {"name": "megatron-lm-2021", "set": {FIELD: on, "launch_s": 0.0}},
        "batch": {"global": 2 * m, "micro": 2, "sequence": 32},
        "plan": {
            "mesh": {"pp": pp, "dp": 1, "tp": tp},
            "schemes": [*schemes, {"use": f"tensor/{tensor}", "over": "tp"}],
        },
    }


def sent(played: Played) -> set[int]:
    """Bytes of the messages between stages."""
    return {op.work.nbytes for _, op in played.instances() if isinstance(op.work, Transfer)}


def gathers(played: Played, device: int) -> list[Op]:
    """All-gathers of received shares on a device, in the order in which they are issued."""
    every = (op for _, op in played.instances(device) if isinstance(op.work, Collective))
    return [op for op in every if op.name.startswith("gather ") and op.work.operation == "all_gather"]


@pytest.mark.parametrize("tp", [2, 8])
def test_each_rank_sends_its_share_and_the_receivers_gather_it(tp: int) -> None:
    """Of a message [b, s, h] 1/t goes through each rank's port, and (t - 1)/t over its scale-up links."""
    shares, whole = play_job(job(tp=tp)), play_job(job(on=False, tp=tp))
    assert sent(whole) == {B_S_H} and sent(shares) == {B_S_H // tp}
    for device in range(4):
        found = gathers(shares, device)
        assert {(op.work.nbytes, op.work.axes, op.stream) for op in found} == {(B_S_H, ("tp",), "tensor")}
        assert [op.phase for op in found].count("F") == 8 * (device > 0)
        assert [op.phase for op in found].count("B") == 8 * (device < 3)
        assert not gathers(whole, device)


@pytest.mark.parametrize(("tensor", "tp"), [("megatron-sp", 4), ("megatron", 1)])
def test_what_is_not_copied_is_sent_as_it_is(tensor: str, tp: int) -> None:
    """A sharded residual stream, and that of one rank."""
    on, off = (play_job(job(on, tensor, tp=tp)) for on in (True, False))
    assert sent(on) == sent(off) == {B_S_H // tp} and not any(gathers(on, device) for device in range(4))


def test_a_pass_waits_for_the_gather_and_the_gather_for_the_message() -> None:
    played = play_job(job())
    flat, times = played.flat, played.times
    arrived = {(number, to): times.end[number] + flat.latency[number] for number, _, to in flat.sent}
    for number, op in played.instances():
        if op.name.startswith("gather "):
            messages = [(at, to) for at in flat.after[number] if (at, to := flat.device[number]) in arrived]
            assert len(messages) == 1 and times.begin[number] >= arrived[messages[0]]
            readers = [other for other, after in enumerate(flat.after) if number in after]
            assert readers and all(times.begin[other] >= times.end[number] for other in readers)


def test_time_of_a_chain_with_free_computation() -> None:
    """One micro-batch there and back: 2 (p - 1) messages of 1/t and as many gathers, if nothing else takes time."""
    price = Ideal(flops=float("inf"), memory=float("inf"), links=1e6)

    def only_messages(work: Any) -> tuple[float, float, float]:
        ours = isinstance(work, Transfer) or (isinstance(work, Collective) and work.operation == "all_gather")
        return price(work) if ours else (0.0, 0.0, 0.0)

    on, off = (play_job(job(on, m=1), only_messages).step.span for on in (True, False))
    assert off == pytest.approx(6 * B_S_H / 1e6) and on == pytest.approx(6 * (B_S_H / 4 + B_S_H) / 1e6)


def test_neighbouring_stages_on_one_device_gather_nothing() -> None:
    """In a V the last device holds two stages in a row."""
    played = play_job(job(use="pipeline/zb-v"))
    counts = [len(gathers(played, device)) for device in range(4)]
    assert counts == [2 * 8, 4 * 8, 4 * 8, 2 * 8]


def test_the_programs_that_do_it() -> None:
    on = {name for name in framework_names() if getattr(load_framework(name), FIELD)}
    assert on == {"megatron-lm-2021", "megatron-deepspeed", "gpt-neox"}


def test_memory_of_a_stage_stays_but_for_the_messages() -> None:
    """A received share is a quarter of what was received; the gathered input is kept as before."""
    on, off = play_job(job()), play_job(job(on=False))
    for one, other in zip(on.peaks, off.peaks, strict=True):
        assert one.by.get("activations") == other.by.get("activations")
        assert other.total - 2 * B_S_H <= one.total <= other.total

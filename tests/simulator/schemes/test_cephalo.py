"""Cephalo: shards by memory, layered accumulation, and heterogeneous ranks that meet in every layer."""

from typing import Any

import pytest

from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.report.report import Report
from meshcast.simulator.schemes.data.cephalo import UNEVEN

MODEL = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 32000, "seq": 2048, "tied": False}
MIXED = {"groups": [{"node": "dgx-a100-40", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}


def forecast(
    batch: int = 64, plan: dict[str, Any] | None = None, engine: Any = "matrices", model: Any = MODEL, **options: Any
) -> Report:
    schemes = [{"use": "data/cephalo", "over": "dp", **options}]
    whole = {"mesh": {"dp": 16}, "schemes": schemes, "share": "by-speed", **(plan or {})}
    sizes = {"global": batch, "micro": 1}
    return simulate({"model": model, "cluster": MIXED, "batch": sizes, "plan": whole}, engine)


def sharded(report: Report, device: int) -> list[Collective]:
    """The collectives of a device over its shards."""
    flat = report.play.step.flat
    found = (op.work for op, own in zip(flat.ops, flat.device, strict=True) if own == device)
    return [
        work for work in found if isinstance(work, Collective) and work.operation in ("all_gather", "reduce_scatter")
    ]


def gathers(report: Report, device: int) -> list[int]:
    """Bytes of the all-gathers of the passes of a device."""
    flat = report.play.step.flat
    found = (op.work for op, own in zip(flat.ops, flat.device, strict=True) if own == device and op.phase in "FB")
    return [work.nbytes for work in found if isinstance(work, Collective) and work.operation == "all_gather"]


@pytest.mark.parametrize(
    ("shards", "sizes"), [("by-memory", (40, 80)), ("even", (1, 1)), ([1.0, 3.0], (1, 3))], ids=str
)
def test_shards(shards: Any, sizes: tuple[float, float]) -> None:
    """A rank stores 16 f_i bytes per parameter; collectives of uneven shards send the same bytes in more time."""
    report, even = forecast(shards=shards), forecast(shards="even")
    parameters = report.job.model.parameters
    for resting, size in zip(report.play.resting, sizes, strict=True):
        share = size / (8 * sum(sizes))
        states = sum(resting[state] for state in ("parameters", "gradients", "optimizer"))
        assert states == pytest.approx(16 * parameters * share)
    pace = 1.0 if len({*sizes}) == 1 else UNEVEN
    for device in (0, 1):
        assert gathers(report, device) == gathers(even, device)
        assert {work.pace for work in sharded(report, device)} == {pace}


def test_a_rank_may_hold_no_states() -> None:
    report = forecast(shards=[0.0, 1.0])
    assert [sum(one[state] for state in ("parameters", "optimizer")) > 0 for one in report.play.resting] == [
        False,
        True,
    ]


def test_weights_are_gathered_once_a_pass() -> None:
    """However many micro-batches a rank runs; of micro-batches that run through all layers, in each."""
    once = forecast(64, {"share": "even"})
    assert len(gathers(once, 0)) == len(gathers(forecast(16, {"share": "even"}), 0)) == 2 * 6
    assert len(gathers(forecast(64, {"share": "even"}, layered=False), 0)) == 4 * 2 * 6


def test_work_is_that_of_micro_batches_one_by_one() -> None:
    """Layered accumulation runs the same kernels in another order, and frees all that it allocates."""
    layered, usual = forecast(64, {"share": "even"}), forecast(64, {"share": "even"}, layered=False)
    for kind in ("gemm", "attention", "memory_bound"):
        one, other = (report.breakdown.parts[kind] for report in (layered, usual))
        assert one == pytest.approx(other)
    assert all(peak.left == pytest.approx(0, abs=1) for peak in layered.play.peaks)


def play_together(flat: FlatProgram) -> float:
    """The span of two devices whose collectives begin together, one by one in the order of issue [s]."""
    met = [
        [number for number in flat.queues[device, "data"] if isinstance(flat.ops[number].work, Collective)]
        for device in (0, 1)
    ]
    pairs = list(zip(*met, strict=True))
    late = dict.fromkeys((number for pair in pairs for number in pair), 0.0)
    issued = list(flat.issue)
    while True:
        begin, end, seen = ([0.0] * len(flat.ops) for _ in range(3))
        free: dict[tuple[int, str], float] = {}
        clock = [0.0, 0.0]
        for number, op in enumerate(flat.ops):
            device = flat.device[number]
            at = max(
                [free.get((device, op.stream), 0.0), late.get(number, 0.0), *(seen[i] for i in flat.after[number])]
            )
            if issued[number]:
                clock[device] += issued[number]
                at = max(at, clock[device])
            begin[number], end[number] = at, at + flat.seconds[number]
            seen[number] = free[device, op.stream] = end[number]
            seen[number] += flat.latency[number]
        new = {number: max(begin[one], begin[other]) for one, other in pairs for number in (one, other)}
        if new == late:
            return max(end)
        late = new


@pytest.mark.parametrize(
    ("model", "share", "error"),
    [
        (MODEL, "even", 1e-9),
        (MODEL, "by-speed", 0.05),
        pytest.param("llama3-8b", "by-speed", 5e-3, marks=pytest.mark.slow),
    ],
    ids=["even", "by speed", "by speed, 32 layers"],
)
def test_ranks_that_wait_for_each_other_in_every_layer(model: Any, share: str, error: float) -> None:
    """Replicas are played by themselves and meet at the end of the step, and really in every collective. That is the
    same where one kind of GPU is slower in all units, and little else where layers are many."""
    flat = forecast(64, {"share": share}, model=model).play.step.flat
    alone, together = longest_path(flat).span, play_together(flat)
    assert alone <= together <= (1 + error) * alone


def test_heterogeneous_samples_in_every_micro_batch() -> None:
    """FSDP whose replicas run equal numbers of micro-batches, of 1 or of 3 samples, in place of 2 each."""

    def step(*samples: int) -> float:
        classes = [{"samples": one, "sequence": 2048} for one in dict.fromkeys(samples)]
        replicas = [{"dp": 8, "microbatches": [i % len(classes)] * 2} for i in range(2)]
        plan = {"mesh": {"dp": 16}, "schemes": [{"use": "data/fsdp", "over": "dp"}], "replicas": replicas}
        return simulate({"model": MODEL, "cluster": MIXED, "batch": {"lengths": classes}, "plan": plan}).step_time

    assert step(1, 3) < 0.8 * step(2, 2)

"""Samples assigned to groups of ranks of different degrees, by published algorithms."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.assigners.dp_balanced import pack_in_order
from meshcast.simulator.job.assigners.flexsp import assign_flexibly, cut_evenly
from meshcast.simulator.job.assigners.groups import Round
from meshcast.simulator.job.assigners.hybrid_cp import assign_hybrid, degree_of
from meshcast.simulator.job.assigners.wlb import WlbPacker
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from tests.draws import drawn

MODEL = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 4096, "positions": "rope"}


def job(samples: dict[str, Any], **plan: Any) -> dict[str, Any]:
    law = {"kind": "lognormal", "mean": 500, "sigma": 1.2}
    batch = {"sequence": 4096, "samples": {"distribution": law, "count": 40, "multiple": 128, **samples}}
    return {"model": MODEL, "cluster": "dgx-h100:1", "plan": {"dp": 4, "cp": 2, **plan}, "batch": batch}


def plain(rounds: list[Round]) -> list[list[tuple[int, list[int]]]]:
    return [
        [(group.degree, [sample for samples in group.microbatches for sample in samples]) for group in groups]
        for groups in rounds
    ]


def test_hybrid_rounds_are_those_of_megatron_core() -> None:
    """What `BalancedCPScheduler` of NVIDIA/Megatron-LM @d98e8a64 makes of these lengths, 8 tokens a rank: groups
    of 4 and 2; a balanced round; samples that come back from a trimmed one; groups that double for idle ranks."""
    lengths = [30, 30, 12, 12, 9, 8, 8, 7, 7, 5, 4, 4, 4, 3, 3, 2, 2, 2, 1, 1]
    assert plain(assign_hybrid(lengths, 8, 8)) == [
        [(4, [0]), (4, [1])],
        [(2, [2]), (2, [3]), (2, [4]), (1, [5, 7, 9, 12]), (1, [6, 8, 10, 11, 13])],
        [(2, [17]), (2, [19]), (1, [18]), (1, [14]), (1, [16]), (1, [15])],
    ]


@pytest.mark.parametrize("seed", drawn(range(20), keep=6))
def test_hybrid_rounds_hold_every_sample_once_on_enough_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = 2 ** (1 + seed % 5)
    lengths = np.clip(rng.lognormal(6, 1.3, 100).round(), 1, 512 * ranks).astype(int).tolist()
    rounds = assign_hybrid(lengths, 512, ranks)
    run = [sample for groups in rounds for group in groups for samples in group.microbatches for sample in samples]
    assert Counter(run) == Counter(range(100))
    for groups in rounds:
        assert sum(group.degree for group in groups) == ranks and all(group.microbatches for group in groups)
        for group in groups:
            assert all(
                degree_of(lengths[sample], 512) <= group.degree for samples in group.microbatches for sample in samples
            )


def test_groups_by_sample_are_faster_than_one_degree_for_all() -> None:
    """No token is lost, no rank has more of a sample than stated, and short samples pay for no exchange of keys."""
    samples = {"join": "hybrid-cp", "rank_tokens": 1024}
    hybrid = simulate(job(samples, cp_scheme="megatron-cp"))
    batch = hybrid.job.batch
    assert all(kind.sequence <= 1024 * (kind.cp or 2) for kind in batch.lengths)
    assert len({kind.cp for kind in batch.lengths}) > 1
    padded = load_job(job({"join": "padding"}))
    real = sum(
        kind.real_tokens * count
        for kind, count in zip(batch.lengths, hybrid.play.plan.passes.class_counts, strict=True)
    )
    orders = [number for replica in padded.plan.replicas for number in replica.microbatches or ()]  # type: ignore[union-attr]
    assert real == pytest.approx(sum(padded.batch.lengths[number].real_tokens for number in orders))
    degrees = [{**kind.model_dump(exclude_none=True), "cp": 4} for kind in batch.lengths]
    run = [number for groups in batch.rounds for group in groups for number in group]
    halves = {"lengths": degrees, "rounds": [[run[::2], run[1::2]]]}
    every_on_four = simulate({**job({}), "batch": halves, "plan": {"dp": 4, "cp": 2, "cp_scheme": "megatron-cp"}})
    assert hybrid.step_time < every_on_four.step_time


# ------------------------------------------------------------------------------------- in the order of samples


def test_samples_are_packed_in_their_order() -> None:
    """What `DpBalancedScheduler` of NVIDIA/Megatron-LM @d98e8a64 makes of them; each replica has as many sequences."""
    lengths = [5, 4, 9, 2, 2, 3, 3, 1]
    assert pack_in_order(lengths, 10, 1) == [[5, 4], [9], [2, 2, 3, 3], [1]]
    assert pack_in_order(lengths, 10, 3) == [[5, 4], [9], [2, 2], [1], [3], [3]]
    assert pack_in_order([12, 3], 10, 2) == [[12], [3]]


def test_replicas_take_packed_sequences_in_turn() -> None:
    samples = {"join": "dp-balanced", "tokens": 4096, "multiple": 64}
    one = load_job(job(samples, dp=4, cp=1, pp=2))
    orders = [replica.microbatches for replica in one.plan.replicas]
    assert len({len(order) for order in orders if isinstance(order, tuple)}) == 1
    kinds = one.batch.lengths
    real = sum(kinds[n].real_tokens for order in orders if isinstance(order, tuple) for n in order)
    padded = load_job(job({"join": "padding"}))
    shares = [replica.microbatches for replica in padded.plan.replicas]
    assert real == pytest.approx(
        sum(padded.batch.lengths[n].real_tokens for order in shares if isinstance(order, tuple) for n in order),
        rel=1e-3,
    )
    assert max(kind.sequence for kind in kinds) <= 4096


# ------------------------------------------------------------------------------------------------ WLB-LLM


def square(tokens: int) -> float:
    return float(tokens * tokens)


def test_documents_go_where_there_is_least_work_then_where_there_is_room() -> None:
    """Squares as work, two micro-batches of at most 10 tokens: 7; 5; 4 beside 5 (25 < 49); 3 beside 7, as there is no
    room where the work is least; 2 has no room, and comes first of the next step with 2 and 2."""
    packer = WlbPacker(10, (), square)
    assert packer.pack([4, 2, 7, 3, 5], 2) == [[7, 3], [5, 4]]
    assert packer.left == [2]
    assert packer.pack([2, 2], 2) == [[2, 2], [2]]
    assert WlbPacker(20, (), square).pack([6, 3, 3, 3, 2], 2) == [[6], [3, 3, 3, 2]]  # the longer one has less work


def test_outliers_wait_for_one_another() -> None:
    """Of each length apart, until every micro-batch gets one; those that waited longest come first."""
    packer = WlbPacker(40, (10, 20), square)
    assert packer.pack([12, 3, 21, 1], 2) == [[3], [1]]
    assert packer.pack([22, 13, 14], 2) == [[22, 12], [21, 13]]
    assert packer.queues[0][0] == 14 and not packer.queues[1]


@pytest.mark.parametrize("seed", drawn(range(10), keep=3))
def test_no_document_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packer = WlbPacker(1500, (400, 800), square)
    steps = [np.clip(rng.lognormal(5, 1, 60), 1, 1000).astype(int).tolist() for _ in range(8)]
    packed = [packer.pack(lengths, 12) for lengths in steps]
    assert all(sum(micro) <= 1500 for step in packed for micro in step)
    run = [length for step in packed for micro in step for length in micro]
    waiting = [*packer.left, *(length for queue in packer.queues for length in queue)]
    assert Counter(run + waiting) == Counter(length for lengths in steps for length in lengths)


def test_packing_by_work_shortens_the_step() -> None:
    """A pipeline waits for its slowest micro-batch: with sequences of equal length that of the longest documents."""
    law = {"kind": "lognormal", "mean": 4000, "sigma": 1.4}
    samples = {"distribution": law, "count": 160, "multiple": 512}
    model = {**MODEL, "hidden": 4096, "heads": 32}

    def forecast(join: str, tokens: int) -> Report:
        plan = {"pp": 4, "tp": 2, "recompute": "full"}
        batch = {"sequence": 32768, "samples": {**samples, "join": join, "tokens": tokens}}
        return simulate({"model": model, "cluster": "dgx-h100:1", "plan": plan, "batch": batch})

    by_work, by_length = forecast("wlb", 65536), forecast("packing", 32768)
    assert by_work.tokens == by_length.tokens
    assert by_work.step_time < by_length.step_time


# -------------------------------------------------------------------------------------------------- FlexSP


def seconds(length: int, degree: int) -> float:
    """Attention and products, shared by all ranks; all-to-alls, which take the longer the more ranks there are."""
    return (length * length + 50 * length) / degree + (degree > 2) * 3 * length


def test_parts_are_of_neighbours_and_the_largest_is_small() -> None:
    assert cut_evenly([9, 7, 5, 4, 2, 1], 3) == [range(1), range(1, 2), range(2, 6)]
    assert cut_evenly([3, 3, 3], 3) == [range(1), range(1, 2), range(2, 3)]


def slowest(rounds: list[Round], lengths: list[int]) -> float:
    return sum(
        max(sum(seconds(lengths[s], g.degree) for micro in g.microbatches for s in micro) for g in groups)
        for groups in rounds
    )


@pytest.mark.parametrize("seed", drawn(range(12), keep=4))
def test_groups_of_few_samples_end_as_early_as_any(seed: int) -> None:
    """All sets of degrees and all ways to spread six samples over them are tried here, in a single micro-batch."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 160, 6).tolist()
    rounds = assign_flexibly(lengths, 150, (8, 8), seconds)
    best = float("inf")
    for degrees in ((8,), (4, 4), (4, 2, 2), (2, 2, 2, 2)):
        for places in product(range(len(degrees)), repeat=6):
            tokens = [sum(n for n, at in zip(lengths, places, strict=True) if at == i) for i in range(len(degrees))]
            if any(n == 0 or n > 150 * d for n, d in zip(tokens, degrees, strict=True)):
                continue
            ends = (
                sum(seconds(n, d) for n, at in zip(lengths, places, strict=True) if at == i)
                for i, d in enumerate(degrees)
            )
            best = min(best, max(ends))
    assert slowest(rounds, lengths) <= best * 1.01
    assert len(rounds) > 1 or slowest(rounds, lengths) >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", drawn(range(10), keep=3))
def test_flexible_groups_hold_every_sample_once_within_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5, 1.2, 80), 1, 2000).astype(int).tolist()
    rounds = assign_flexibly(lengths, 512, (16, 8), seconds)
    run = [sample for groups in rounds for group in groups for micro in group.microbatches for sample in micro]
    assert Counter(run) == Counter(range(80))
    for groups in rounds:
        assert sum(group.degree for group in groups) == 16
        for group in groups:
            (samples,) = group.microbatches
            assert 0 < sum(lengths[sample] for sample in samples) <= 512 * group.degree
            assert group.degree <= 8


def test_flexible_groups_are_faster_than_packing_on_one_degree() -> None:
    """Long samples alone pay for exchanges between nodes; at most 1.98 times as fast (arXiv 2412.01523, abstract)."""
    law = {"kind": "lognormal", "mean": 3000, "sigma": 1.4}
    samples = {"distribution": law, "count": 96, "multiple": 256}
    plan = {"cp": 16, "cp_scheme": "ulysses", "fsdp": True}
    model = {"layers": 8, "hidden": 4096, "heads": 32, "vocab": 32000, "seq": 65536, "positions": "rope"}

    def forecast(**more: Any) -> Report:
        batch = {"sequence": 65536, "samples": {**samples, **more}}
        return simulate({"model": model, "cluster": "dgx-a100:2", "plan": plan, "batch": batch})

    packed = forecast(join="packing", equal_replicas=True)
    flexible = forecast(join="flexsp", rank_tokens=8192)
    assert flexible.tokens == packed.tokens
    assert 1 < packed.step_time / flexible.step_time < 1.98

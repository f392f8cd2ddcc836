"""Samples of different lengths: how they are drawn, joined to micro-batches and dealt to replicas."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.batch import Samples
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.sample_lengths import LengthSource
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn

MODEL = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 512, "positions": "rope"}
LONG_TAIL = {"kind": "lognormal", "mean": 120, "sigma": 1.2}


def job(samples: dict[str, Any], plan: dict[str, Any] | None = None, **batch: Any) -> dict[str, Any]:
    plan = plan or {"pp": 2, "tp": 4}
    return {"model": MODEL, "cluster": "dgx-h100:1", "plan": plan, "batch": {"samples": samples, **batch}}


def load(tmp_path: Path, lengths: Sequence[Any], plan: dict[str, Any] | None = None, **samples: Any) -> Job:
    (tmp_path / "lengths.csv").write_text("\n".join(map(str, lengths)) + "\n")
    return load_job(job({"file": "lengths.csv", **samples}, plan), base=tmp_path)


def classes_of(one: Job) -> list[tuple[int, int, Any, float]]:
    return sorted((each.samples, each.sequence, each.documents, each.real_tokens) for each in one.batch.lengths)


def orders_of(one: Job) -> list[tuple[int, ...]]:
    orders = [each.microbatches for each in one.plan.replicas for _ in range(each.dp)] or [one.batch.order]
    return [order for order in orders if isinstance(order, tuple)]


def test_padding_joins_samples_of_similar_length(tmp_path: Path) -> None:
    """400 fills a micro-batch of at most 512 tokens alone; of the others 4 x 104 fit, and one is left."""
    one = load(tmp_path, [100, 99, 50, 400, 100, 30], join="padding", multiple=8)
    assert classes_of(one) == [(1, 32, None, 30), (1, 400, None, 400), (4, 104, None, 349)]
    assert sorted(one.batch.order) == [0, 1, 2]
    assert one.batch.total == 6


def test_packing_puts_a_sample_into_the_fullest_sequence_with_room(tmp_path: Path) -> None:
    """[300, 200, 12] and [100, 213]; attention has the pairs of tokens of documents of 256 and 180 tokens."""
    one = load(tmp_path, ["tokens", 300, 200, 100, 213, 12], join="packing", multiple=1)
    pairs = (300**2 + 200**2 + 12**2) / 512, (100**2 + 213**2) / 313
    wanted = [(1, 512, round(pairs[0]), 512), (1, 512, round(pairs[1]), 313)]
    assert classes_of(one) == sorted(wanted)


def test_packing_without_a_mask_has_one_class(tmp_path: Path) -> None:
    one = load(tmp_path, [300, 200, 100, 213, 12], join="packing", across_samples=True)
    assert classes_of(one) == [(1, 512, None, 412.5)]
    assert one.batch.order == (0, 0)


def test_ranks_that_divide_whole_sequences_have_unequal_pairs(tmp_path: Path) -> None:
    """Of documents of 384 and 128 tokens, parts of 128 have 1, 3, 5 and 1 times so many pairs: the first rank has the
    outer two, the other 8 of 10. Attention takes as much longer, and all else as long."""
    scheme = {"use": "all-gather", "sharding": "sequence"}
    plan = {"tp": 4, "cp": 2}
    one = load(tmp_path, [384, 128], {**plan, "cp_scheme": scheme}, join="packing", multiple=64)
    assert [kind.skew for kind in one.batch.lengths] == [1.6]
    even = load(tmp_path, [384, 128], plan, join="packing", multiple=64)
    assert [kind.skew for kind in even.batch.lengths] == [1.0]
    skewed, balanced = (simulate(job).breakdown.parts for job in (one, even))
    assert skewed["attention"] > balanced["attention"]
    same = {"gemm", "memory_bound", "optimizer"}
    assert {name: skewed[name] for name in same} == pytest.approx({name: balanced[name] for name in same})
    assert load_job({**one.to_dict(), "model": MODEL}) == one


def test_longer_samples_are_cut(tmp_path: Path) -> None:
    assert classes_of(load(tmp_path, [512, 513, 9999], join="padding")) == [(1, 512, None, 512)]


@pytest.mark.parametrize(
    ("join", "equal", "dp", "tokens"),
    drawn(
        product(["packing", "padding", "shortest-step"], [False, True], [1, 2, 4], [512, 2048]),
        keep=lambda case: case[2:] in ((1, 2048), (4, 512)),
    ),
)
def test_no_token_is_lost(join: str, equal: bool, dp: int, tokens: int, tmp_path: Path) -> None:
    """All samples run once, no micro-batch is larger than stated, and the replicas have about as much to do."""
    lengths = np.random.default_rng(dp).integers(1, 513, 101).tolist()
    plan = {"dp": dp, "tp": 8 // dp}
    one = load(tmp_path, lengths, plan, join=join, equal_replicas=equal, tokens=tokens, multiple=64)
    real = [one.batch.lengths[number].real_tokens for order in orders_of(one) for number in order]
    assert sum(real) * (dp if equal else 1) == pytest.approx(sum(lengths), rel=1e-12)
    assert max(each.padded_tokens for each in one.batch.lengths) <= tokens
    loads = [sum(one.batch.lengths[number].padded_tokens for number in order) for order in orders_of(one)]
    assert len(loads) == (1 if equal else dp)
    assert max(loads) - min(loads) <= tokens


@pytest.mark.parametrize("dp", [1, 2])
def test_samples_of_one_length_are_a_batch_of_equal_micro_batches(dp: int) -> None:
    """To the bit, also where each replica gets an order of its own."""
    plan = {"pp": 2, "dp": dp, "tp": 4 // dp}
    samples = {"distribution": {"kind": "uniform", "min": 256, "max": 256}, "count": 32, "join": "padding"}
    found = simulate(job({**samples, "tokens": 512}, plan, sequence=256))
    wanted = simulate({**job({}, plan), "batch": {"global": 32, "micro": 2, "sequence": 256}})
    assert (found.step_time, found.tokens, found.mfu) == (wanted.step_time, wanted.tokens, wanted.mfu)


def test_equal_replicas_may_meet_in_every_micro_batch() -> None:
    samples = {"distribution": LONG_TAIL, "count": 16, "join": "padding"}
    plan = {"fsdp": True, "dp": 8}
    assert simulate(job({**samples, "equal_replicas": True}, plan)).step_time > 0


@pytest.mark.parametrize(
    ("orders", "words"),
    [(([0, 1], [0, 1]), ""), (([0, 1], [1, 0]), "bring different buffers"), (([0, 1], [0]), "run different numbers")],
)
def test_replicas_that_share_experts_bring_equal_buffers_in_turn(orders: Any, words: str) -> None:
    model = {**MODEL, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 64}}
    plan = {"tp": 4, "ep": 8, "dp": 2, "replicas": [{"microbatches": order} for order in orders]}
    batch = {"lengths": [{"samples": 1, "sequence": length} for length in (256, 512)]}
    with pytest.raises(PlanError, match=words) if words else nullcontext():
        simulate({"model": model, "cluster": "dgx-h100:1", "plan": plan, "batch": batch})


@pytest.mark.parametrize("plan", [{"dp": 2, "tp": 4}, {"pp": 2, "tp": 4}])
def test_the_long_form_is_the_same_job(plan: dict[str, Any]) -> None:
    """With the order of micro-batches, of each replica or of all."""
    one = load_job(job({"distribution": LONG_TAIL, "count": 64, "join": "packing"}, plan))
    assert one.batch.samples is None
    assert load_job({**one.to_dict(), "model": MODEL}) == one


def test_lengths_have_the_mean_of_their_distribution() -> None:
    """As far as none is cut."""
    samples = {"distribution": {"kind": "lognormal", "mean": 100, "sigma": 0.8}, "count": 20_000, "join": "packing"}
    one = load_job(job({**samples, "tokens": 8192}, sequence=8192))
    tokens = sum(one.batch.lengths[number].real_tokens for number in one.batch.order)
    assert tokens / 20_000 == pytest.approx(100, rel=0.03)


def test_lengths_have_the_stated_quantiles() -> None:
    """Between two of them the logarithm of the length is linear in the share of samples."""
    at = {0.25: 64, 0.5: 100, 0.9: 400, 1.0: 500}
    law = Samples(distribution={"kind": "quantiles", "at": at}, count=40_000, join="padding")
    lengths = LengthSource.of(law, 512, Path()).draw(np.random.default_rng(0))
    shares = [0.25, 0.5, 0.9, (0.25 + 0.5) / 2]
    assert np.quantile(lengths, shares) == pytest.approx([64, 100, 400, 80], rel=0.03)
    assert lengths.max() == 500


def test_lengths_of_a_histogram_are_drawn_by_their_shares(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens,samples\n8,700\n64,0\n200,300\n")
    samples = {"file": "lengths.csv", "histogram": True, "count": 20_000, "join": "padding"}
    one = load_job(job({**samples, "tokens": 512}), base=tmp_path)
    counts = {kind.sequence: kind.samples * one.batch.order.count(i) for i, kind in enumerate(one.batch.lengths)}
    assert 64 not in counts and counts[200] / 20_000 == pytest.approx(0.3, abs=0.015)


@pytest.mark.parametrize("equal", [False, True])
def test_several_batches_are_those_of_the_seeds_that_follow(equal: bool, tmp_path: Path) -> None:
    """The step and its tokens are their mean, memory that of the fullest; the answer has their distribution."""
    samples = {"distribution": LONG_TAIL, "count": 48, "join": "packing", "multiple": 64, "equal_replicas": equal}
    plan = {"dp": 2, "tp": 4}
    every = [simulate(job({**samples, "seed": seed}, plan)) for seed in (5, 6, 7)]
    mean = simulate(job({**samples, "seed": 5, "batches": 3}, plan))
    steps = [one.step_time for one in every]
    assert mean.step_time == pytest.approx(np.mean(steps), rel=1e-12)
    assert mean.peak_allocated == max(one.peak_allocated for one in every)
    assert mean.tokens == round(np.mean([one.tokens for one in every]))
    flops = [one.mfu["causal"] * one.step_time for one in every]
    assert mean.mfu["causal"] * mean.step_time == pytest.approx(np.mean(flops), rel=1e-3)  # tokens are whole numbers
    answer = mean.to_dict()["batches"]
    assert answer["step_times_s"] == pytest.approx(steps, rel=1e-12)
    assert [answer["p5_s"], answer["p95_s"]] == pytest.approx(np.quantile(steps, [0.05, 0.95]).tolist())
    assert simulate({**mean.to_dict()["job"], "model": MODEL}).step_time == mean.step_time


def test_a_seed_is_a_step(tmp_path: Path) -> None:
    samples = {"distribution": LONG_TAIL, "count": 64, "join": "padding"}
    orders = [load_job(job({**samples, "seed": seed})).batch for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    drawn = [load(tmp_path, range(1, 200), join="padding", count=20, seed=seed).batch for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert simulate(load(tmp_path, range(1, 60), join="padding", count=59)).tokens == sum(range(1, 60))


# The layers of T5 11B, as one decoder: attention is 16 times as wide as the residual stream, and unfused.
T5 = {"layers": 48, "hidden": 1024, "heads": 128, "head_dim": 128, "ffn": 65536, "gated": False, "vocab": 32128}
MOST_GAIN = 4.39
"""Throughput with micro-batches of samples of similar length over that of packing without a mask, at most: T5 on A100s,
FLANv2 (Jiang et al. 2024, arXiv 2311.10418, abstract)."""


def tokens_per_second(sequence: int, **samples: Any) -> float:
    """Throughput of the fastest of several plans that fit, with a long tail of lengths as of many tasks."""
    drawn = {"distribution": {"kind": "lognormal", "mean": 300, "sigma": 1.2}, "count": 256, "multiple": 32}
    found = []
    for (tp, pp), recompute in product([(8, 1), (4, 1), (4, 2), (2, 4)], ["selective", "full"]):
        report = simulate(
            {
                "model": {**T5, "seq": 4096, "positions": "none"},
                "cluster": "dgx-a100:1",
                "framework": {"name": "megatron-core", "set": {"attention": "unfused"}},
                "plan": {"tp": tp, "pp": pp, "recompute": recompute},
                "batch": {
                    "sequence": sequence,
                    "samples": {**drawn, "tokens": 4096, "equal_replicas": True, **samples},
                },
            }
        )
        found += [report.tokens_per_s_per_gpu] * report.fits
    return max(found)


@pytest.mark.slow
def test_the_gain_over_packing_grows_with_the_longest_sample_and_stays_below_the_published_one() -> None:
    """Attention of packed sequences is of all pairs of their tokens, of padded samples of pairs within a sample."""
    gains = [
        tokens_per_second(sequence, join="padding") / tokens_per_second(sequence, join="packing", across_samples=True)
        for sequence in (512, 2048, 4096)
    ]
    assert gains == sorted(gains)
    assert 1.0 < gains[-1] <= MOST_GAIN

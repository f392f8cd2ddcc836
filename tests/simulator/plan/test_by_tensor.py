"""What becomes of saved tensors: the order of choice, stripes, the bytes that move, the memory of keepers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import HostCopy, Transfer
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.by_tensor import Budget, choose, stripe_shares, swap_budget
from meshcast.simulator.plan.pricing import SavedTensors, StageTensors
from meshcast.simulator.scheduling.activation_transfer import TensorChoice
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid
from tests.simulator.engine.engines import check_reports
from tests.strategies import some

TENSORS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf])), max_size=6).map(
    lambda drawn: [SavedTensors((f"t{i}",), nbytes, seconds) for i, (nbytes, seconds) in enumerate(drawn)]
)
BUDGETS = st.builds(
    Budget,
    st.integers(0, 200),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(0, 30),
    st.integers(0, 30),
    st.just(0.1),
)


def bytes_of(tensors: list[SavedTensors], names: tuple[str, ...]) -> float:
    return sum(tensor.nbytes for tensor in tensors if tensor.names[0] in names)


@given(tensors=TENSORS, budget=BUDGETS)
def test_nothing_leaves_twice_and_no_more_than_has_room(tensors: list[SavedTensors], budget: Budget) -> None:
    choice = choose(tensors, budget)
    gone = choice.swap + choice.host + choice.recompute
    assert len(gone) == len({*gone})
    assert bytes_of(tensors, choice.swap) <= budget.device and bytes_of(tensors, choice.host) <= budget.host
    assert all(tensor.seconds < math.inf for tensor in tensors if tensor.names[0] in choice.recompute)
    assert budget.held > 3 or not choice.swap, "three micro-batches of what is swapped stay"
    if budget.excess <= 0:
        assert not gone


@given(tensors=TENSORS, budget=BUDGETS)
def test_the_excess_is_freed_wherever_recomputing_all_would_free_it(
    tensors: list[SavedTensors], budget: Budget
) -> None:
    choice = choose(tensors, budget)
    ways = {"swap": choice.swap, "host": choice.host, "recompute": choice.recompute}
    freed = sum(budget.count_freed(way) * bytes_of(tensors, names) for way, names in ways.items())
    most = budget.count_freed("recompute") * sum(tensor.nbytes for tensor in tensors if tensor.seconds < math.inf)
    assert freed >= min(budget.excess, most) - 1e-9


@given(tensors=TENSORS, budget=BUDGETS)
def test_what_is_recomputed_is_never_dearer_a_byte_than_what_stays(tensors: list[SavedTensors], budget: Budget) -> None:
    choice = choose(tensors, budget)
    gone = choice.swap + choice.host + choice.recompute
    kept = [tensor.seconds / tensor.nbytes for tensor in tensors if tensor.names[0] not in gone]
    again = [tensor.seconds / tensor.nbytes for tensor in tensors if tensor.names[0] in choice.recompute]
    assert not again or not kept or max(again) <= min(kept)


def test_swaps_take_the_dearest_then_the_host_then_the_cheapest_are_made_again() -> None:
    """Eight micro-batches: a byte frees 5 where it is swapped, 8 - 2/4 on the host, 8 - 1/4 where it is recomputed."""
    tensors = [SavedTensors((name,), 10, seconds) for name, seconds in zip("abcd", (8.0, 6.0, 4.0, 2.0), strict=True)]
    budget = Budget(0, 8, 4, device=10, host=10, host_s=0.01)
    assert [budget.count_freed(way) for way in ("swap", "host", "recompute")] == [5, 7.5, 7.75]
    chosen = [choose(tensors, budget._replace(excess=excess)) for excess in (1, 51, 130, 210, 300)]
    assert chosen[0] == TensorChoice(("a",))
    assert chosen[1] == TensorChoice(("a",), ("b",))
    assert chosen[2] == TensorChoice(("a",), ("b",), ("d",))
    assert chosen[3] == TensorChoice(("a",), ("b",), ("d", "c"))
    # Whoever swaps `a` frees too little.
    assert chosen[4] == TensorChoice((), ("a",), ("d", "c", "b"))
    # Copies of a layer that nothing hides, 2 x 10 / 4 bytes, take 5 s; making `b` again takes 6, `c` 4.
    slow = choose(tensors[1:], Budget(60, 8, 4, device=0, host=30, host_s=1.0))
    assert slow == TensorChoice((), ("b",))
    assert "c" in choose(tensors[1:], Budget(160, 8, 4, device=0, host=30, host_s=1.0)).recompute


def stage(*device_s: float, own_links: bool = False) -> StageTensors:
    return StageTensors((), 1.0, device_s, 1.0, own_links)


def test_stripes_are_as_large_as_the_room_over_a_switch_and_as_fast_as_the_links_between_pairs() -> None:
    room = [0.0, 100.0, 300.0, 50.0]
    assert stripe_shares(stage(math.inf, 1.0, 1.0, 8.0), room) == {1: 0.25, 2: 0.75}, "3 is too far"
    shares = stripe_shares(stage(math.inf, 1.0, 2.0, 8.0, own_links=True), room)
    assert shares == pytest.approx({1: 2 / 3, 2: 1 / 3}), "both stripes take the same time"
    assert stripe_shares(stage(math.inf, 1.0), [0.0, 0.0]) == {}


@given(
    device_s=st.lists(st.sampled_from([0.5, 1.0, 1.5, 4.0]), min_size=1, max_size=5),
    free=st.lists(st.integers(1, 100), min_size=5, max_size=5),
    away=st.integers(1, 6),
    own_links=st.booleans(),
)
def test_what_is_swapped_finds_room_and_moves_within_a_pass(
    device_s: list[float], free: list[int], away: int, own_links: bool
) -> None:
    one, room = stage(math.inf, *device_s, own_links=own_links), [0.0, *map(float, free[: len(device_s)])]
    shares = stripe_shares(one, room)
    assert sum(shares.values()) == pytest.approx(1.0)
    nbytes = swap_budget(one, shares, room, away)
    times = [share * nbytes * one.device_s[j] for j, share in shares.items()]
    assert (max(times) if own_links else sum(times)) <= one.pass_s * (1 + 1e-9)
    assert all(share * nbytes * away <= room[j] * (1 + 1e-9) for j, share in shares.items())
    # Either the pass or one keeper is used up.
    full = [share * nbytes * away == pytest.approx(room[j]) for j, share in shares.items()]
    assert any(full) or (max(times) if own_links else sum(times)) == pytest.approx(one.pass_s)


def job(m: int = 10, cluster: Any = None, framework: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 8, "hidden": 512, "heads": 8, "vocab": 512, "seq": 512, "tied": False},
        "cluster": cluster or {"gpu": "v100-sxm2-32", "gpus": 8, "gpus_per_node": 8},
        "precision": {"compute": "fp16"},
        "framework": {"name": "megatron-core", "set": framework or {}},
        "batch": {"global": 2 * m, "micro": 2},
        "plan": {"mesh": {"pp": 8}, "schemes": [{"use": "pipeline/mpress", "over": "pp", **options}]},
    }


def moves_of(run: Played) -> Counter[tuple[int, int, int]]:
    """Bytes, sender and receiver of every transfer."""
    works = [op.work for _, op in run.instances() if op.stream.startswith("pipeline-moves") and op.work is not None]
    assert all(isinstance(work, Transfer) for work in works)
    return Counter((work.nbytes, work.source, work.target) for work in works if isinstance(work, Transfer))


@cache
def plain_peaks() -> list[float]:
    return [peak.total for peak in play_job(job()).peaks]


def test_where_memory_suffices_it_is_1f1b() -> None:
    ours, plain = play_job(job()), job()
    plain["plan"]["schemes"] = [{"use": "pipeline/1f1b", "over": "pp"}]
    other = play_job(plain)
    assert ours.step.span == other.step.span
    assert [peak.total for peak in ours.peaks] == [peak.total for peak in other.peaks]


@pytest.mark.parametrize(("cluster", "share"), drawn_grid([None, "dgx-1v:1"], [0.95, 0.85]))
def test_stages_fit_and_stripes_have_the_bytes_of_their_tensors(cluster: str | None, share: float) -> None:
    limit = max(plain_peaks()) * share / 2**30
    tight = job(cluster=cluster, memory_gib=limit)
    plan, run = resolve_plan(load_job(tight)), play_job(tight)
    choices = plan.schemes[0].options.tensors
    assert any(choice.stripes for choice in choices)
    wanted = Counter[tuple[int, int, int]]()
    for i, choice in enumerate(choices):
        for stripe in choice.stripes:
            assert stripe.own_links == (cluster is not None)
            # All micro-batches but the first and the last leave and come back.
            wanted[stripe.nbytes, i, stripe.keeper] += 10 - 3 + 1
            wanted[stripe.nbytes, stripe.keeper, i] += 10 - 3 + 1
    assert moves_of(run) == wanted
    assert max(peak.total for peak in run.peaks) <= limit * 2**30
    assert [peak.left for peak in run.peaks] == [0] * 8


def test_keepers_hold_the_stripes_of_the_micro_batches_that_are_away() -> None:
    """p - i - 2 of them, as one is in transfer; the stage holds p - i - 3 fewer of what it swaps."""
    choices: list[dict[str, Any]] = [{} for _ in range(8)]
    choices[0] = {"swap": ["up"], "stripes": [[6, 3 << 20, False], [7, 1 << 20, False]]}
    quick = {"gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8}
    ours, plain = play_job(job(m=16, cluster=quick, tensors=choices)), play_job(job(m=16, cluster=quick))
    changed = [own.total - other.total for own, other in zip(ours.peaks, plain.peaks, strict=True)]
    message = 2 * 512 * 512 * 2
    assert changed[0] == pytest.approx(-5 * (4 << 20), abs=2 * message) and changed[1:6] == [0] * 5
    assert 5 * (3 << 20) <= changed[6] <= 6 * (3 << 20)
    assert 5 * (1 << 20) <= changed[7] <= 6 * (1 << 20)
    assert ours.step.span == pytest.approx(plain.step.span, rel=1e-6)


def test_each_way_does_its_work() -> None:
    """Of one stage: recomputed tensors are made again, offloaded ones copied out and back, in every micro-batch."""
    choices: list[dict[str, Any]] = [{} for _ in range(8)]
    choices[1] = {"recompute": ["up"], "host": ["act"]}
    run, plain = play_job(job(tensors=choices)), play_job(job())
    again = [op for _, op in run.instances() if op.phase == "R" and op.work is not None]
    assert {op.name for op in again} == {"re up"} and len(again) == 10
    assert run.flops("F") == plain.flops("F")
    copied = [op.work for _, op in run.instances() if isinstance(op.work, HostCopy)]
    act = 2 * 512 * 4 * 512 * 2
    assert Counter((work.nbytes, work.back) for work in copied) == {(act, False): 10, (act, True): 10}
    assert run.peaks[1].total < plain.peaks[1].total and run.peaks[2].total == plain.peaks[2].total


@pytest.mark.parametrize(("cluster", "launch"), some([*product((None, "dgx-1v:1"), (0.0, 1e-4))], 4))
def test_all_engines_agree(cluster: str | None, launch: float) -> None:
    limit = max(plain_peaks()) * 0.85 / 2**30
    check_reports(job(cluster=cluster, memory_gib=limit, framework={"launch_s": launch}))


def test_what_no_choice_can_free_stays() -> None:
    """The logits of the last stage: a limit that none can keep ends with a step, which does not fit."""
    tight = job(memory_gib=0.01)
    choices = resolve_plan(load_job(tight)).schemes[0].options.tensors
    assert not any(choice.stripes for choice in choices), "no device has room"
    assert play_job(tight).step.span >= play_job(job()).step.span
    assert replace(choices[0], stripes=()) == choices[0]

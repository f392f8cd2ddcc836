"""Groups of ranks of different context-parallel degrees: equal ones are today's plans, others take as long as the
slowest group of every round."""

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from tests.draws import drawn
from tests.simulator.plan.ideally import answers

MODEL = {"layers": 4, "hidden": 512, "heads": 16, "vocab": 32000, "seq": 4096, "positions": "rope"}
CLASSES = [
    {"sequence": 8192, "cp": 4},
    {"sequence": 4096, "cp": 2},
    {"sequence": 2048, "cp": 1},
    {"sequence": 512, "cp": 1, "tokens": 400.0},
    {"sequence": 4096, "cp": 1},
]


def job(batch: dict[str, Any], plan: dict[str, Any] | None = None) -> dict[str, Any]:
    plan = {"dp": 4, "cp": 2, "cp_scheme": "megatron-cp", **(plan or {})}
    return {"model": MODEL, "cluster": "dgx-h100:1", "plan": plan, "batch": batch}


def in_rounds(*rounds: list[list[int]], plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job of these rounds, with the classes that occur in them."""
    used = [*dict.fromkeys(number for groups in rounds for group in groups for number in group)]
    renumbered = [[[used.index(number) for number in group] for group in groups] for groups in rounds]
    return job({"lengths": [CLASSES[number] for number in used], "rounds": renumbered}, plan)


@pytest.mark.parametrize(
    ("degree", "scheme", "more"),
    [
        (1, "megatron-cp", {}),
        (2, "ring", {"zero": 2}),
        (4, "ulysses", {"tp": 2, "dp": 2, "sequence_parallel": True}),
        (8, "megatron-cp", {"zero": 0}),
        (4, "all-gather", {"recompute": "full"}),
    ],
)
def test_groups_of_one_degree_are_a_plan_of_this_degree(degree: int, scheme: str, more: dict[str, Any]) -> None:
    """To the rounding of sums: time, its parts, MFU and memory, whatever the degree of the plan."""
    kind, ranks = {"sequence": 4096, "samples": 1}, 8 // more.get("tp", 1)
    if degree > ranks:
        pytest.skip("no group of so many ranks")
    plan = {**more, "cp_scheme": scheme}
    groups = {"lengths": [{**kind, "cp": degree}], "rounds": [[[0, 0]] * (ranks // degree), [[0]] * (ranks // degree)]}
    equal = {"lengths": [kind], "order": [0, 0, 0]}
    of_groups = simulate(job(groups, plan))
    of_plan = simulate(job(equal, {**plan, "dp": ranks // degree, "cp": degree}))
    assert of_groups.step_time == pytest.approx(of_plan.step_time, rel=1e-12)
    assert of_groups.breakdown.parts == pytest.approx(of_plan.breakdown.parts, rel=1e-9, abs=1e-12)
    assert of_groups.play.peaks[0].by == pytest.approx(of_plan.play.peaks[0].by)
    assert of_groups.tokens == of_plan.tokens
    assert [of_groups.hfu, of_groups.mfu["causal"]] == pytest.approx([of_plan.hfu, of_plan.mfu["causal"]], rel=1e-9)


def test_a_step_takes_the_slowest_group_of_every_round() -> None:
    """What faster groups run changes no time, only tokens and with them the MFU."""
    slow = ([[0], [1], [3], [3]], [[1], [4, 2], *[[2]] * 5])
    busy = ([[0], [1], [2], [2]], [[1], [4, 2], [4], *[[2]] * 4])
    slowest = ([[0], [0]], [[1], [4, 2], *[[2]] * 5])
    first, second, alone = (simulate(in_rounds(*rounds)) for rounds in (slow, busy, slowest))
    assert first.step_time == pytest.approx(alone.step_time, rel=1e-12)
    assert second.step_time == pytest.approx(first.step_time, rel=1e-12)
    assert first.hfu < second.hfu < 1 and first.tokens < second.tokens

    def tokens(rounds: Any) -> float:
        every = (CLASSES[number] for groups in rounds for group in groups for number in group)
        return sum(float(kind.get("tokens", kind["sequence"])) for kind in every)

    assert [first.tokens, second.tokens] == [tokens(slow), tokens(busy)]


def test_memory_is_that_of_the_rank_with_most_tokens_at_a_time() -> None:
    """It may be in no slowest group: here many short samples take longer than one of 4,096 tokens on a rank."""
    mixed = simulate(in_rounds([[4], *[[2] * 12] * 7]))
    large, short = (simulate(in_rounds([group] * 8)) for group in ([4], [2] * 12))
    assert mixed.step_time == pytest.approx(short.step_time, rel=1e-12)
    assert short.peak_allocated < large.peak_allocated
    assert mixed.peak_allocated == pytest.approx(large.peak_allocated)


@pytest.mark.parametrize("plan", drawn([{}, {"zero": 0}, {"tp": 2, "dp": 2}], keep=2), ids=str)
def test_engines_agree(plan: dict[str, Any]) -> None:
    rounds = ([[0], [1], [2, 3], [2]], [[1, 1], [4, 2], [4], *[[2]] * 4]) if "tp" not in plan else ([[1], [2, 3], [4]],)
    one, shared = load_job(in_rounds(*rounds, plan=plan)), SharedWork()
    found, *others = (simulate(one, engine, shared_work=shared) for engine in ("matrices", "sweep", "simpy"))  # type: ignore[arg-type]
    for other in others:
        assert other.step_time == pytest.approx(found.step_time, rel=1e-9)
        assert other.breakdown.parts == pytest.approx(found.breakdown.parts, rel=1e-9, abs=1e-12)


def test_fully_sharded_weights_are_gathered_by_all_groups_together() -> None:
    """One micro-batch of each group in a round; packed samples stay within their documents."""
    packed = {"lengths": [{"sequence": 4096, "cp": 4}, {"sequence": 4096, "cp": 1, "documents": 512}]}
    report = simulate(job({**packed, "rounds": [[[0], *[[1]] * 4]]}, {"fsdp": True, "cp_scheme": "ulysses"}))
    assert isinstance(report, Report) and report.breakdown.parts["dp"] > 0


def test_the_long_form_is_the_same_job() -> None:
    one = load_job(in_rounds([[0], [1], [3], [3]], [[1], [4, 2], *[[2]] * 5]))
    assert load_job({**one.to_dict(), "model": MODEL}) == one
    assert answers(one.to_dict() | {"model": MODEL}) == answers(
        in_rounds([[0], [1], [3], [3]], [[1], [4, 2], *[[2]] * 5])
    )

"""`validate pipeline`: the contract's examples, the closed forms of the schedules, and refused cases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.validation.pipelines.cases import EXAMPLES, answer, answers
from tests.draws import drawn_grid
from tests.strategies import SECONDS, examples, shapes

EXACT = ("gpipe", "1f1b")
TRIPLE = st.tuples(SECONDS, SECONDS, SECONDS)


def case(schedule: str, p: int, m: int, times: Any = (1, 1, 1), **more: Any) -> dict[str, Any]:
    return {"schedule": schedule, "p": p, "m": m, **dict(zip(("t_f", "t_b", "t_w"), times, strict=True)), **more}


def played(fields: dict[str, Any]) -> dict[str, Any]:
    figures = answer(fields)
    assert figures["status"] == "played", figures
    return figures


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (case("1f1b", 2, 4), {"makespan": 15, "bubble_rate": 0.2, "in_flight_b": [2, 1]}),
        (case("interleaved-1f1b", 2, 4, (2, 2, 2), v=2), {"makespan": 27, "in_flight_b": [5, 3]}),
        (case("zb-h1", 4, 8), {"makespan": 27, "in_flight_b": [4, 3, 2, 1], "in_flight_w": [4, 4, 4, 4]}),
    ],
)
def test_the_examples_of_the_contract(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    figures = played(fields)
    assert {key: figures[key] for key in expected} == {k: pytest.approx(v, rel=1e-12) for k, v in expected.items()}


def test_an_answer_is_plain_json_with_the_keys_of_the_contract() -> None:
    figures = json.loads(json.dumps(played(case("1f1b", 2, 3, order=True))))
    keys = "status makespan span_max bubble_rate bubble_rate_span in_flight_b in_flight_w period weight_versions order"
    assert list(figures) == keys.split()
    assert figures["order"] == [
        ["0F0", "0F1", "0BW0", "0F2", "0BW1", "0BW2"],
        ["1F0", "1BW0", "1F1", "1BW1", "1F2", "1BW2"],
    ]
    assert "order" not in played(case("1f1b", 2, 3))
    assert (figures["period"], figures["weight_versions"]) == (None, None)


def test_the_cards_orders() -> None:
    """The worked examples p=4, m=8 of GPipe, 1F1B and the interleaved schedule (upper case: chunk 0)."""
    wanted = {
        "gpipe": ["F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"] * 4,
        "1f1b": [
            "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
            "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
            "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
        ],
        "interleaved-1f1b": [
            "F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 b4 b5 b6 b7 B4 B5 B6 B7",
            "F0 F1 F2 F3 f0 f1 f2 f3 F4 b0 F5 b1 F6 b2 F7 b3 f4 B0 f5 B1 f6 B2 f7 B3 b4 b5 b6 b7 B4 B5 B6 B7",
            "F0 F1 F2 F3 f0 f1 f2 b0 f3 b1 F4 b2 F5 b3 F6 B0 F7 B1 f4 B2 f5 B3 f6 b4 f7 b5 b6 b7 B4 B5 B6 B7",
            "F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7",
        ],
    }
    for schedule, orders in wanted.items():
        v = 2 if schedule.startswith("inter") else 1
        for device, text in enumerate(orders):
            spelt = []
            for word in text.split():
                stage = device + (4 if word[0].islower() else 0)
                spelt.append(f"{stage}{'F' if word[0] in 'Ff' else 'BW'}{word[1:]}")
            assert played(case(schedule, 4, 8, v=v, order=True))["order"][device] == spelt


# -------------------------------------------------------------------------------- the table of exact tests


@pytest.mark.parametrize("schedule", EXACT)
@given(shape=shapes(), times=TRIPLE)
def test_equal_stages(schedule: str, shape: Any, times: tuple[float, float, float]) -> None:
    p, m, u = shape.p, shape.m, sum(times)
    figures = played(case(schedule, p, m, times))
    assert figures["makespan"] == pytest.approx((m + p - 1) * u, rel=1e-12)
    assert figures["bubble_rate"] == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    held = [m] * p if schedule == "gpipe" else [min(m, p - i) for i in range(p)]
    assert figures["in_flight_b"] == held
    assert figures["in_flight_w"] == held, "without a W phase both are given back at once"
    assert figures["span_max"] == pytest.approx(figures["makespan"], rel=1e-12)


@given(p=st.integers(1, 8), groups=st.integers(1, 4), v=st.integers(2, 4), times=TRIPLE)
def test_interleaved(p: int, groups: int, v: int, times: tuple[float, float, float]) -> None:
    m, u = p * groups, sum(times)
    figures = played(case("interleaved-1f1b", p, m, times, v=v))
    assert figures["makespan"] == pytest.approx(m * u + (p - 1) * u / v, rel=1e-12)
    assert figures["in_flight_b"] == [min(m * v, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in range(p)]
    if groups > 1 and p > 1:  # in micro-batches: p (1 + (p-1)/(p v))
        assert figures["in_flight_b"][0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@given(p=st.integers(1, 8), m=st.integers(1, 24), data=st.data())
def test_gpipe_with_unequal_stages(p: int, m: int, data: st.DataObject) -> None:
    """T = sum F + (m-1) max F + sum B + (m-1) max B."""
    lists = [data.draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(3)]
    both = [b + w for b, w in zip(lists[1], lists[2], strict=True)]
    closed = sum(lists[0]) + (m - 1) * max(lists[0]) + sum(both) + (m - 1) * max(both)
    assert played(case("gpipe", p, m, lists))["makespan"] == pytest.approx(closed, rel=1e-12)


@given(p=st.integers(1, 8), m=st.integers(1, 24), data=st.data())
@examples(100)
def test_1f1b_with_unequal_stages(p: int, m: int, data: st.DataObject) -> None:
    """The card's lower bound; with B = 2F the play is at most 6 % above it."""
    f = data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    b = [2 * x for x in f] if data.draw(st.booleans()) else data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    half = [x / 2 for x in b]
    bound = max(
        sum(f[:q])
        + max(sum(f[q:]) + sum(b[q + 1 :]), min(m, p - q) * f[q])
        + m * b[q]
        + max(0, m - min(m, p - q)) * f[q]
        + sum(b[:q])
        for q in range(p)
    )
    makespan = played(case("1f1b", p, m, (f, half, half)))["makespan"]
    assert makespan >= bound * (1 - 1e-12)
    if b == [2 * x for x in f]:
        assert makespan <= bound * 1.06
    if len(set(f)) == len(set(b)) == 1:
        assert makespan == pytest.approx(bound, rel=1e-12)


@given(p=st.integers(1, 8), m=st.integers(1, 24), times=TRIPLE, hop=st.sampled_from([1 / 8, 1 / 4, 1 / 2]))
def test_gpipe_with_hops(p: int, m: int, times: tuple[float, float, float], hop: float) -> None:
    """T = (m+p-1) u + 2 (p-1) c: only filling and draining pay."""
    figures = played(case("gpipe", p, m, times, hop=hop))
    assert figures["makespan"] == pytest.approx((m + p - 1) * sum(times) + 2 * (p - 1) * hop, rel=1e-12)


@pytest.mark.parametrize(("p", "times"), drawn_grid([2, 3, 4, 5, 8], [(1, 1, 1), (2, 1, 3), (1, 2, 0.5), (4, 1, 2)]))
def test_1f1b_with_hops(p: int, times: tuple[float, float, float]) -> None:
    """T = (m+p-1) u + c [2 (p-1) m/p + 2p - 4] with m a multiple of p: every group of p pays a round trip."""
    for groups in (1, 2, 3, 5):
        for hop in (1 / 8, 1 / 4, 1 / 2):
            m = p * groups
            closed = (m + p - 1) * sum(times) + hop * (2 * (p - 1) * m / p + 2 * p - 4)
            assert played(case("1f1b", p, m, times, hop=hop))["makespan"] == pytest.approx(closed, rel=1e-12)


@given(p=st.integers(2, 6), groups=st.integers(2, 4), v=st.integers(2, 3), hop=st.sampled_from([1 / 64, 1 / 32]))
def test_interleaved_with_hops(p: int, groups: int, v: int, hop: float) -> None:
    """Strict in-order replay: (p-1) u/v + (2 p v - 2) c, the card's remark on the rows of the Zero-Bubble paper."""
    figures = played(case("interleaved-1f1b", p, p * groups, (v, v, v), v=v, hop=hop))
    assert figures["makespan"] == pytest.approx(p * groups * 3 * v + (p - 1) * 3 + (2 * p * v - 2) * hop, rel=1e-12)


# ------------------------------------------------------------------------------------------ what always holds


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    v = draw(st.integers(2, 4)) if schedule.startswith("inter") else 1
    p = draw(st.integers(1, 6))
    m = p * draw(st.integers(1, 4)) if v > 1 else draw(st.integers(1, 16))
    one = SECONDS | st.lists(SECONDS, min_size=p, max_size=p) | st.lists(SECONDS, min_size=p * v, max_size=p * v)
    return case(schedule, p, m, (draw(one), draw(one), draw(one)), v=v, hop=draw(st.sampled_from([0, 0.25, 3])))


@given(fields=cases())
def test_invariants_of_every_case(fields: dict[str, Any]) -> None:
    figures = played(fields)
    assert answer(fields) == figures, "the same case gives the same answer"
    assert figures["makespan"] >= figures["span_max"] > 0
    assert 0 <= figures["bubble_rate"] < 1
    assert figures["bubble_rate_span"] <= figures["bubble_rate"] + 1e-12
    busy = 0.0
    for name in ("t_f", "t_b", "t_w"):
        given_ = fields[name]
        mean = sum(given_) / len(given_) if isinstance(given_, list) else given_
        busy += mean * fields["m"]
    assert figures["makespan"] * (1 - figures["bubble_rate"]) == pytest.approx(busy)
    assert len(figures["in_flight_b"]) == fields["p"]
    assert all(1 <= held <= fields["m"] * fields["v"] for held in figures["in_flight_b"])
    # Held until the end of the weights' gradient is never less than until that of the inputs'.
    assert all(w >= b for b, w in zip(figures["in_flight_b"], figures["in_flight_w"], strict=True))
    without = played({**fields, "hop": 0})
    assert without["makespan"] <= figures["makespan"] + 1e-9
    assert without["in_flight_b"] == figures["in_flight_b"], "peaks depend on the order only"


@given(fields=cases(), factor=st.sampled_from([2, 8, 0.25]))
def test_time_has_no_unit(fields: dict[str, Any], factor: float) -> None:
    def scaled(value: Any) -> Any:
        return [factor * x for x in value] if isinstance(value, list) else factor * value

    more = {key: scaled(fields[key]) if key in ("t_f", "t_b", "t_w", "hop") else fields[key] for key in fields}
    assert played(more)["makespan"] == pytest.approx(factor * played(fields)["makespan"], rel=1e-12)


def test_lists_of_equal_times_are_a_number() -> None:
    for schedule, v in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 3)):
        one = played(case(schedule, 4, 8, (1, 2, 3), v=v))
        assert played(case(schedule, 4, 8, ([1] * 4, 2, [3] * 4 * v), v=v)) == one


def test_rows_keep_their_order_and_the_shipped_examples_play() -> None:
    rows = answers([case("1f1b", 2, 4), case("nonesuch", 2, 4), case("gpipe", 2, 4)])
    assert [row["status"] for row in rows] == ["played", "refused", "played"]
    assert "case 2" in answers([case("1f1b", 2, 4), {"schedule": "1f1b"}])[1]["reason"]
    assert all(row["status"] == "played" for row in answers(EXAMPLES))
    assert answers([]) == []


def test_no_work_at_all_is_no_bubble() -> None:
    figures = played(case("1f1b", 2, 2, (0, 0, 0)))
    assert (figures["makespan"], figures["bubble_rate"], figures["bubble_rate_span"]) == (0, 0, 0)


@given(p=st.integers(1, 8), more=st.integers(0, 8), share=st.sampled_from([0.0, 0.25, 0.4, 1.0]))
def test_memory_counts_the_share_that_w_needs(p: int, more: int, share: float) -> None:
    """arXiv 2401.10241, table 2: stage i (from 0) of ZB-H1 holds (p - i) M_B + i M_W."""
    figures = played(case("zb-h1", p, p + more, m_w=share))
    assert figures["memory"] == pytest.approx([p - i + i * share for i in range(p)])
    assert "memory" not in played(case("zb-h1", p, p + more))
    by_stage = [share * i / p for i in range(p)]
    figures = played(case("zb-h1", p, p + more, m_w=by_stage))
    assert figures["memory"] == pytest.approx([p - i + i * by_stage[i] for i in range(p)])


@given(m=st.integers(1, 12), share=st.sampled_from([0.0, 0.5, 1.0]))
def test_memory_is_in_micro_batches_whatever_a_chunk_is(m: int, share: float) -> None:
    assert played(case("1f1b", 4, m, m_w=share))["memory"] == [min(m, 4 - i) for i in range(4)]
    halves = played(case("v-half", 4, m, m_w=1.0))
    assert halves["memory"] == pytest.approx([chunks / 2 for chunks in halves["in_flight_w"]])
    slices = played(case("gpipe", 4, m, m_w=share))["memory"], played(case("terapipe", 4, m, m_w=share))["memory"]
    assert slices[0] == pytest.approx(slices[1]) == [m] * 4


@given(limit=st.integers(4, 8), share=st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0]))
def test_zb_auto_knows_what_w_needs(limit: int, share: float) -> None:
    """Within the same limit less memory for W's admits an order that is at least as short."""
    figures = [played(case("zb-auto", 4, 12, (1, 1, 1), memory_limit=limit, m_w=one)) for one in (share, 1.0)]
    assert max(figures[0]["memory"]) <= limit + 1e-9
    assert figures[0]["span_max"] <= figures[1]["span_max"]


# ------------------------------------------------------------------------------------------------ refused

GOOD = case("1f1b", 2, 4)


@pytest.mark.parametrize("key", ["slices", "waves", "t_pair", "t_r", "memory_limit"])
def test_a_key_of_the_contract_is_known(key: str) -> None:
    assert "no such key" not in answer({**GOOD, key: 1}).get("reason", "")


@given(fields=st.dictionaries(st.sampled_from([*GOOD, "v", "hop", "order", "x"]), st.none() | st.text(max_size=3)))
def test_nonsense_never_raises(fields: dict[str, Any]) -> None:
    assert answer(fields)["status"] == "refused"


def test_the_loss_of_a_batch_takes_its_time_between_all_passes() -> None:
    spans = [played(case("gpipe", 2, 4, t_loss=loss))["makespan"] for loss in (0.5, 3.0)]
    assert spans[1] - spans[0] == pytest.approx(2.5)

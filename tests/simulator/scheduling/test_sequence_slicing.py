"""Sequences in slices: orders, the choice of lengths, and the ops of a slice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.ir.ops import Attention, Memory, Transfer
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.block import CompiledBlocks
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import PipelineShape, actions_of
from meshcast.simulator.scheduling.sequence_slicing import choose_balanced_slices, choose_fastest_slices
from meshcast.validation.contract.measure import saved_bytes, side_ops_of
from meshcast.validation.contract.played import PAID, Ideal, play_job
from tests.draws import drawn
from tests.simulator.engine.drawn_kinds import sliced_jobs
from tests.simulator.scheduling.schedules import make_schedule, played
from tests.simulator.scheduling.test_static_orders import TRIPLES
from tests.strategies import SECONDS, SHARE, changed, examples, shapes

# ---------------------------------------------------------------------------------------------- orders


SEQ1F1B = [
    "F0a F0b F1a F1b F2a B0b F2b B0a F3a B1b F3b B1a B2b B2a B3b B3a",
    "F0a F0b F1a F1b B0b F2a B0a F2b B1b F3a B1a F3b B2b B2a B3b B3a",
    "F0a F0b F1a B0b F1b B0a F2a B1b F2b B1a F3a B2b F3b B2a B3b B3a",
    "F0a F0b B0b F1a B0a F1b B1b F2a B1a F2b B2b F3a B2a F3b B3b B3a",
]
TERAPIPE = ["F0a F0b F0c F1a F1b F1c B1c B1b B1a B0c B0b B0a"] * 3


@pytest.mark.parametrize(("name", "m", "slices", "rows"), [("seq1f1b", 4, 2, SEQ1F1B), ("terapipe", 2, 3, TERAPIPE)])
def test_orders_as_they_are_printed(name: str, m: int, slices: int, rows: list[str]) -> None:
    """Slices are letters."""
    orders = timetable(make_schedule(name, slices=slices), PipelineShape(len(rows), m, 1, slices)).orders
    words = [[f"{a.kind[0]}{a.microbatch}{'abc'[a.slice]}" for a in actions_of(order)] for order in orders]
    assert [" ".join(row) for row in words] == rows


@given(shape=shapes(), lengths=st.lists(SECONDS, min_size=1, max_size=7), times=TRIPLES)
def test_terapipe_takes_the_sum_of_all_slices_and_the_longest_for_every_further_stage(
    shape: PipelineShape, lengths: list[float], times: tuple[float, float, float]
) -> None:
    p, m, u = shape.p, shape.m, sum(times)
    answered = played("terapipe", p, m, times, slices=lengths)
    assert answered["makespan"] == pytest.approx(m * u + (p - 1) * u * max(lengths) / sum(lengths))
    assert answered["in_flight_b"] == [m * len(lengths)] * p


# ------------------------------------------------------------------------------------- choice of lengths


@st.composite
def slice_times(draw: st.DrawFn) -> tuple[int, Any]:
    """Granules of a sequence, and seconds of every slice: random, or growing with length and with the tokens before."""
    n = draw(st.integers(1, 7))
    if draw(st.booleans()):
        table = {(a, b): draw(SECONDS) for a in range(1, n + 1) for b in range(n + 1 - a)}
        return n, lambda tokens, before: table[tokens // 8, before // 8]
    fixed, each, grows = draw(SECONDS), draw(SECONDS), draw(SECONDS)
    return n, lambda tokens, before: fixed + tokens * each + grows * tokens * (before + tokens / 2)


def every_cut(n: int, count: int | None = None) -> list[tuple[int, ...]]:
    """All divisions of n granules of 8 tokens into that many slices."""
    numbers = range(n) if count is None else (count - 1,)
    inner = (cuts for number in numbers for cuts in combinations(range(1, n), number))
    return [tuple(8 * (b - a) for a, b in pairwise((0, *cuts, n))) for cuts in inner]


def of_slices(lengths: Sequence[int], lasts: Any) -> list[float]:
    return [lasts(length, before) for length, before in zip(lengths, accumulate(lengths, initial=0), strict=False)]


@given(cuts=slice_times(), m=st.integers(1, 5), p=st.integers(1, 9), data=st.data())
def test_chosen_slices_are_those_of_an_exhaustive_search(
    cuts: tuple[int, Any], m: int, p: int, data: st.DataObject
) -> None:
    """The fastest of any number, and the balanced of a number."""
    n, lasts = cuts

    def takes(lengths: Sequence[int]) -> float:
        seconds = of_slices(lengths, lasts)
        return m * sum(seconds) + (p - 1) * max(seconds)

    fastest = choose_fastest_slices(8 * n, 8, lasts, m, p - 1)
    assert fastest in every_cut(n)
    assert takes(fastest) == pytest.approx(min(map(takes, every_cut(n))))
    count = data.draw(st.integers(1, n))
    balanced = choose_balanced_slices(8 * n, 8, lasts, count)
    assert balanced in every_cut(n, count)
    assert max(of_slices(balanced, lasts)) == min(max(of_slices(cut, lasts)) for cut in every_cut(n, count))


@examples(50)
@given(grows=st.floats(1e-3, 1), fixed=st.floats(0, 4), p=st.integers(4, 96))
def test_with_attention_the_first_slices_are_longest(grows: float, fixed: float, p: int) -> None:
    """TeraPipe, table 3: lengths decrease, up to the granule."""

    def lasts(tokens: int, before: int) -> float:
        return fixed + tokens + grows * tokens * (before + tokens / 2)

    lengths = choose_fastest_slices(64, 1, lasts, 1, p - 1)
    assert sum(lengths) == 64
    assert list(lengths) == sorted(lengths, reverse=True)


# ------------------------------------------------------------------------------------------- whole jobs


@given(job=sliced_jobs(recompute=False))
def test_slices_have_the_flops_of_whole_sequences(job: dict[str, Any]) -> None:
    """Without experts, whose capacity is rounded up in every slice, and with fused attention: unfused kernels skip the
    scores of later slices, which they compute for whole sequences. Tensor ranks share no head of keys."""
    assume((job["model"].kv_heads or 0) % job["plan"]["mesh"]["tp"] == 0)
    plain = {**job, "model": job["model"].model_copy(update={"moe": None}), "plan": {**job["plan"], "views": {}}}
    plain["plan"]["schemes"] = [use for use in job["plan"]["schemes"] if not use["use"].startswith("expert/")]
    played = play_job(changed(plain, attention="flash"), engine="sweep")
    wanted = played.wanted
    assert played.flops("F") == pytest.approx(wanted, rel=1e-12)
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    assert played.flops("B", "W") == pytest.approx(backward, rel=1e-12)


@examples(30)
@given(job=sliced_jobs())
def test_weights_count_once_and_gradients_are_reduced_after_the_last_slice(job: dict[str, Any]) -> None:
    played, whole = play_job(job, engine="sweep"), resolve_plan(load_job(uncut(job)))
    stages, _ = lower_stages(whole)
    sizes = [[(p.name, p.size, n) for p, n in held] for held in device_params(whole, stages)]
    assert [[(p.name, p.size, n) for p, n in held] for held in device_params(played.plan, played.stages)] == sizes
    table = played.program.timetable
    for device in range(played.plan.shape.p):
        *earlier, last = played.actions(device)
        assert not any(side_ops_of(played.task(action).behind) for action in earlier)
        assert table.actions[last].kind == "BW" and table.actions[last].slice == 0
        wanted = [op.work for stage_ops in [stages[device]] for op in side_ops_of(stage_ops.behind)]  # type: ignore[union-attr]
        assert [op.work for op in side_ops_of(played.task(last).behind)] == wanted


def uncut(job: dict[str, Any]) -> dict[str, Any]:
    """The job with whole sequences."""
    schemes = [{"use": "pipeline/gpipe", "over": "pp"}, *job["plan"]["schemes"][1:]]
    return {**job, "plan": {**job["plan"], "schemes": schemes}}


WHOLE_SEQUENCES = {
    "pipeline/seq1f1b": "pipeline/1f1b",
    "pipeline/slimpipe": "pipeline/1f1b",
    "pipeline/terapipe": "pipeline/gpipe",
}
"""Schedules of slices, and the schedule of whole sequences that each is with one slice."""


@examples(30)
@given(job=sliced_jobs(tuple(WHOLE_SEQUENCES)))
def test_one_slice_is_the_whole_sequence(job: dict[str, Any]) -> None:
    schemes = [{**job["plan"]["schemes"][0], "slices": 1}, *job["plan"]["schemes"][1:]]
    one = play_job({**job, "plan": {**job["plan"], "schemes": schemes}}, engine="sweep")
    whole = uncut(job)
    whole["plan"]["schemes"][0] = {"use": WHOLE_SEQUENCES[schemes[0]["use"]], "over": "pp"}
    same = play_job(whole, engine="sweep")
    assert one.times.span == same.times.span and one.peaks == same.peaks


# ------------------------------------------------------------------------------- keys and values in memory

SMALL = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 48, "tied": False}
LENGTHS = [24, 16, 8]
KV = 2 * 4 * 8 * 2
"""Bytes of the keys and values of a token of `SMALL`: bf16."""


def small(
    slices: Any = LENGTHS,
    use: str = "terapipe",
    mesh: dict[str, int] | None = None,
    inner: Sequence[dict[str, Any]] = (),
    model: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    sizes = {"pp": 2, **(mesh or {})}
    kinds = {"dp": "data/ddp", "cp": "sequence/all-gather", "tp": "tensor/megatron-sp"}
    schemes = [{"use": f"pipeline/{use}", "over": "pp", "slices": slices, **more}]
    schemes += [{"use": kinds[axis], "over": axis} for axis in sizes if axis != "pp"]
    return {
        "model": {**SMALL, **(model or {})},
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod(sizes.values())},
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": 2},
        "plan": {"mesh": sizes, "schemes": [*schemes, *inner]},
    }


def layers(job: dict[str, Any]) -> list[Any]:
    """A layer of every slice."""
    stages, _ = lower_stages(resolve_plan(load_job(job)))
    return [next(unit_run for unit_run in stage_ops.unit_runs if unit_run.name == "layer") for stage_ops in stages[0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mesh", "cut"), [({}, 1), ({"tp": 2}, 2), ({"cp": 2}, 1)], ids=["alone", "heads", "positions"]
)
def test_gradients_of_keys_and_values_wait_for_the_slices_before(mesh: dict[str, int], cut: int) -> None:
    """The backward pass of a slice keeps the gradients of all tokens before it, and frees those that later slices kept.
    Ranks that share positions have gathered keys and values of all of them. All but the last slice add to the gradients
    of all tokens up to their own, by a kernel.
    """
    before, blocks = [0, 24, 40], CompiledBlocks()
    for unit_run, start, length in zip(layers(small(mesh=mesh)), before, LENGTHS, strict=True):
        events = blocks.block(unit_run, "F", False).memory.net + blocks.block(unit_run, "BW", False).memory.net
        later = (start + length) * KV / cut if length != LENGTHS[-1] else 0
        assert events.sum() == events[CATEGORIES.index("activations")] == start * KV / cut - later
        kernels = [op.work for op in unit_run.fragment.backward if op.name == "dcore" and isinstance(op.work, Memory)]
        assert mesh or [work.write for work in kernels] == [later] * (later > 0)


def test_a_recomputed_layer_keeps_its_keys_and_values_for_later_slices() -> None:
    full, without = layers(small(inner=[{"use": "memory/recompute-full"}])), layers(small())
    for unit_run, length in zip(full, LENGTHS, strict=True):
        stays = length * KV if length != LENGTHS[-1] else 0
        assert saved_bytes(unit_run) == 2 * 64 * length + stays
    whole = layers({**small(), "plan": small([12, 12, 12, 12])["plan"]})
    assert sum(map(saved_bytes, without)) == sum(map(saved_bytes, whole)), (
        "the bytes kept of a token do not depend on its slice"
    )


@pytest.mark.parametrize(
    ("model", "met"),
    [({}, (24, 40, 48)), ({"window": 12}, (24, 28, 20)), *(({"attention_chunk": n}, None) for n in (7, 24, 40))],
)
def test_a_slice_attends_to_all_tokens_before_it(model: dict[str, int], met: tuple[int, ...] | None) -> None:
    """Queries of the slice, keys of it and of all tokens before within the window or the chunk; each pair once, whether
    or not slices end where chunks do."""
    runs = layers(small(model=model | ({"full_every": 0} if model else {})))
    cores = [op.work for run in runs for op in run.fragment.forward if isinstance(op.work, Attention)]
    assert met is None or ([core.q for core in cores], tuple(core.kv for core in cores)) == (LENGTHS, met)
    window, (full, rest) = model.get("window", 48), divmod(48, model.get("attention_chunk", 48))
    pairs = (full * (48 // full) ** 2 if rest == 0 else full * model["attention_chunk"] ** 2 + rest**2) / 2
    if "window" in model:
        pairs = 48 * window - window * window / 2
    assert sum(core.batch * core.q * core.kv * core.share for core in cores) == pytest.approx(pairs)


# -------------------------------------------------------------------------------- slices by forecast

LONG = {"layers": 16, "hidden": 256, "heads": 4, "vocab": 512, "seq": 4096, "positions": "rope", "tied": False}


def long(slices: Any, use: str = "terapipe", pp: int = 16, **more: Any) -> dict[str, Any]:
    job = small(slices, use, {"pp": pp}, model=LONG, **more)
    return {**job, "model": LONG, "batch": {"global": 1}}


def with_launches(work: Any) -> tuple[float, float, float]:
    """Ideal prices and 5 us more for every kernel; messages are free."""
    seconds, *rest = Ideal(flops=1e12, memory=1e12, links=math.inf)(work)
    return (seconds + (0.0 if isinstance(work, Transfer) else 5e-6), *rest)


@pytest.mark.slow
def test_slices_are_chosen_by_their_time() -> None:
    """Long ones come first, and the step is shorter than with any number of equal slices."""
    found = play_job(long("auto"), with_launches, engine="matrices")
    lengths = found.plan.slice_lengths
    assert sum(lengths) == 4096 and len(lengths) == found.plan.shape.slices > 4
    assert all(length % 8 == 0 for length in lengths)
    ends = list(accumulate(lengths))
    first = sum(end <= 2048 for end in ends)
    assert first < len(ends) - first, "fewer and longer slices first"
    for number in (1, 4, 8, 16, 32) if SHARE == 1 else (4, 16):
        assert found.step.span < play_job(long(number), with_launches, engine="matrices").step.span


@pytest.mark.parametrize(
    ("cluster", "tensor", "m", "sequence", "hidden", "layers", "vocab"),
    drawn(
        [
            ("dgx-a100:1", 4, 1, 512, 8192, 4, 32000),
            ("dgx-a100:2", 4, 1, 2048, 8192, 12, 32000),
            ("dgx-2:2", 2, 1, 8192, 1024, 32, 128256),
            ("dgx-2:8", 8, 1, 3072, 4096, 16, 128256),
            ("dgx-2:4", 8, 8, 8192, 1024, 16, 32000),
            ("dgx-h100:2", 1, 2, 2048, 2048, 16, 128256),
            ("dgx-a100:2", 2, 8, 8192, 1024, 8, 32000),
        ],
        keep=7,
    ),
)
def test_chosen_slices_never_lose_to_equal_ones(
    cluster: str, tensor: int, m: int, sequence: int, hidden: int, layers: int, vocab: int
) -> None:
    """Of any number. The dynamic programme alone, which sees a stage in the middle, loses up to 10 % in four of six. A
    host that takes longer than a slice of some sizes is not part of the plan."""
    shared, gpus = SharedWork(), load_cluster(cluster).gpus
    shape = {"layers": layers, "hidden": hidden, "heads": hidden // 128, "vocab": vocab, "seq": sequence}

    def seconds(slices: Any) -> float:
        schemes = [
            {"use": "pipeline/terapipe", "over": "pp", "slices": slices},
            {"use": "tensor/megatron", "over": "tp"},
        ]
        plan = {"mesh": {"pp": gpus // tensor, "tp": tensor}, "schemes": schemes}
        job = {"model": shape, "cluster": cluster, "batch": {"global": m}, "precision": "fp16", "plan": plan}
        return simulate(job | {"framework": {"set": {"launch_s": 1e-5}}}, shared_work=shared).step_time

    counts = [n for n in range(1, 65 if SHARE == 1 else 17) if sequence % n == 0]
    assert seconds("auto") <= min(map(seconds, counts)) * (1 + 1e-9)


def test_balanced_slices_take_equally_long() -> None:
    runs = (long(4, "seq1f1b", 4, balanced=balanced) for balanced in (True, False))
    even, equal = (play_job(run, with_launches, engine="matrices") for run in runs)
    lengths = list(even.plan.slice_lengths)
    assert len(lengths) == 4 and lengths == sorted(lengths, reverse=True)
    assert even.step.span < equal.step.span

    def range_of(run: Any) -> float:
        runs = [[op for unit in part.unit_runs for op in unit.fragment.forward if op.work] for part in run.stages[1]]
        seconds = [sum(PAID(op.work)[0] for op in ops) for ops in runs]
        return max(seconds) / min(seconds)

    assert range_of(even) < range_of(equal)


@pytest.mark.slow
def test_slices_are_chosen_at_the_catalogs_prices_and_reported() -> None:
    """GPT-3 on 48 stages in two micro-batches, the paper's case (section 4.2)."""

    def gpt3(use: str, **slices: Any) -> Any:
        schemes = [{"use": use, "over": "pp", **slices}, {"use": "tensor/megatron", "over": "tp"}]
        plan = {"mesh": {"pp": 48, "tp": 8}, "schemes": schemes}
        cluster = {"gpu": "v100-sxm2-16", "gpus": 384}
        job = {"model": "gpt3-175b", "cluster": cluster, "batch": {"global": 2}, "precision": "fp16", "plan": plan}
        return simulate(job)

    whole, cut = gpt3("pipeline/gpipe"), gpt3("pipeline/terapipe", slices="auto")
    lengths = cut.play.plan.slice_lengths
    assert 10 <= len(lengths) <= 25 and list(lengths) == sorted(lengths, reverse=True)
    assert 3.5 < whole.step_time / cut.step_time < 6, "the paper measures 5.0"
    assert f"slices of {len(lengths)} x {lengths[0]} tokens, as they take least" in cut.assumed


def test_slices_are_not_shorter_than_a_granule() -> None:
    """A sequence of few granules: all bounds of slices are multiples of the length that ranks can shard."""
    job = small("auto", mesh={"tp": 4, "cp": 2})
    played = play_job(job, Ideal(links=math.inf, memory=math.inf))
    assert sum(played.plan.slice_lengths) == 48 and all(length % 8 == 0 for length in played.plan.slice_lengths)
    job = small(9, "seq1f1b", mesh={"tp": 4, "cp": 2}, balanced=True)
    assert play_job(job).plan.slice_lengths == (8,) * 6, "there are six granules only"


@pytest.mark.slow
def test_slices_that_exchange_attention_take_equally_long() -> None:
    """Two of eight slices have about the mean; the bubble of equal slices comes back, at equal work."""
    alone, chosen, exchanged = (
        simulate(small(**{**one, "slices": 8}, model={**LONG, "seq": 65536}, mesh={"pp": 4})).to_dict()["breakdown_s"]
        for one in ({"use": "seq1f1b"}, {"use": "seq1f1b", "balanced": True}, {"use": "slimpipe"})
    )
    work = {name: one["compute"]["attention"] for name, one in (("alone", alone), ("exchanged", exchanged))}
    assert work["exchanged"] == pytest.approx(work["alone"], rel=0.05)
    assert exchanged["bubble"] < chosen["bubble"] < alone["bubble"]
    assert exchanged["exposed"]["pp"] > alone["exposed"]["pp"]

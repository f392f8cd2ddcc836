"""Memory: lifetimes of tensors, peaks of devices, and the papers' formulas through whole plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import Fragment, Memory, Op, TensorUse, UnitRun
from meshcast.simulator.program.memory_profile import CATEGORIES, Profile, block_events, memory_events
from meshcast.validation.contract.of_tensor import LoweredLayer, activations_per_layer
from meshcast.validation.contract.played import Ideal, Played, play_job, summed_over
from tests.draws import drawn, drawn_grid
from tests.simulator.engine.drawn_kinds import KINDS
from tests.strategies import EVERY_EXAMPLE, examples, jobs

# ------------------------------------------------------------------------------------------------ tensor uses


def op(name: str, phase: str = "F") -> Op:
    return Op(name, work=Memory("add", 1, 1), phase=phase)


def test_memory_lives_from_the_first_use_to_the_last() -> None:
    f1, f2, f3, b1, b2 = op("f1"), op("f2"), op("f3"), op("b1", "B"), op("b2", "B")
    elsewhere = op("of another stage")
    tensor_uses = [
        TensorUse("kept", 100, b1),
        TensorUse("kept", 100, f2, made=True),
        TensorUse("within forward", 10, f1, made=True),
        TensorUse("within forward", 12, f3),
        TensorUse("within backward", 7, b1, made=True),
        TensorUse("within backward", 7, b2),
        TensorUse("logits", 50, f3, True, "logits"),
        TensorUse("logits", 50, b2, False, "workspace"),
        TensorUse("one op", 3, f2),
        TensorUse("empty", 0, f2),
        TensorUse("not here", 1000, elsewhere),
    ]
    events = memory_events(tensor_uses, [f1, f2, f3], [b1, b2], UnitRun("unit", Fragment()))
    changes = {(op.name, at_end, nbytes, category) for op in events for _, at_end, nbytes, category in events[op]}
    spans = [("f2", "b1", 100, "activations"), ("f1", "f3", 12, "workspace"), ("b1", "b2", 7, "workspace")]
    spans += [("f3", "b2", 50, "logits"), ("f2", "f2", 3, "workspace")]
    assert changes == {
        change
        for first, last, nbytes, category in spans
        for change in ((first, False, nbytes, category), (last, True, -nbytes, category))
    }


def test_tensors_passed_between_units_are_allocated_once() -> None:
    """The residual is taken where it is made and given back where it was needed last; so is its gradient."""
    f1, f2, b1, b2 = op("f1"), op("f2"), op("b1", "B"), op("b2", "B")
    tensor_uses = [TensorUse("x", 8, f1), TensorUse("x", 8, b2), TensorUse("y", 9, f2, made=True)]
    tensor_uses += [TensorUse("d:y", 5, b1), TensorUse("d:x", 4, b2, made=True)]
    events = memory_events(tensor_uses, [f1, f2], [b1, b2], UnitRun("unit", Fragment(), 1, "x", "y", ("x", "y")))
    names = {one: one.name for one in (f1, f2, b1, b2)}
    assert sorted((names[at], *event) for at, found in events.items() for event in found) == [
        ("b1", 0, True, -5, "workspace"),
        ("b2", 0, False, 4, "workspace"),
        ("b2", 0, True, -8, "activations"),
        ("f2", 0, False, 9, "activations"),
    ]


def test_buffers_of_a_collective_are_freed_once_an_op_has_waited_for_it() -> None:
    """The host goes on behind a collective: its buffers are free where the computation first waits for it."""
    a, gather, b, user, c = op("a"), op("gather"), op("b"), op("user"), op("c")
    gather.stream = "tensor"
    events = {gather: [(0, False, 7.0, "workspace"), (0, True, -3.0, "workspace")]}
    ops = [a, gather, b, user, c]
    assert block_events(ops, [(), (0,), (0,), (1,), (1,)], events) == [
        (1, False, 7.0, "workspace"),
        (2, True, -3.0, "workspace"),
    ]
    # Nobody waits for it in this pass.
    assert block_events(ops, [()] * 5, events)[1] == (4, True, -3.0, "workspace")


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(CATEGORIES)), max_size=6),
            st.integers(1, 4),
        ),
        max_size=4,
    )
)
def test_profiles_are_walks_in_short(rows: list[tuple[list[tuple[bool, int, str]], int]]) -> None:
    """Peak and categories of repeated profiles equal those of a walk over all their events."""
    held = dict.fromkeys(CATEGORIES, 0.0)
    top = 0.0
    profiles = []
    for changes, count in rows:
        # One place an event: every unit begins with what is there.
        events = [(i, less, -n if less else n, category) for i, (less, n, category) in enumerate(changes)]
        profiles.append((Profile.of(events), count))
        for _ in range(count):
            for _, _, nbytes, category in events:
                held[category] += nbytes
                top = max(top, sum(held.values()))
    found = Profile.in_series(profiles)
    assert dict(zip(CATEGORIES, found.net.tolist(), strict=True)) == held
    assert found.top.sum() == top


@pytest.mark.parametrize("kind", ["pipelines", "slices", "graphs"])
@settings(max_examples=30 if EVERY_EXAMPLE else 2)
@given(data=st.data())
def test_the_peak_adds_up_by_category(kind: str, data: st.DataObject) -> None:
    """The largest sum of all categories over all moments, op by op, with the states that live through the step."""
    played = play_job(data.draw(KINDS[kind]), engine="matrices")
    for device, peak in enumerate(played.peaks):
        resting, levels = played.resting(device), [*accumulate(nbytes for _, nbytes, _ in played.changes(device))]
        assert peak.left == 0 and levels[-1] == pytest.approx(0, abs=1e-6)
        assert peak.total == pytest.approx(sum(peak.by.values()))
        assert peak.total == pytest.approx(max(0.0, *levels) + sum(resting.values()))
        for name, nbytes in peak.by.items():
            assert 0 <= nbytes - resting.get(name, 0) <= played.category_peak(device, name) + 1e-6


def test_messages_during_an_action_are_in_flight() -> None:
    """1F1B at its peak: the forward pass before has sent, the backward pass behind receives; the last device has no
    forward pass that sends, and no backward pass that receives."""
    message = 2 * S * B * H
    played = gpt(4, 1, 4, 8, "tp", "none")
    assert [peak.by.get("buffers", 0) for peak in played.peaks] == [2 * message, 2 * message, 2 * message, message]
    waits = gpt(4, 1, 4, 8, "tp", "none", framework={"overlap": {"dp": True, "pp": False}})
    for peak, without in zip(played.peaks, waits.peaks, strict=True):
        assert "buffers" not in without.by
        assert without.by == {name: nbytes for name, nbytes in peak.by.items() if name != "buffers"}


@given(job=jobs(), price=st.builds(Ideal, links=st.sampled_from([1e4, 1e9]), flops=st.sampled_from([1e6, 1e12])))
@examples(20)
def test_memory_follows_the_order_and_not_the_times(job: dict[str, Any], price: Ideal) -> None:
    assert play_job(job, price, engine="matrices").peaks == play_job(job, engine="sweep").peaks


@given(job=jobs(recompute=False))
@examples(30)
def test_resident_states_match_the_papers(job: dict[str, Any]) -> None:
    """bf16 weights, fp32 gradients, master weights and two moments: 18 bytes a parameter; ZeRO-1 6 + 12/n; FSDP, whose
    cut weights are the master weights, 16/n. n ranks see other tokens with the same weights, of experts other ones."""
    played = play_job(job)
    (data,) = played.plan.family("data")
    for device, peak in enumerate(played.peaks):
        wanted = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
        for param in played.list_held(device):
            n = played.plan.mesh.size(summed_over(param, played.plan))
            sharded = data.use == "data/fsdp" and n > 1
            each = (4 / n, 4 / n, 8 / n) if sharded else (2, 4, 12 / (1 if data.use == "data/ddp" else n))
            for name, nbytes in zip(wanted, each, strict=True):
                wanted[name] += nbytes * param.size
        assert played.resting(device) == pytest.approx(wanted)
        if data.use != "data/fsdp":
            assert {name: peak.by[name] for name in wanted} == pytest.approx(wanted)


# ----------------------------------------------------------------------------- Korthikanti et al. 2022

S, B, H, A = 32, 2, 64, 8
STATISTICS = 8 * S * B
"""Bytes of the mean and the deviation of a norm, which the paper leaves out as much less than the rest."""

LAYER = {
    # b, s, h of one micro-batch; t tensor ranks; arXiv 2205.05198, equations 1, 2, 4 and section 5
    ("tp", "none"): lambda t: S * B * H * (10 + 24 / t + 5 * A * S / (H * t)) + 2 * STATISTICS,
    ("tp", "selective"): lambda t: S * B * H * (10 + 24 / t) + 2 * STATISTICS,
    ("tp", "full"): lambda t: 2 * S * B * H,
    ("sp", "none"): lambda t: (S * B * H * (34 + 5 * A * S / H) + 2 * STATISTICS) / t,
    ("sp", "selective"): lambda t: (34 * S * B * H + 2 * STATISTICS) / t,
    ("sp", "full"): lambda t: 2 * S * B * H / t,
}


def gpt(
    layers: int, t: int, p: int, m: int, kind: str, recompute: str, framework: dict[str, Any] | None = None, **plan: Any
) -> Played:
    traits = {"attention": "unfused", "dummy_gradients": False, **(framework or {})}
    job = {
        "model": {"layers": layers, "hidden": H, "heads": A, "vocab": 128, "seq": S, "dropout": 0.1, "tied": False},
        "cluster": {"gpu": "h100-sxm", "gpus": t * p},
        "framework": {"name": "megatron-core", "set": traits},
        "batch": {"global": m * B, "micro": B},
        "plan": {"tp": t, "pp": p, "recompute": recompute, "sequence_parallel": kind == "sp", "zero": 0, **plan},
    }
    return play_job(job, engine="matrices")


def at_the_ends(played: Played, device: int, kind: str, t: int) -> float:
    """Bytes of a micro-batch outside of its layers: the dropout mask of the embedding and its ids (eight bytes each);
    the final norm's input, output and statistics."""
    if device == 0:
        return S * B * H / (t if kind == "sp" else 1) + 8 * S * B
    if device == played.plan.shape.p - 1:
        return (4 * S * B * H + STATISTICS) / (t if kind == "sp" else 1)
    return 0.0


@pytest.mark.parametrize("t", drawn([2, 1, 4], keep=3))
@pytest.mark.parametrize(("kind", "recompute"), LAYER.keys())
def test_activations_of_a_whole_plan(kind: str, recompute: str, t: int) -> None:
    """Stage i of 1F1B holds p - i micro-batches of its L/p layers: the first stage as many activations as all L layers
    have.
    """
    p, layers, m = 4, 8, 6
    played = gpt(layers, t, p, m, kind, recompute)
    for device in range(p):
        one = layers // p * LAYER[kind, recompute](t) + at_the_ends(played, device, kind, t)
        assert played.most_kept(device) == pytest.approx((p - device) * one)
        # At its end a forward pass holds what it is about to send as well.
        leaving = 2 * S * B * H / (t if kind == "sp" else 1) if device < p - 1 else 0
        assert played.category_peak(device, "activations") == pytest.approx((p - device) * one + leaving)
    first = played.most_kept(0) - p * at_the_ends(played, 0, kind, t)
    assert first == pytest.approx(layers * LAYER[kind, recompute](t))


@pytest.mark.parametrize(("p", "v"), drawn([(3, 2), (2, 2), (4, 2), (4, 3)], keep=4))
def test_interleaving_holds_more(p: int, v: int) -> None:
    """The first stage keeps L (1 + (p-1)/(p v)) layers' worth: section 4.2.3, with v chunks a device."""
    layers, each = p * v, LAYER["tp", "none"](1)
    played = gpt(layers, 1, p, 3 * p, "tp", "none", chunks=v)
    chunks = layers * (1 + (p - 1) / (p * v))  # of one layer each
    for device in range(1, p - 1):
        assert played.most_kept(device) == pytest.approx((2 * (p - 1 - device) + (v - 1) * p + 1) * each)
    # Some of the first device's chunks are the first stage, with the embedding's own few bytes.
    of_the_first = (played.most_kept(0) - chunks * each) / at_the_ends(played, 0, "tp", 1)
    assert 1 <= of_the_first <= chunks and of_the_first == pytest.approx(round(of_the_first))


@pytest.mark.parametrize("t", [1, 2])
def test_logits_of_the_last_stage(t: int) -> None:
    """Four bytes per logit, sharded along the vocabulary, wait for the backward pass of one micro-batch; two more per
    logit, or per gradient of one, have the format of the activations.
    """
    played = gpt(4, t, 2, 4, "sp", "none")
    assert played.category_peak(1, "logits") == (4 + 2) * B * S * 128 / t
    assert played.category_peak(0, "logits") == 0


SAVINGS = {
    # sbh bytes that one layer keeps less (MHA, f = 4h, dropout; 5 as/h for the scores): card of the memory table
    "core_attn": 5 * A * S / H,
    "attention": 8 + 5 * A * S / H,
    "mlp": 16,
}


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("module", SAVINGS)
def test_memory_saved_by_recomputing_a_module(module: str, t: int) -> None:
    def kept(*more: Any) -> float:
        return activations_per_layer(LoweredLayer(t, B, S, H, A, more=more), "tensor/megatron-sp")

    less = kept() - kept(("memory/recompute-selective", (("modules", (module,)),)))
    assert less == pytest.approx(SAVINGS[module] * S * B * H / t)


@pytest.mark.parametrize(("gated_heads", "t"), drawn_grid([(True, 8), (True, 2), (False, 4)], [1, 2]))
def test_modern_layers_with_a_fused_kernel(gated_heads: tuple[bool, int], t: int) -> None:
    """Without dropout, flash attention: sbh (R + S)/t + 4abs/t, R = 8, S = 4 + 4g/a + (4 or 6) f/h (tensor.md, 1); and
    the root mean squares of two norms, 8bs/t."""
    (gated, kv_heads), ffn = gated_heads, 160
    model = {"hidden": H, "heads": A, "kv_heads": kv_heads, "vocab": 128, "seq": S, "gated": gated, "ffn": ffn}

    def peak(layers: int) -> float:
        job = {
            "model": {**model, "layers": layers, "positions": "rope", "norm": "rmsnorm"},
            "cluster": {"gpu": "h100-sxm", "gpus": t},
            "batch": {"global": B, "micro": B},
            "plan": {"tp": t},
        }
        return play_job(job, engine="matrices").most_kept(0)

    cut = 4 + 4 * kv_heads / A + (6 if gated else 4) * ffn / H
    assert peak(3) - peak(2) == pytest.approx((S * B * H * (8 + cut) + 4 * A * B * S + 8 * B * S) / t)


@given(t=st.sampled_from([1, 2, 4]), use=st.sampled_from(["tensor/megatron", "tensor/megatron-sp"]))
def test_gathering_again_never_keeps_more(t: int, use: str) -> None:
    again, kept = (activations_per_layer(LoweredLayer(t, regather=regather), use) for regather in (True, False))
    if t > 1 and use.endswith("-sp"):
        assert kept - again == pytest.approx(2 * 2 * 64 * 128 * (1 - 1 / t))
    else:
        assert kept == again


def test_what_waits_for_its_sum_or_softmax_takes_memory() -> None:
    """While the MLP goes backward, the gradient that the residual hands past it stays: one b s h more. The scores of
    unfused attention are live together with their softmax."""
    setting = LoweredLayer(t=1, b=1, s=S, h=H, a=A)
    fragment = replace(setting, attention="flash").layer(None)[0].fragment
    keys = {use.key for use in fragment.tensor_uses if use.op.name == "add dmiddle"}
    assert any(key.startswith("d:end@") for key in keys), keys
    uses = setting.layer(None)[0].fragment.tensor_uses
    assert [use.nbytes for use in uses if use.key.startswith(("core.0", "d:core.")) and use.made] == [2 * A * S * S] * 3


@pytest.mark.parametrize(
    ("model", "pp", "chunks", "batch", "whole", "least"),
    [
        ("megatron-22b", 1, 1, {"global": 4, "micro": 4}, 59.25, 9.5625),
        ("gpt3-175b", 8, 3, {"global": 16}, 66.84, 12.35),
    ],
)
def test_figure_1_of_the_sequence_parallelism_paper(
    model: str, pp: int, chunks: int, batch: dict[str, int], whole: float, least: float
) -> None:
    """GiB of activations on the first stage, TP 8: nothing recomputed, and SP with selective (arXiv 2205.05198)."""

    def activations(sequence_parallel: bool, recompute: str) -> float:
        plan = {"tp": 8, "pp": pp, "chunks": chunks, "recompute": recompute, "sequence_parallel": sequence_parallel}
        job = {"model": model, "cluster": f"dgx-a100:{pp}", "batch": batch, "plan": plan}
        played = play_job({**job, "framework": {"set": {"attention": "unfused"}}}, engine="matrices")
        return played.most_kept(0) / 2**30

    assert activations(False, "none") == pytest.approx(whole, rel=0.02)
    assert activations(True, "selective") == pytest.approx(least, rel=0.02)

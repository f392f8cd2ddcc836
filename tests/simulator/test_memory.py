"""Memory: how long a tensor lives, what a device holds at its peak, and the papers' formulas through whole plans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.program import memory_events
from simulator.ops import Memory, Op, Touch
from tests.contract.measure import LayerSetting, Played, activations_per_layer, per_layer, play_job, saved
from tests.strategies import jobs

# ------------------------------------------------------------------------------------------------ touches


def op(name: str, phase: str = "F") -> Op:
    return Op(name, work=Memory("add", 1, 1), phase=phase)


def test_memory_lives_from_the_first_touch_to_the_last() -> None:
    f1, f2, f3, b1, b2 = op("f1"), op("f2"), op("f3"), op("b1", "B"), op("b2", "B")
    elsewhere = op("of another stage")
    touches = [
        Touch("kept", 100, b1),
        Touch("kept", 100, f2, made=True),
        Touch("within forward", 10, f1, made=True),
        Touch("within forward", 12, f3),
        Touch("within backward", 7, b1, made=True),
        Touch("within backward", 7, b2),
        Touch("logits", 50, f3, True, "logits"),
        Touch("logits", 50, b2, False, "workspace"),
        Touch("one op", 3, f2),
        Touch("empty", 0, f2),
        Touch("not here", 1000, elsewhere),
    ]
    events = memory_events(touches, [f1, f2, f3], [b1, b2])
    spans: dict[str, tuple[Any, ...]] = {}
    for (first, at_end, taken, category), (last, at_end_too, given_, same) in zip(
        events[::2], events[1::2], strict=True
    ):
        assert (at_end, at_end_too) == (False, True) and given_ == -taken and same == category
        spans[f"{taken}"] = (first.name, last.name, category)
    assert spans == {
        "100": ("f2", "b1", "activations"),
        "12": ("f1", "f3", "workspace"),
        "7": ("b1", "b2", "workspace"),
        "50": ("f3", "b2", "logits"),
        "3": ("f2", "f2", "workspace"),
    }


def by_hand(played: Played, device: int) -> tuple[float, dict[str, float]]:
    """The largest sum and its parts, by walking over all moments; what lives through the step left out."""
    changes = []
    for _, start, task in played.program.actions[device]:
        for place, at_end, nbytes, category in task.events:
            when = (played.times.end if at_end else played.times.begin)[start + place]
            changes.append((when, nbytes, category))
    held: dict[str, float] = {}
    top, best = 0.0, dict(held)
    for _, nbytes, category in sorted(changes, key=lambda change: change[:2]):
        held[category] = held.get(category, 0.0) + nbytes
        if sum(held.values()) > top:
            top, best = sum(held.values()), dict(held)
    return top, best


@settings(max_examples=30)
@given(told=jobs())
def test_the_peak_adds_up_by_category(told: dict[str, Any]) -> None:
    played = play_job(told)
    static = ("parameters", "gradients", "optimizer")
    for device, peak in enumerate(played.peaks):
        top, _ = by_hand(played, device)
        assert peak.total == pytest.approx(sum(peak.by.values()))
        assert peak.total == pytest.approx(top + sum(peak.by[name] for name in static))
        for name, nbytes in peak.by.items():
            if name not in static:
                assert 0 <= nbytes <= played.category_peak(device, name) + 1e-6


@given(told=jobs(recompute=False))
@settings(max_examples=30)
def test_states_rest_as_the_papers_say(told: dict[str, Any]) -> None:
    """bf16 weights, fp32 gradients, master weights and two moments: 18 bytes a parameter; ZeRO-1 6 + 12/n."""
    played = play_job(told)
    plan = played.plan
    n = plan.mesh.size("dp") if any(scheme.use == "data/zero-1" for scheme in plan.inside) else 1
    for device, peak in enumerate(played.peaks):
        stages = [s for i, s in enumerate(played.stages) if plan.schedule.device(plan.shape, i) == device]
        local = sum(param.size for stage in stages for param in stage.fragment.params)
        resting = {name: peak.by[name] for name in ("parameters", "gradients", "optimizer")}
        assert resting == pytest.approx({"parameters": 2 * local, "gradients": 4 * local, "optimizer": 12 * local / n})


# ----------------------------------------------------------------------------- Korthikanti et al. 2022

S, B, H, A = 32, 2, 64, 8
LAYER = {
    # b, s, h of one micro-batch; t tensor ranks; arXiv 2205.05198, equations 1, 2, 4 and section 5
    ("tp", "none"): lambda t: S * B * H * (10 + 24 / t + 5 * A * S / (H * t)),
    ("tp", "selective"): lambda t: S * B * H * (10 + 24 / t),
    ("tp", "full"): lambda t: 2 * S * B * H,
    ("sp", "none"): lambda t: S * B * H / t * (34 + 5 * A * S / H),
    ("sp", "selective"): lambda t: 34 * S * B * H / t,
    ("sp", "full"): lambda t: 2 * S * B * H / t,
}


def gpt(layers: int, t: int, p: int, m: int, kind: str, recompute: str, **plan: Any) -> Played:
    model = {"layers": layers, "hidden": H, "heads": A, "vocab": 128, "seq": S, "dropout": 0.1, "tied": False}
    plan = {"tp": t, "pp": p, "recompute": recompute, "sequence_parallel": kind == "sp", "zero": 0, **plan}
    return play_job(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm", "gpus": t * p},
            "framework": {"name": "megatron-core", "set": {"attention": "unfused"}},
            "batch": {"global": m * B, "micro": B},
            "plan": plan,
        }
    )


def at_the_ends(played: Played, device: int, kind: str, t: int) -> float:
    """Bytes a micro-batch keeps besides its layers: the dropout mask of the embedding and its ids (eight bytes each);
    the final norm's input and output."""
    if device == 0:
        return S * B * H / (t if kind == "sp" else 1) + 8 * S * B
    if device == played.plan.shape.p - 1:
        return 4 * S * B * H / (t if kind == "sp" else 1)
    return 0.0


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize(("kind", "recompute"), LAYER.keys())
def test_activations_of_a_whole_plan(kind: str, recompute: str, t: int) -> None:
    """Stage i of 1F1B holds p - i micro-batches of its L/p layers: the first stage those of all L layers."""
    p, layers, m = 4, 8, 6
    played = gpt(layers, t, p, m, kind, recompute)
    for device in range(p):
        one = layers // p * LAYER[kind, recompute](t) + at_the_ends(played, device, kind, t)
        assert played.category_peak(device, "activations") == pytest.approx((p - device) * one)
    first = played.category_peak(0, "activations") - p * at_the_ends(played, 0, kind, t)
    assert first == pytest.approx(layers * LAYER[kind, recompute](t))


@given(p=st.sampled_from([1, 2, 4]), m=st.integers(1, 6))
@settings(max_examples=10)
def test_gpipe_holds_all_micro_batches(p: int, m: int) -> None:
    for schedule, held in (("gpipe", [m] * p), ("1f1b", [min(m, p - i) for i in range(p)])):
        played = gpt(4, 1, p, m, "tp", "none", schedule=schedule)
        for device in range(p):
            one = 4 // p * LAYER["tp", "none"](1) + at_the_ends(played, device, "tp", 1)
            if p == 1:
                one += 4 * S * B * H
            assert played.category_peak(device, "activations") == pytest.approx(held[device] * one)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_interleaving_holds_more(p: int, v: int) -> None:
    """The first stage keeps L (1 + (p-1)/(p v)) layers' worth: section 4.2.3, with v chunks a device."""
    layers, m = p * v, 3 * p
    played = gpt(layers, 1, p, m, "tp", "none", chunks=v)
    each = LAYER["tp", "none"](1)
    factor = 1 + (p - 1) / (p * v)
    chunks = layers * factor  # of one layer each
    for device in range(1, p - 1):
        wanted = 2 * (p - 1 - device) + (v - 1) * p + 1
        assert played.category_peak(device, "activations") == pytest.approx(wanted * each)
    # Some of the first device's chunks are the first stage, with the embedding's own few bytes.
    extra = at_the_ends(played, 0, "tp", 1)
    peak = played.category_peak(0, "activations")
    assert chunks == pytest.approx(p * v + p - 1)
    assert chunks * each <= peak <= chunks * (each + extra)
    of_the_first = (peak - chunks * each) / extra
    assert of_the_first >= 1 and of_the_first == pytest.approx(round(of_the_first))


@pytest.mark.parametrize("t", [1, 2])
def test_logits_of_the_last_stage(t: int) -> None:
    """Four bytes a logit wait for the backward pass, of one micro-batch, cut along the vocabulary."""
    played = gpt(4, t, 2, 4, "sp", "none")
    assert played.category_peak(1, "logits") == 4 * B * S * 128 / t
    assert played.category_peak(0, "logits") == 0


SAVINGS = {
    # sbh bytes that one layer keeps less (MHA, f = 4h, dropout; 5 as/h for the scores): card of the memory table
    "core_attn": 5 * A * S / H,
    "attention": 8 + 5 * A * S / H,
    "mlp": 16,
}


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("module", SAVINGS)
def test_what_recomputing_a_module_saves(module: str, t: int) -> None:
    def kept(*more: Any) -> float:
        setting = LayerSetting(t, B, S, H, A, more=more)
        return per_layer(setting, "tensor/megatron-sp", lambda fragment, mesh: saved(fragment))

    less = kept() - kept(("memory/recompute-selective", (("modules", (module,)),)))
    assert less == pytest.approx(SAVINGS[module] * S * B * H / t)


@pytest.mark.parametrize(("gated", "kv_heads"), [(True, 8), (True, 2), (False, 4)])
@pytest.mark.parametrize("t", [1, 2])
def test_modern_layers_with_a_fused_kernel(gated: bool, kv_heads: int, t: int) -> None:
    """Without dropout, flash attention: sbh (R + S)/t + 4abs/t, R = 8, S = 4 + 4g/a + (4 or 6) f/h (tensor.md, 1)."""
    ffn = 160
    model = {"hidden": H, "heads": A, "kv_heads": kv_heads, "vocab": 128, "seq": S, "gated": gated, "ffn": ffn}

    def peak(layers: int) -> float:
        job = {
            "model": {**model, "layers": layers, "positions": "rope", "norm": "rmsnorm"},
            "cluster": {"gpu": "h100-sxm", "gpus": t},
            "batch": {"global": B, "micro": B},
            "plan": {"tp": t},
        }
        return play_job(job).category_peak(0, "activations")

    cut = 4 + 4 * kv_heads / A + (6 if gated else 4) * ffn / H
    assert peak(3) - peak(2) == pytest.approx(S * B * H * (8 + cut) / t + 4 * A * B * S / t)


@given(t=st.sampled_from([1, 2, 4]), use=st.sampled_from(["tensor/megatron", "tensor/megatron-sp"]))
def test_gathering_again_never_keeps_more(t: int, use: str) -> None:
    again, kept = (activations_per_layer(LayerSetting(t, regather=regather), use) for regather in (True, False))
    if t > 1 and use.endswith("-sp"):
        assert kept - again == pytest.approx(2 * 2 * 64 * 128 * (1 - 1 / t))
    else:
        assert kept == again


def test_a_residuals_gradient_lives_until_it_is_added() -> None:
    """While the MLP goes backward, the gradient that the residual hands past it stays: one b s h more."""
    setting = LayerSetting(t=1, b=1, s=S, h=H, a=A, attention="flash")
    fragment, _ = setting.stage(1, None)
    keys = {t.key for t in fragment.touches if t.op.name == "add dl0.x"}
    assert any(key.startswith("d:x1@") or key.startswith("d:sent@") for key in keys), keys


def test_scores_take_memory_on_their_way() -> None:
    """Unfused attention: the scores stand beside the softmax that is made of them."""
    fragment, _ = LayerSetting(t=1, b=1, s=S, h=H, a=A).stage(1, None)
    scores = 2 * A * S * S
    passing = [t for t in fragment.touches if t.key.startswith(("l0.core.0", "d:l0.core.")) and t.made]
    assert [t.nbytes for t in passing] == [scores] * 3


@pytest.mark.parametrize(
    ("model", "pp", "chunks", "batch", "whole", "least"),
    [
        ("megatron-22b", 1, 1, {"global": 4, "micro": 4}, 59.25, 9.5625),
        ("gpt3-175b", 8, 3, {"global": 64}, 66.84, 12.35),
    ],
)
def test_figure_1_of_the_sequence_parallelism_paper(
    model: str, pp: int, chunks: int, batch: dict[str, int], whole: float, least: float
) -> None:
    """GiB of activations on the first stage, TP 8: nothing recomputed, and SP with selective (arXiv 2205.05198)."""

    def activations(sequence_parallel: bool, recompute: str) -> float:
        plan = {"tp": 8, "pp": pp, "chunks": chunks, "recompute": recompute, "sequence_parallel": sequence_parallel}
        told = {"model": model, "cluster": f"dgx-a100:{pp}", "batch": batch, "plan": plan}
        return (
            play_job({**told, "framework": {"set": {"attention": "unfused"}}}).category_peak(0, "activations") / 2**30
        )

    assert activations(False, "none") == pytest.approx(whole, rel=0.02)
    assert activations(True, "selective") == pytest.approx(least, rel=0.02)

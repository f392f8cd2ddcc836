"""Comet: kernels that send and compute tile by tile: times by hand, bytes, divided experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, Op
from meshcast.validation.contract.measure import sent_bytes
from meshcast.validation.contract.of_experts import span
from tests.simulator.schemes.expert_layers import TIMES, TOKENS, H, K, S, divided, layer, moved, taken


@given(t=TIMES, u=TIMES, tile=st.sampled_from([4, 8, 16, 32]), phase=st.sampled_from("FB"))
def test_the_first_tile_comes_before_the_gemm_and_the_last_is_computed_after_it_came(
    t: float, u: float, tile: int, phase: str
) -> None:
    fragment, g = layer("expert/comet", tile=tile, panel=tile, sms=0, wave=1), u / 2
    # The 128 rows of a rank belong to 8 experts; a tile has rows of one.
    rows, panels = 8 * max(1, S * K // 8 // tile), H // tile
    wanted = sum(max(g + t / n, t + g / n) for n in (rows, panels))
    assert taken(fragment, t, u, phase) == pytest.approx(wanted, rel=1e-9)


@given(t=TIMES, u=TIMES, wave=st.sampled_from([1, 2, 5, 8, 16, 200]), phase=st.sampled_from("FB"))
def test_no_more_overlaps_than_the_waves_of_a_gemm(t: float, u: float, wave: int, phase: str) -> None:
    """16 tiles of 8 rows and 1 of 32 columns, in waves: of one wave nothing is sent before, and nothing starts."""
    fragment, g = layer("expert/comet", tile=8, panel=8, sms=0, wave=wave), u / 2
    waves = -(-16 // wave)
    wanted = sum(max(g + t / n, t + g / n) for n in (min(16, waves), min(4, waves)))
    assert taken(fragment, t, u, phase) == pytest.approx(wanted, rel=1e-9)
    assert wave < 16 or wanted == pytest.approx(2 * t + u)


def whole_kernels(fragment: Fragment) -> list[Gemm]:
    """The GEMMs, parts of one kernel put together: their rows and shares of its time add up."""
    found: list[tuple[str, Gemm]] = []
    for op in (*fragment.forward, *fragment.backward):
        if isinstance(op.work, Gemm):
            name, work = op.name.removesuffix(" 0").removesuffix(" 1"), op.work
            if work.part < 1 and found and op.name == f"{name} 1":
                first = found.pop()[1]
                assert first.part + work.part == pytest.approx(1) and first.pace == work.pace
                groups = tuple((n, i + j) for (n, i), (_, j) in zip(first.groups, work.groups, strict=True))
                work = replace(work, m=first.m + work.m, groups=groups, part=1.0)
            found.append((name, work))
    return [work for _, work in found]


def test_no_product_is_cut() -> None:
    plain, fused = layer("expert/all-to-all"), layer("expert/comet", tile=8, panel=8, sms=0, wave=1)
    assert whole_kernels(plain) == whole_kernels(fused)
    assert sum(isinstance(op.work, Gemm) and op.work.part < 1 for op in fused.forward + fused.backward) == 8


def test_parts_of_a_kernel_take_its_time() -> None:
    """No wave of tiles is emptier than in the whole kernel, which is launched once."""
    costs = Costs(load_cluster({"gpu": "h100-sxm", "gpus": 4}), Mesh({"dp": 4}), launch=1e-5)
    fused = layer("expert/comet", tile=8, panel=8, wave=40)
    parts = [op.work for op in fused.forward if isinstance(op.work, Gemm) and op.work.groups]
    up, down = [one for one in whole_kernels(fused) if one.groups][:2]
    for kernel, two in ((up, parts[:2]), (down, parts[2:])):
        assert sum(costs.estimate(one).seconds for one in two) == pytest.approx(costs.estimate(kernel).seconds)


@pytest.mark.parametrize(("p", "ep"), [(4, 1), (8, 1), (4, 2), (2, 2)])
def test_divided_experts_gather_every_token_once(p: int, ep: int) -> None:
    """Not its copies, which all other schemes gather, as Megatron-Core's token dispatcher does: it permutes first."""
    fused = divided("expert/comet", p, ep, dispatch="all-gather")
    weights = p * S * K * 4
    for issued, names in ((fused.forward, ("all_gather", "all_gather")), (fused.backward, ("all_gather",))):
        gathered = [op.work for op in issued if isinstance(op.work, Collective) and op.work.operation in names]
        assert [work.nbytes for work in gathered] == [p * TOKENS, *([weights] if issued is fused.forward else [])]
        summed = [op for op in issued if isinstance(op.work, Collective) and op.work.operation == "reduce_scatter"]
        assert sum(op.work.nbytes for op in summed if op.name.endswith(("expert.down", "dsent"))) == p * TOKENS  # type: ignore[union-attr]
    copies = divided("expert/all-to-all", p, 1)
    assert [work.nbytes for work in moved(copies, "F")] == [p * K * TOKENS] * 2
    plain, fused = divided("expert/all-to-all", p, ep), divided("expert/comet", p, ep, dispatch="all-gather", sms=0)
    assert whole_kernels(plain) == whole_kernels(fused)


@given(c=TIMES, u=TIMES, panel=st.sampled_from([4, 8, 32]), phase=st.sampled_from("FB"))
def test_gathers_hide_behind_the_first_product_and_sums_behind_the_last(
    c: float, u: float, panel: int, phase: str
) -> None:
    """A rank starts with its own tokens, and computes those of the last shard after it came: max(g, c + g/4)."""
    fragment, n, g = divided("expert/comet", panel=panel, tile=4, wave=1, sms=0), H // panel, u / 2
    issued = fragment.forward if phase == "F" else fragment.backward
    flops = sum(op.work.flops for op in issued if op.phase == phase and isinstance(op.work, Gemm) and op.work.groups)

    def lasts(op: Op) -> float:
        if op.phase != phase or op.work is None:
            return 0.0
        if isinstance(op.work, Collective):
            # The router's weights take no time.
            return 0.0 if "chosen" in op.name else c * op.work.nbytes / (4 * TOKENS)
        return u * op.work.flops / flops if isinstance(op.work, Gemm) and op.work.groups else 0.0

    wanted = max(g, c + g / 4) + max(g + c / n, c + g / n)
    assert span(issued, lasts) == pytest.approx(wanted, rel=1e-9)


def test_tokens_come_in_the_way_that_sends_fewer_bytes() -> None:
    """P Q - 1 tokens for each of a rank's, or k ((P - 1)/P + Q - 1) copies."""
    for p, ep in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)):
        mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": ep, "etp": p // ep}}, ["dp"])
        ways = {}
        for way in ("auto", "all-to-all", "all-gather"):
            ops = [op for op in divided("expert/comet", p, ep, dispatch=way).forward if op.stream == "expert"]
            ways[way] = sent_bytes([op for op in ops if "chosen" not in op.name], mesh)
        assert ways["auto"] == min(ways.values()), (p, ep, ways)


def test_gathered_tokens_are_the_same_however_uneven_the_routing() -> None:
    even, hot = (
        divided("expert/comet", 4, 2, dispatch="all-gather", routing=routing) for routing in ("balanced", {"zipf": 1.5})
    )
    assert moved(even) == moved(hot)
    products = [op.work for op in hot.forward if isinstance(op.work, Gemm) and op.work.groups]
    assert all(work.pace > 1 for work in products)
    sizes = [
        {use.key: use.nbytes for use in f.tensor_uses if use.key.startswith(("norm2@", "sent@", "d:sent@"))}
        for f in (even, hot)
    ]
    assert sizes[0] == sizes[1]


def test_multiprocessors_of_a_fused_kernel_are_shared() -> None:
    """Copy engines bring gathered tokens; some multiprocessors of the last GEMM send results, and compute nothing."""
    fragment = divided("expert/comet", 4, 1, sms=20)
    products = [op.work for op in fragment.forward if isinstance(op.work, Gemm) and op.work.groups]
    assert [work.sms for work in products] == [0, 20]
    costs = Costs(load_cluster({"gpu": "h100-sxm", "gpus": 4}), Mesh({"dp": 4}))
    plain, fused = replace(products[1], sms=0), products[1]
    assert plain.part == 1
    assert costs.estimate(fused).seconds == pytest.approx(costs.estimate(plain).seconds * 132 / 112)
    gather = next(op.work for op in fragment.forward if op.name == "all_gather sent")
    assert costs.use(gather).multiprocessors == 0 < costs.use(replace(gather, sms=None)).multiprocessors

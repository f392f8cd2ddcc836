"""Dispatch and combine of tokens: bytes over each link, shape and bounds of the cost model, and measured calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives import dispatch
from meshcast.simulator.costs.collectives.dispatch import Dispatch, DispatchCostModel
from meshcast.simulator.costs.estimate import NOTHING
from meshcast.validation.calibration.fit import fit
from meshcast.validation.calibration.kernels import dispatch as reader
from tests.draws import drawn

H100 = load("gpus", "h100-sxm")
LINK, PORT = reader.links_of("h100-sxm")
MODEL = DispatchCostModel(
    **{name: one.start for name, one in coefficients(DispatchCostModel).items()}, sigma=0.1, sigma_short=0.2
)
V3 = Dispatch("dispatch", 4096, 7168, 8, 256, 8, 1, "fp8")


def count_targets(experts, ranks, topk, nodes=1, most=4):
    """Targets and nodes of a token, counted over many random ones."""
    rng, targets, reached = np.random.default_rng(0), [], []
    for _ in range(4000):
        groups = rng.choice(nodes, min(most, nodes), replace=False)
        own = np.concatenate([np.arange(g * experts // nodes, (g + 1) * experts // nodes) for g in groups])
        chosen = rng.choice(own, topk, replace=False)
        targets.append(len(set(chosen * ranks // experts)))
        reached.append(len(set(chosen * nodes // experts)))
    return np.mean(targets), np.mean(reached)


@pytest.mark.parametrize(
    ("experts", "ranks", "topk", "nodes"),
    [(256, 8, 8, 1), (8, 8, 2, 1), (16, 8, 1, 1), (512, 8, 22, 1), (256, 16, 8, 2), (256, 64, 8, 8)],
)
def test_a_token_goes_once_to_each_rank_and_node(experts, ranks, topk, nodes):
    work = replace(V3, experts=experts, ranks=ranks, topk=topk, nodes=nodes)
    targets, reached = count_targets(experts, ranks, topk, nodes)
    assert work.target_ranks == pytest.approx(targets, rel=0.02)
    assert work.target_nodes == pytest.approx(reached, rel=0.02)


def test_bytes_over_each_kind_of_link():
    once, often = replace(V3, ranks=32, nodes=4), replace(V3, ranks=32, nodes=4, deduplicated=False)
    assert V3.network_bytes == 0
    assert once.scale_up_bytes == pytest.approx(V3.tokens * V3.token_bytes * once.target_ranks * 7 / 8)
    assert once.network_bytes == pytest.approx(V3.tokens * V3.token_bytes * once.target_nodes * 3 / 4)
    assert often.network_bytes == pytest.approx(V3.tokens * V3.token_bytes * 8 * 3 / 4)
    assert often.scale_up_bytes == pytest.approx(V3.tokens * V3.token_bytes * 8 * 1 / 4 * 7 / 8)
    assert replace(V3, balanced=True).target_ranks == 8
    assert replace(V3, balanced=True, ranks=4).target_ranks == 4


works = st.builds(
    Dispatch,
    st.sampled_from(["dispatch", "combine"]),
    st.integers(1, 2**17),
    st.sampled_from([512, 7168]),
    st.integers(1, 8),
    st.sampled_from([64, 256]),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(sorted(dispatch.WIDTH)),
    st.integers(1, 132),
    st.booleans(),
)


@given(works, st.floats(1.1, 3.0))
def test_nothing_beats_the_links_and_more_takes_longer(work, factor):
    greedy = replace(MODEL, nvlink_share=0.95, nic_share=0.98, copy_rate=80.0, source_copies=0.05, copy_overhead=10.0)
    price = dispatch.price(work, H100, LINK, PORT, greedy)
    assert price.seconds >= max(work.scale_up_bytes / LINK.bandwidth, work.network_bytes / PORT.bandwidth)
    for field in ("tokens", "hidden"):
        more = replace(work, **{field: int(getattr(work, field) * factor) + 1})
        assert dispatch.price(more, H100, LINK, PORT, greedy).seconds > price.seconds
    fewer = replace(work, sms=work.sms + 1)
    assert dispatch.price(fewer, H100, LINK, PORT, greedy).seconds < price.seconds


def test_no_tokens_take_no_time():
    assert dispatch.price(replace(V3, tokens=0), H100, LINK, PORT, MODEL) == NOTHING


def test_one_token_is_latency():
    seconds, latency = dispatch.seconds(replace(V3, tokens=1), H100, LINK, PORT, MODEL)
    assert seconds == pytest.approx(latency, rel=0.02)
    assert latency == pytest.approx(MODEL.call_latency + 3 * MODEL.doubling_latency)
    across = dispatch.seconds(replace(V3, tokens=1, ranks=16, nodes=2), H100, LINK, PORT, MODEL)[1]
    assert across == pytest.approx(latency + MODEL.node_latency / 2)


def test_many_calls_as_one():
    rng = np.random.default_rng(0)
    tokens, topk, experts = rng.integers(1, 9999, 50), rng.integers(1, 9, 50), rng.choice([16, 64, 256], 50)
    for once in (True, False):
        for ranks, nodes in ((8, 1), (16, 2)):
            shape = {"ranks": ranks, "nodes": nodes, "deduplicated": once}
            work = replace(V3, tokens=tokens, topk=topk, experts=experts, **shape)
            many = dispatch.seconds(work, H100, LINK, PORT, MODEL)[0]
            for at, value in enumerate(many):
                one = replace(V3, tokens=int(tokens[at]), topk=int(topk[at]), experts=int(experts[at]), **shape)
                assert dispatch.seconds(one, H100, LINK, PORT, MODEL)[0] == pytest.approx(value)


CALL = {
    "gpu": "h100", "library": "deepep_normal", "op": "dispatch", "gpus": 8, "nodes": 1, "tokens_per_rank": 4096,
    "hidden": 7168, "topk": 8, "num_experts": 256, "sms": 20, "dtype": "fp8", "time_us": 300.0, "source": "AIC",
}  # fmt: skip


def test_reading_a_table():
    changes = [
        {},
        {"library": "deepep_ll", "sms": np.nan, "op": "combine", "dtype": "bf16"},
        {"library": "trtllm_NVLinkTwoSided", "op": "combine_low_precision", "dtype": "nvfp4", "nodes": np.nan},
        {"library": "trtllm_NVLinkTwoSided", "op": "prepare", "dtype": "nvfp4", "nodes": np.nan},
        {"library": "my own", "op": "combine"},
        {"gpus": 64, "nodes": 8, "source": "AIC (identical table filed under h100)"},
    ]
    samples, refused = reader.read(pd.DataFrame([CALL | change for change in changes]))
    assert not refused
    assert [(s.operation, s.kind, s.library) for s in samples] == [
        ("dispatch", "dispatch", "deepep"),
        ("combine", "combine", "deepep-low-latency"),
        ("combine", "combine_low_precision", "tensorrt-llm-two-sided-fp4"),
        ("prepare", "prepare", "tensorrt-llm-two-sided"),
        ("combine", "combine", ""),
        ("dispatch", "dispatch", ""),
    ]
    works = [s.parts[0] for s in samples]
    assert [w.dtype for w in works] == ["fp8", "bf16", "fp4", "fp4", "bf16", "fp8"]
    assert [w.sms.tolist() for w in works] == [[20], [128], [20], [20], [20], [20]]
    assert [w.deduplicated for w in works] == [True, False, True, True, True, True]
    assert works[3].token_bytes.tolist() == [0]


def fit_models(tables, gpu, operation):
    samples = reader.read(tables.read("moe_alltoall"))[0]
    own = [s for s in samples if (s.gpu, s.operation) == (gpu, operation) and s.library]
    on = load("gpus", gpu), *reader.links_of(gpu)
    found = fit(
        DispatchCostModel, own, lambda sample, model: dispatch.seconds(sample.parts[0], *on, model)[0], most=1500
    )
    return own, found, on


@pytest.mark.parametrize(
    ("gpu", "operation"),
    drawn(product(["h100-sxm", "h200-sxm", "b200-sxm", "gb200"], ["dispatch", "combine"]), keep=5),
)
def test_calls_against_measurements(tables, gpu, operation):
    own, found, on = fit_models(tables, gpu, operation)
    for library in {s.library for s in own}:
        model = found.make_model(DispatchCostModel, library)
        some = [s for s in own if s.library == library]
        errors = np.concatenate([np.abs(dispatch.seconds(s.parts[0], *on, model)[0] / s.seconds - 1) for s in some])
        assert np.median(errors) <= 0.12, library
        assert np.quantile(errors, 0.9) <= 0.30, library


def test_published_rates_of_other_clusters(tables):
    """DeepEP's own figures on H800, bytes of the bottleneck per second, by the coefficients of the H200."""
    gpu, (link, port) = load("gpus", "h800-sxm"), reader.links_of("h800-sxm")
    figures = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
    for operation, dtype, column in (("dispatch", "fp8", 0), ("combine", "bf16", 1)):
        _, found, _ = fit_models(tables, "h200-sxm", operation)
        model = found.make_model(DispatchCostModel, "deepep")
        for ranks, rates in figures.items():
            work = replace(V3, operation=operation, dtype=dtype, ranks=ranks, nodes=ranks // 8, sms=20)
            copies = work.target_ranks if ranks == 8 else work.target_nodes
            rate = work.tokens * work.token_bytes * copies / dispatch.seconds(work, gpu, link, port, model)[0]
            assert rate == pytest.approx(rates[column] * 1e9, rel=0.27), (operation, ranks)

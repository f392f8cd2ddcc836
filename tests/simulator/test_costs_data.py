"""The laws against public measurements: loose bounds, which catch a broken law, not noise."""

from __future__ import annotations

import csv
import gzip
import statistics
from pathlib import Path

import pytest

from hardware import load_cluster
from hardware.topology import Parts, Reach
from simulator.costs import Costs
from simulator.costs.collectives import collective
from simulator.mesh import Mesh
from simulator.ops import Attention, Collective, Gemm

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.usefixtures("shared")
GPUS = ("a100", "h100")


def rows(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def costs_of(gpu: str, nodes: int = 1) -> Costs:
    cluster = load_cluster(f"dgx-{gpu}:{nodes}")
    return Costs(cluster, Mesh({"dp": cluster.gpus}), alone=True)


def check(pairs: list[tuple[float, float]], median: float, bias: float, least: int = 50) -> None:
    """Of (predicted seconds, measured microseconds): the median absolute and the median signed error."""
    errors = [predicted / (measured * 1e-6) - 1 for predicted, measured in pairs]
    assert len(errors) >= least
    assert statistics.median(map(abs, errors)) <= median
    assert abs(statistics.median(errors)) <= bias


@pytest.mark.parametrize("gpu", GPUS)
def test_large_gemms(gpu):
    costs, pairs = costs_of(gpu), []
    for row in rows(f"gemm_{gpu}"):
        shape = m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        if row["dtype"] == "bfloat16" and row["source"].startswith("AIC") and min(shape) >= 1024:
            pairs.append((costs.estimate(Gemm(m, n, k)).seconds, float(row["time_us"])))
    check(pairs, median=0.07, bias=0.04)


def test_layouts_of_training():
    """A PCIe card of 300 W, so the law of the 400 W one is a little fast."""
    costs, pairs = costs_of("a100"), []
    for row in rows("gemm_train_layouts"):
        if row["gpu"] == "a100_pcie":
            shape = [int(row[key]) for key in ("m", "n", "k", "batch")]
            accumulate = row["accumulate"] == "True"
            work = Gemm(*shape, layout=row["layout"].lower(), accumulate=accumulate, out_dtype=row["out_dtype"])
            pairs.append((costs.estimate(work).seconds, float(row["time_us"])))
    check(pairs, median=0.12, bias=0.12)


@pytest.mark.parametrize(("gpu", "kernel"), [("a100", "flash"), ("h100", "fa3")])
def test_attention(gpu, kernel):
    costs, pairs = costs_of(gpu), []
    for row in rows(f"attention_{gpu}"):
        if row["dtype"] == "bfloat16" and kernel in row["source"] and int(row["seq"]) >= 1024:
            sequences, s, heads, kv, d = (int(row[c]) for c in ("batch", "seq", "heads", "kv_heads", "head_dim"))
            work = Attention(sequences, s, s, heads, kv, d, d, share=0.5 if row["causal"] == "1" else 1.0)
            pairs.append((costs.estimate(work).seconds, float(row["time_us"])))
    check(pairs, median=0.15, bias=0.10)


@pytest.mark.parametrize(("gpu", "source"), [("a100", "FlashAttention-2"), ("h100", "FlashAttention-3")])
def test_backward_of_attention(gpu, source):
    costs, pairs = costs_of(gpu), []
    for row in rows("attention_fwd_bwd"):
        if row["gpu"] == gpu and row["pass"] in ("bwd", "fwd_bwd") and source in row["source"].split("figure, ")[-1]:
            b, s, heads, kv, qk, v = (
                int(row[c]) for c in ("batch", "seq", "heads", "kv_heads", "qk_head_dim", "v_head_dim")
            )
            passes = {"bwd": (True,), "fwd_bwd": (False, True)}[row["pass"]]
            share = 0.5 if row["causal"] == "1" else 1.0
            works = [Attention(b, s, s, heads, kv, qk, v, share, backward) for backward in passes]
            pairs.append((sum(costs.estimate(work).seconds for work in works), float(row["time_us"])))
    check(pairs, median=0.10, bias=0.10, least=8)


@pytest.mark.parametrize("gpu", GPUS)
def test_collectives_in_a_node(gpu):
    links, pairs = costs_of(gpu).links, []
    for row in rows("collectives"):
        nbytes, n = int(row["bytes"]), int(row["gpus"])
        plain = row["gpu"] == gpu and row["nodes"] == "1" and row["op"] != "p2p" and row["kind"] == "table"
        # int8 cannot be added by the switch, other timers than nccl-tests' count the host or the kernel alone.
        if plain and nbytes >= 2**20 and not any(odd in row["source"] for odd in ("int8", "vidur", "blocking")):
            work = Collective(row["op"], nbytes, ("dp",))
            pairs.append(
                (collective.price(work, Reach(n, Parts(1, n), Parts(1, n)), links).seconds, float(row["time_us"]))
            )
    check(pairs, median=0.08, bias=0.04)


def test_all_reduce_across_nodes():
    links, pairs = costs_of("h100", nodes=2).links, []
    for row in rows("collectives"):
        infiniband = "8x400G NDR InfiniBand per node" in row["interconnect"]
        if row["gpu"] == "h100" and infiniband and int(row["bytes"]) >= 2**20:
            n, k = int(row["gpus"]), int(row["nodes"])
            work, spread = Collective("all_reduce", int(row["bytes"]), ("dp",)), Parts(k, n // k)
            pairs.append((collective.price(work, Reach(n, spread, spread), links).seconds, float(row["time_us"])))
    check(pairs, median=0.08, bias=0.05)

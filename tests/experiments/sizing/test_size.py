"""Questions of size beside brute force over all clusters, beside ``meshcast run``, and what is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshcast
from meshcast.experiments.runs.seeds import RunSimulator
from meshcast.experiments.sizing.batches import BatchLimits, best_batch, read_limits
from meshcast.experiments.sizing.options import SizeOptions
from meshcast.experiments.sizing.question import read_question
from meshcast.experiments.sizing.size import answer_question
from meshcast.experiments.sizing.sizer import Sizer, list_sizes
from meshcast.hardware.errors import PlanError
from meshcast.hardware.prices import list_prices
from tests.draws import drawn
from tests.excerpts import follow_page
from tests.experiments.cli.samples import ROOT, answer, run

MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 32000, "seq": 1024}
JOB: dict[str, Any] = {
    "model": MODEL,
    "batch": {"global": 96, "micro": 1},
    "plan": {"tp": [1, 2], "zero": [1]},
    "run": {"tokens": 4e11, "seeds": 2, "failures": {"mtbf_factor": 0.1}},
}


def draw_job(rng: random.Random) -> dict[str, Any]:
    """Returns the job with another batch and rate of failures."""
    run = {**JOB["run"], "failures": {"mtbf_factor": rng.choice([0.01, 1.0])}}
    return {**JOB, "batch": {"global": rng.choice([48, 96, 120, 128]), "micro": 1}, "run": run}


@pytest.mark.parametrize("seed", drawn(range(20), keep=10))
def test_the_answer_is_that_of_brute_force(seed: int) -> None:
    """Of all clusters of up to 12 nodes, with a limit that one of them just keeps or just misses."""
    rng = random.Random(seed)
    options = SizeOptions(node=("dgx-h100",), most_gpus=96, price=("dgx-h100=2.5",), days=1)
    question = read_question(draw_job(rng), options)
    every = Sizer(question, question.kinds[0], RunSimulator().run, lambda node, nodes: None, remembers=False)
    clusters = [every.look_at(nodes) for nodes in range(1, 13)]
    planned = [cluster for cluster in clusters if cluster.plan is not None]
    near, factor = rng.choice(planned), rng.choice([0.999, 1.001])
    if seed % 4:
        days, budget = near.sure_days * factor, None
        kept = [cluster for cluster in planned if cluster.sure_days <= days]
        best = min(kept, key=lambda cluster: cluster.nodes, default=None)
    else:
        days, budget = None, (near.sure_cost or 0.0) * factor
        kept = [cluster for cluster in planned if (cluster.sure_cost or math.inf) <= budget]
        best = min(kept, key=lambda cluster: cluster.sure_days, default=None)
    (found,) = answer_question(replace(question, days=days, budget=budget), workers=1, remembers=False).kinds
    assert (found.chosen and found.chosen.nodes) == (best and best.nodes)
    if best is not None and found.chosen is not None:
        assert found.chosen.sure_days == best.sure_days and found.chosen.sure_cost == best.sure_cost
        sizes = [cluster.nodes for cluster in found.front]
        assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == len(sizes)


def test_failures_are_those_of_run(tmp_path: Path) -> None:
    """The job of the answer, given to ``meshcast run``, has its days, money and failures."""
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "cluster": "dgx-h100:1"}), "utf-8")
    words = ("--days", 6, "--workers", 1, "--price", "dgx-h100=2.5", "--set", "run.recovery.spares=2")
    found = answer("size", tmp_path / "job.yaml", *words, "--jobs-to", tmp_path)
    (kind,) = found["nodes"]
    alone = answer("run", tmp_path / "dgx-h100.yaml", "--workers", 1)
    chosen = kind["answer"]
    names = ("days", "days_interval_90", "cost", "cost_interval_90", "energy_mwh", "goodput")
    assert {name: chosen[name] for name in names} == {name: alone[name] for name in names}
    assert chosen["failures"] == sum(alone["failures"].values()) > 0
    assert chosen["sure_days"] <= 6 < chosen["days_interval_90"][1]
    assert chosen["job"]["cluster"] == f"dgx-h100:{chosen['nodes']}"


def test_days_and_money_answer_to_deadlines_and_prices() -> None:
    sized = {days: meshcast.size(JOB, days=days, node=["dgx-h100"], workers=1) for days in (3.5, 6.0)}
    (fast,), (slow,) = (sized[days].kinds for days in (3.5, 6.0))
    assert fast.chosen is not None and slow.chosen is not None and fast.chosen.nodes > slow.chosen.nodes
    dear = meshcast.size(JOB, days=6.0, node=["dgx-h100", "hgx-h200"], price=["dgx-h100=5.9"], workers=1)
    cost = dear.kinds[0].chosen and dear.kinds[0].chosen.sure_cost
    assert slow.kind.price is not None and slow.kind.price.value == 2.95 and slow.chosen.sure_cost is not None
    assert cost == pytest.approx(2 * slow.chosen.sure_cost)
    assert dear.cheapest is dear.kinds[1]
    even = dear.find_even_price(dear.kinds[0])
    assert even is not None and dear.kinds[1].chosen is not None
    assert even / 5.9 * (cost or 0.0) == pytest.approx(dear.kinds[1].chosen.sure_cost)
    lower, higher = slow.sensitivity
    assert lower.smallest is not None and higher.smallest is not None
    assert lower.smallest.nodes >= slow.chosen.nodes >= higher.smallest.nodes and lower.days > higher.days
    assert len(dear.to_frame()) == sum(len(kind.clusters) for kind in dear.kinds)


def test_what_no_cluster_keeps_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "cluster": "dgx-a100:1"}), "utf-8")
    (kind,) = answer("size", tmp_path / "job.yaml", "--days", 0.01, "--most-gpus", 32, "--workers", 1)["nodes"]
    assert kind["answer"] is None and kind["nearest"]["nodes"] == 4 and kind["nearest"]["sure_days"] > 0.01
    page = run("size", tmp_path / "job.yaml", "--days", 0.01, "--most-gpus", 32, "--workers", 1)
    assert "no cluster up to 32 GPUs keeps the limits" in page.output
    assert "no list price is known; state it: --price dgx-a100=2.50" in " ".join(page.output.split())


def test_pages_and_plots_are_written(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "cluster": "dgx-h100:1"}), "utf-8")
    words = ("--days", 6, "--most-gpus", 64, "--workers", 1)
    done = run("size", tmp_path / "job.yaml", *words, "--html", tmp_path / "a.html", "--plot", tmp_path / "a.svg")
    assert done.exit_code == 0 and "MFU 10% lower" in done.output
    html = (tmp_path / "a.html").read_text("utf-8")
    assert "What it rests on" in html and "<script" not in html and "data:image/png" in html
    assert "cost against days" in (tmp_path / "a.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("limits", "gpus", "batch"),
    [((512, 1024), 64, 1024), ((512, 1024), 192, 768), ((512, 1024), 31 * 32, 992), ((1949, 2152), 21 * 64, 2016)],
)
def test_a_batch_is_divided_by_many_replicas(limits: tuple[int, int], gpus: int, batch: int) -> None:
    assert BatchLimits(*limits, "").choose(gpus) == batch
    assert BatchLimits(100, 100, "").choose(gpus) == 100


def test_the_best_batch_is_that_of_the_law() -> None:
    """DeepSeek LLM trained 7 B and 67 B parameters on 2 T tokens with 2,304 and 4,608 sequences of 4,096 tokens
    (arXiv 2401.02954, table 2)."""
    assert best_batch(7e9, 2e12) == pytest.approx(2304 * 4096, rel=0.05)
    assert best_batch(67e9, 2e12) == pytest.approx(4608 * 4096, rel=0.05)


def test_limits_of_a_batch_are_tokens() -> None:
    limits = read_limits("4M..16M", 4096, "batch")
    assert (limits.least, limits.most) == (977, 3906)
    near = read_limits("8388608", 4096, "batch")
    assert near.least <= 2048 <= near.most and near.most / near.least < 1.11


def test_sizes_are_close_and_divisible() -> None:
    sizes = list_sizes(16_384)
    assert sizes[:32] == [*range(1, 32), 32] and sizes[-1] == 16_384
    assert all(later / size <= 1 + 1 / 16 for size, later in pairwise(sizes[15:]))
    assert {48, 124, 256, 512, 2048} <= {*sizes}
    assert list_sizes(3) == [1, 2, 3]


def test_list_prices_have_a_source_and_a_day() -> None:
    (cheapest, *_) = list_prices("hgx-h200")
    assert (cheapest.value, cheapest.currency) == (3.5, "USD") and "2026-11-30" in cheapest.source
    assert list_prices("dgx-a100") == []


def test_errors_name_arguments_of_python() -> None:
    for changes, where in ({"days": None}, "size"), ({"tokens": "many"}, "tokens"), ({"node": []}, "node"):
        with pytest.raises(PlanError) as caught:
            meshcast.size(JOB, **{"days": 3.0, "node": ["dgx-h100"], **changes})  # type: ignore[arg-type]
        assert caught.value.where == where and "--" not in str(caught.value)


@pytest.mark.slow
def test_the_page_of_docs_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow_page((ROOT / "docs" / "size.md").read_text("utf-8")) == 1


PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_trainings.yaml").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trainings_asked_backwards_give_their_gpus(name: str) -> None:
    row = PUBLISHED[name]
    question = read_question(row["job"], SizeOptions(days=row["days"], batch=row["batch"], most_gpus=4 * row["gpus"]))
    (kind,) = answer_question(question, remembers=False).kinds
    assert kind.chosen is not None and kind.chosen.gpus == row["answer"]
    assert ("why" in row) or kind.chosen.gpus == pytest.approx(row["gpus"], rel=0.15)


def test_rows_of_published_trainings_are_whole() -> None:
    assert all({"source", "gpus", "days", "batch", "answer", "job"} <= {*row} for row in PUBLISHED.values())
    assert [name for name, row in PUBLISHED.items() if "why" in row] == ["opt-175b", "falcon-180b"]

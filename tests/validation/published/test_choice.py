"""The choice among published plans: groups, regret and rank correlation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.cli.app import app
from validation.published.choice import choose_plans, rank_correlation, summarize_choices
from validation.published.rows import PublishedRun, UnreadableLine


def run(name: str, seconds: float, micro: int = 1, tp: int = 1, **spec: Any) -> PublishedRun:
    task = {"class": "dense", "stack": "megatron-core", "gpu": "h100-sxm", "gpus": 8, "mesh": {"tp": tp}}
    whole = {**task, "batch": {"micro": micro, "global": 64, "seq": 4096}, **spec}
    return PublishedRun.model_validate({"id": name, "spec": whole, "measured": {"step_time_s": seconds}})


def judge(runs: list[Any], forecasts: list[float | None]) -> list[dict[str, Any]]:
    """The groups of runs with these forecasts; None: the run was refused."""
    rows = []
    for one, forecast in zip(runs, forecasts, strict=True):
        known = forecast is not None and isinstance(one, PublishedRun)
        error = forecast / one.step_time - 1 if known else None
        rows.append({"error": error, "predicted": {"step_time_s": forecast} if known else None})
    return choose_plans(runs, rows)


def test_the_regret_of_the_shortest_forecast() -> None:
    runs = [run("a-1", 10.0), run("a-2", 12.0, micro=2), run("a-3", 11.0, tp=2)]
    (group,) = judge(runs, [3.0, 2.0, 2.5])
    assert (group["chosen"], group["best"], group["right"], group["plans"]) == ("a-2", "a-1", False, 3)
    assert group["regret"] == pytest.approx(0.2)
    assert group["random_regret"] == pytest.approx(0.1)
    assert group["rho"] == pytest.approx(-1)
    (group,) = judge(runs, [1.0, 3.0, 2.0])
    assert (group["right"], group["regret"], group["rho"]) == (True, 0, pytest.approx(1))


def test_other_tasks_are_other_groups() -> None:
    """Another release, another batch, another source; two plans are no group, refused runs no plans."""
    plans = [(1, 1), (2, 1), (1, 2)]
    runs = [run(f"a-{i}", 10.0 + i, *plan) for i, plan in enumerate(plans)]
    runs += [run(f"a-new-{i}", 5.0 + i, *plan, stack_version="2") for i, plan in enumerate(plans)]
    runs += [run(f"b-{i}", 10.0 + i, *plan) for i, plan in enumerate(plans[:2])]
    lost = [run("a-lost", 1.0, micro=4), UnreadableLine(reason="no JSON")]
    groups = judge([*runs, *lost], [10.0] * len(runs) + [None, None])
    assert [(group["source"], group["plans"]) for group in groups] == [("a", 3), ("a", 3)]
    summary = summarize_choices(groups)
    assert (summary["groups"], summary["plans"], list(summary["by_source"])) == (2, 6, ["a"])


def test_rounds_of_mlperf_are_other_tasks() -> None:
    """The code is that of the round, though v5.0 and v5.1 name the container of v4.1."""
    names = [f"mlperf-{round_}-{i}" for round_ in ("v41", "v50") for i in range(2)]
    runs = [run(name, 10.0 + i, micro=i + 1, stack="mlperf-nemo") for i, name in enumerate(names)]
    assert judge(runs, [10.0] * 4) == []
    assert len(judge([one.model_copy(update={"id": f"mlperf-v50-{i}"}) for i, one in enumerate(runs)], [10.0] * 4)) == 1


def test_a_plan_that_was_published_twice_counts_once() -> None:
    runs = [run("a-1", 10.0), run("a-2", 30.0), run("a-3", 12.0, micro=2), run("a-4", 11.0, tp=2)]
    (group,) = judge(runs, [1.0, 1.0, 3.0, 2.0])
    assert group["plans"] == 3 and group["regret"] == pytest.approx(20 / 11 - 1)


@given(values=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_the_rank_correlation_is_that_of_ranks(values: list[tuple[int, int]]) -> None:
    one, other = zip(*values, strict=True)
    rho = rank_correlation(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert rho is None
        return
    assert rho is not None and -1 - 1e-12 <= rho <= 1 + 1e-12
    assert rank_correlation(np.exp(one).tolist(), other) == pytest.approx(rho), "any rising function keeps ranks"
    assert rank_correlation([-value for value in one], other) == pytest.approx(-rho)
    if len(set(one)) == len(one) and len(set(other)) == len(other):
        places = [sorted(side).index(value) for side in (one, other) for value in side]
        gaps = [a - b for a, b in zip(places[: len(one)], places[len(one) :], strict=True)]
        n = len(one)
        assert rho == pytest.approx(1 - 6 * sum(gap * gap for gap in gaps) / (n * (n * n - 1)))


def test_the_command(tmp_path: Path) -> None:
    model = {
        "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 4096, "vocab": 32000,
        "seq": 4096, "gated": False, "norm": "layernorm", "positions": "learned", "tied": True,
        "attention": "flash", "qk_layernorm": False, "mtp": 0,
    }  # fmt: skip
    rows = [
        {
            "id": f"lab-{tp}",
            "spec": {
                "class": "dense", "stack": "megatron-core", "gpu": "h100-sxm", "gpus": 8, "precision": "bf16",
                "model": model, "mesh": {"dp": 8 // tp, "tp": tp, "pp": 1, "cp": 1},
                "sharding": "none", "recompute": {"kind": "none"}, "schedule": "1f1b",
                "batch": {"micro": 1, "global": 64, "seq": 4096},
            },
            "measured": {"step_time_s": 1.0 + tp},
        }
        for tp in (1, 2, 4, 8)
    ]  # fmt: skip
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = CliRunner().invoke(app, ["validate", "choice", "--data", str(path), "--jobs", "1", "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    (group,) = answer["groups"]
    assert (group["chosen"], group["regret"], group["rho"]) == ("lab-1", 0, pytest.approx(1))
    page = CliRunner().invoke(app, ["validate", "choice", "--data", str(path), "--jobs", "1"])
    assert page.exit_code == 0 and "lab-1" in page.output and "100% right" in page.output
    whole = CliRunner().invoke(app, ["validate", "published", "--data", str(path), "--jobs", "1"])
    assert "mean regret 0.0 % (random" in whole.output
    assert CliRunner().invoke(app, ["validate", "choice", "--plot", "x.png"]).exit_code != 0


def test_nothing_to_choose_from(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("", "utf-8")
    found = CliRunner().invoke(app, ["validate", "choice", "--data", str(path), "--jobs", "1"])
    assert found.exit_code == 0 and "nothing to choose from" in found.output

"""`meshcast.search`: the best plans and the certificate in one call."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshcast
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from tests.experiments.search.spaces import TINY


def test_it_finds_the_best_plans_with_their_reports() -> None:
    calls = list[int]()
    result = meshcast.search(TINY, top=3, watch=lambda found: calls.append(found.exact))
    assert isinstance(result, meshcast.SearchResult) and 1 <= len(result.best) <= 3
    assert result.certificate.complete and result.certificate.gap == 0.0 and calls
    steps = [one.report.step_time for one in result.best]
    assert steps == sorted(steps) and steps[0] == result.certificate.incumbent
    assert simulate(result.best[0].job).step_time == pytest.approx(steps[0], rel=1e-12)
    assert {"plan.tp", "batch.micro"} <= result.best[0].changes.keys()
    answer = json.loads(json.dumps(result.to_dict()))
    assert answer["best"][0]["plan"] == result.best[0].changes and answer["certificate"]["gap"] == 0


def test_paths_are_found_from_the_folder_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(TINY["model"]))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**TINY, "model": "model.yaml"}))
    found = meshcast.search(tmp_path / "job.yaml", top=1)
    given = meshcast.search({**TINY, "model": "model.yaml"}, top=1, base=tmp_path)
    assert found.best[0].report.step_time == given.best[0].report.step_time


def test_nothing_fits() -> None:
    job = {**TINY, "model": "llama3-70b", "plan": {"tp": [1, 2]}}
    result = meshcast.search(job)
    assert not result.best and result.certificate.complete and result.to_dict()["best"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"within": 1.0}, "within is 1.0: a gap is a share of the step"),
        ({"within": "1%"}, "within is '1%': a gap is a share of the step"),
        ({"top": 0}, "top is 0: it is a whole number from 1 to 1,000"),
        ({"top": True}, "top is True"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        meshcast.search(TINY, **options)


def test_wrong_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no field of the job is open"):
        meshcast.search({**TINY, "plan": {}, "batch": {"global": 16}})
    with pytest.raises(PlanError, match="a job is the path of a file, or a mapping"):
        meshcast.search(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "plan", "words"),
    [
        ("{global: 8}", "{tp: [0]}", ":4 plan.tp is 0: its values are 1 or more"),
        ("{global: 8}", "{tp: 4}", ":4 plan: no field of the job is open: none is `auto` or a list of values. Write"),
        ("[8]", "{tp: auto}", ":3 batch is [8]: must be a mapping of keys to values"),
        ("{global: 8}", "{tp: [3]}", ":4 plan.tp is [3]: no values of the open fields make a plan: tp x cp x pp must"),
        ("{global: 8}", "{tp: [3], pp: [7]}", ":4 plan: no values of the open fields make a plan"),
        (
            "{global: 8}",
            "{etp: [2]}",
            ":4 plan.etp is [2]: llama3-8b has no experts, whose matrices these ranks share. ",
        ),
        ("{global: 8}", "{tp: auto, etp: 2}", ":4 plan.etp is 2: llama3-8b has no experts"),
        (
            "{global: 8}",
            "{tp: 2, shard: [16]}",
            ":4 plan.shard is [16]: it must divide the data-parallel ranks, of which the plans have 4. Give",
        ),
        (
            "{global: 8}",
            "{tp: 2, zero: 0, shard: [2]}",
            ":4 plan.shard is [2]: ddp keeps no copies of what it shards; ",
        ),
        ("{global: 8}", "{ep: [2]}", ":4 plan.views: llama3-8b has no experts"),
        (
            "{global: 8}",
            "{ep: [2, 4]}",
            ":4 plan.views: all 2 plans of the space break a rule, the first one this: llama",
        ),
    ],
)
def test_a_mistake_is_explained_with_its_line(tmp_path: Path, batch: str, plan: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: llama3-8b\ncluster: dgx-h100:1\nbatch: {batch}\nplan: {plan}\n")
    with pytest.raises(PlanError, match=re.escape(f"{path}{words}")):
        meshcast.search(path)

"""`validate claims`: the files that ship, the verdicts, relations, and what malformed files are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.planning.benchmark.claimed_plans import find_claimed_plan
from meshcast.experiments.render.terminal.claims import validate_claims
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.validation.claims.claim_file import Claim, ClaimFile, Family, read_claim_file, read_claims
from meshcast.validation.claims.judge import describe_target, judge
from meshcast.validation.claims.measures import read_measure
from meshcast.validation.claims.planner_run import PlannerRun
from meshcast.validation.claims.played_measures import priced_ops
from meshcast.validation.claims.relation import parse_relation
from meshcast.validation.pipelines.cases import ScheduleCase
from tests.draws import drawn
from tests.fuzz.seeds import CLAIMS
from tools.pages.claims import page

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 96, "seq": 32}
JOB = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 32}, "plan": {"tp": 2, "pp": 2}}
CASE = {"schedule": "gpipe", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1}
ROOT = Path(__file__).resolve().parents[3]
FEW = "GPipe"
"""A system whose claims are judged in every run of the tests."""


@pytest.fixture(scope="module")
def files() -> list[ClaimFile]:
    return read_claims()


def make(claim: dict[str, Any], **more: Any) -> ClaimFile:
    stated = {"id": "x", "says": "it", "source": "here", "provenance": "checked", **claim}
    return ClaimFile.model_validate({"system": "S", "family": "pipeline", "paper": "p", "claims": [stated], **more})


def verdict(claim: dict[str, Any], **more: Any) -> dict[str, Any]:
    file = make(claim, **more)
    return judge(file, file.entries[0])


# ------------------------------------------------------------------------------------------ the files


def test_files_are_named_after_their_systems_and_each_id_is_there_once(files: list[ClaimFile]) -> None:
    ids = [claim.id for file in files for claim in file.entries]
    assert len(ids) == len(set(ids)) > 0
    systems = [file.system for file in files]
    assert len(systems) == len(set(systems))


def test_every_job_and_case_can_be_read(files: list[ClaimFile]) -> None:
    read: set[str] = set()
    for file in files:
        for claim in file.entries:
            if claim.cannot_judge:
                continue
            every = file.expand(claim, next(file.alternatives(claim)))
            for name, jobs in every.items():
                for job in jobs[:1]:
                    if (key := json.dumps(job, sort_keys=True, default=str)) in read:
                        continue
                    read.add(key)
                    readers = {"cases": ScheduleCase.model_validate, "plans": PlannerRun.model_validate}
                    readers.get(file.kind_of(claim, name), load_job)(job)


def test_some_claims_are_judged(files: list[ClaimFile]) -> None:
    answer, missing = validate_claims(workers=1, system=FEW)
    assert not missing and {row["status"] for row in answer["rows"]} == {"holds"}
    text = page(answer)
    assert all(f"`{row['id']}`" in text for row in answer["rows"])


@pytest.mark.slow
def test_no_claim_of_meshcast_fails_to_run() -> None:
    answer, _ = validate_claims(slow=True, find_plan=find_claimed_plan)
    assert [row["id"] for row in answer["rows"] if row["defect"]] == []
    wrong = [row["id"] for row in answer["rows"] if row["ours"] is None and row["relation"]]
    assert wrong == []
    unexplained = [row["id"] for row in answer["rows"] if row["status"] == "misses" and not row["reason"]]
    assert unexplained == []
    summary = answer["summary"]
    assert summary["judged"] >= 220 and summary["share_holds"] >= 0.75 and summary["share_near"] >= 0.9
    assert {*get_args(Family)} == {name for name, counts in summary["by_family"].items() if counts["judged"]}


def page_rows() -> dict[str, str]:
    """The status of every claim on docs/claims.md by its id."""
    text = (ROOT / "docs/claims.md").read_text("utf-8")
    rows = [line.strip("|").replace("\\|", "/").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): row[4] for row in rows}


def test_the_page_has_every_claim_and_every_miss_is_explained(files: list[ClaimFile]) -> None:
    shown, claims = page_rows(), {claim.id: claim for file in files for claim in file.entries}
    assert shown.keys() == claims.keys(), "make docs-claims"
    unexplained = [name for name, status in shown.items() if status.startswith("misses") and not claims[name].note]
    assert unexplained == []
    assert {file.family for file in files} == {*get_args(Family)}


@pytest.mark.parametrize("system", drawn(["PipeDream optimizer", "Slapo", "OneFlow SBP"], keep=3))
def test_claims_of_planners_are_judged(system: str) -> None:
    answer, _ = validate_claims(workers=1, system=system, find_plan=find_claimed_plan)
    judged = [row for row in answer["rows"] if row["relation"]]
    assert judged and all(row["ours"] is not None and not row["defect"] for row in judged)
    assert {row["status"] for row in judged if row["id"] != "pipedream-07-vgg16-16"} == {"holds"}


# ------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("target", "status", "miss", "paper", "ratio"),
    [
        ({"value": 15.0, "tolerance": 0.01}, "holds", 0.0, 15, 1.0),
        ({"value": 12.0, "tolerance": 0.1, "note": "why"}, "misses", 0.25, 12, 1.25),
        ({"at_least": 30.0}, "misses", -0.5, 30, 0.5),
        ({"at_most": 12.0}, "misses", 0.25, 12, 1.25),
        ({"between": [10.0, 20.0]}, "holds", 0.0, [10, 20], 1.5),
    ],
)
def test_a_number_is_held_against_the_paper(
    target: dict[str, Any], status: str, miss: float, paper: Any, ratio: float
) -> None:
    row = verdict({"cases": {"a": CASE}, "relation": "a", **target})
    assert (row["status"], row["ours"], row["miss"]) == (status, 15, pytest.approx(miss))
    assert (row["paper"], row["ratio"]) == (paper, pytest.approx(ratio))
    assert (row["tolerance"], row["reason"]) == (target.get("tolerance"), target.get("note", row["reason"]))


def test_an_order_holds_by_its_closest_pair() -> None:
    cases = {"short": CASE, "long": {"from": "short", "set": {"m": 8}}}
    row = verdict({"cases": cases, "relation": "short < long"})
    assert row["status"] == "holds" and row["ours"] == pytest.approx(27 / 15)
    row = verdict({"cases": cases, "relation": "short > long"})
    assert row["status"] == "misses" and row["miss"] == pytest.approx(15 / 27 - 1)


def test_a_verdict_depends_on_what_the_paper_leaves_open() -> None:
    claim = {"cases": {"a": CASE}, "relation": "a", "at_most": 15.0}
    row = verdict({**claim, "assumed": {"m": [4, 8], "hop": [0.0, 0.0]}})
    assert row["status"] == "depends" and row["depends_on"] == ["m"] and len(row["alternatives"]) == 4
    assert verdict({**claim, "assumed": {"m": [2, 4]}})["status"] == "holds"
    row = verdict({**claim, "assumed": {"m": [16, 8]}})
    assert row["status"] == "misses" and row["ours"] == 27  # the one that misses least


def test_what_cannot_be_judged_says_why() -> None:
    row = verdict({"cannot_judge": "it is about accuracy"})
    assert row["status"] == "cannot-be-judged" and row["reason"] == "it is about accuracy"
    assert row["paper"] is row["ratio"] is row["tolerance"] is None
    row = verdict({"cases": {"a": {**CASE, "schedule": "gpip"}}, "relation": "a", "at_least": 1})
    assert row["status"] == "cannot-be-judged" and "gpip" in row["reason"] and not row["defect"]


PROFILE = {"planner": "pipedream", "profile": "pipedream-vgg16", "levels": [[4, 1.25e9]]}
STAGES = {"planner": "alpa", "job": {**JOB, "plan": {"tp": 2, "dp": 4}}, "stages": [[1, 2, 2], [3, 2, 2]]}


def plan_verdict(claim: dict[str, Any]) -> dict[str, Any]:
    file = make(claim)
    return judge(file, file.entries[0], find_plan=find_claimed_plan)


def test_numbers_of_plans_are_compared() -> None:
    row = plan_verdict({"plans": {"a": PROFILE}, "relation": "same(a.stage_gpus, 3, 1) * a.proven", "at_least": 1})
    assert row["status"] == "holds"
    row = plan_verdict({"plans": {"a": PROFILE}, "relation": "same(a.stage_gpus, 3, 2)", "at_least": 1})
    assert row["status"] == "misses" and row["ours"] == 0.5
    plans = {"found": {key: value for key, value in STAGES.items() if key != "stages"}, "stated": STAGES}
    row = plan_verdict({"plans": plans, "relation": "stated / found", "at_least": 1})
    assert row["status"] == "holds"
    row = plan_verdict({"plans": plans, "measure": "step_time_s", "relation": "stated / found", "at_least": 0.1})
    assert row["status"] == "holds" and row["alternatives"][0]["values"]["stated"] > 0
    row = plan_verdict(
        {"plans": plans, "jobs": {"job": JOB}, "measure": "step_time_s", "relation": "job / found", "at_least": 0}
    )
    assert row["status"] == "holds"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"plans": {"a": {**PROFILE, "planner": "pipedreams"}}, "relation": "a"}, "no such planner"),
        ({"plans": {"a": {**PROFILE, "traits": {"most_replica": 1}}}, "relation": "a"}, "no such attribute"),
        ({"plans": {"a": PROFILE}, "relation": "a", "measure": "step_time_s"}, "Read a number of the plan itself"),
        ({"plans": {"a": PROFILE}, "relation": "a", "measure": "plan.batch"}, "the plan has no 'batch'"),
        ({"plans": {"a": PROFILE}, "relation": "a", "measure": "plan.stages"}, "no number of the plan"),
        ({"plans": {"a": {**STAGES, "stages": [[4, 3, 1]]}}, "relation": "a"}, "no stage has these degrees"),
    ],
)
def test_a_mistake_in_a_plan_is_a_reason(claim: dict[str, Any], words: str) -> None:
    row = plan_verdict({**claim, "at_least": 0})
    assert row["status"] == "cannot-be-judged" and words in row["reason"] and not row["defect"], row["reason"]


def test_plans_need_planners() -> None:
    row = verdict({"plans": {"a": PROFILE}, "relation": "a", "at_least": 0})
    assert row["status"] == "cannot-be-judged" and "no planners" in row["reason"]


def test_jobs_are_measured_and_lists_are_searched() -> None:
    jobs = {"base": JOB, "each": {"from": "base", "over": {"plan.tp": [1, 2, 3], "batch.micro": [1, 2]}}}
    claim = {"jobs": jobs, "measure": "tokens_per_s_per_gpu", "at_least": 1.0}
    row = verdict({**claim, "relation": "best(each) / base"})
    assert row["status"] == "holds"
    values = row["alternatives"][0]["values"]
    assert len(values["each"]) == 4 and values["base"] in values["each"]  # 3 ranks do not divide the heads
    vast = {"from": "base", "set": {"model": "gpt3-175b"}}
    memory = verdict({**claim, "jobs": {"base": JOB, "vast": vast}, "relation": "base / vast"})
    assert memory["alternatives"][0]["does_not_fit"] == ["vast"]
    sizes = verdict({**claim, "measure": "sent_gib.tp.all_gather", "relation": "max(base) + 1"})
    assert sizes["ours"] > 1
    share = verdict({**claim, "relation": "base.bubble_s / base.step_time_s + 1"})
    assert 1 < share["ours"] < 2
    kernels = verdict({**claim, "measure": "kernel_s.gemm.F", "relation": "base[0] / base[1] + 0.5"})
    assert kernels["ours"] == pytest.approx(1.5, abs=0.4)


def test_recalled_claims_are_shown_and_not_scored(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(CLAIMS))
    answer, _ = validate_claims([path], 1)
    assert [row["status"] for row in answer["rows"]] == ["holds", "holds"]
    summary = answer["summary"]
    assert (summary["claims"], summary["judged"], summary["recalled"], summary["holds"]) == (2, 1, 1, 1)
    assert sum(counts["holds"] for counts in summary["by_family"].values()) == 1


def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    assert validate_claims(workers=1, system=FEW) == validate_claims(workers=2, system=FEW)


# ------------------------------------------------------------------------------------------ relations

VALUES: dict[tuple[str, str], Any] = {
    **{("a", ""): 4.0, ("b", ""): 2.0, ("c", ""): [1.0, 4.0]},
    **{("a", "mfu_palm"): 2.0, ("b", "kernel_s.gemm.F"): [1.0, 2.0]},
}


@pytest.mark.parametrize(
    "text, found",
    [
        ("a / b", 2.0),
        ("(a - b) * 2 ** 2 - -1", 9.0),
        ("max(c) - c[0]", 3.0),
        ("best(a, b)", 2.0),
        ("sum(c) / min(c, a)", 5.0),
        ("b < a", 2.0),
        ("a > b > 1", 2.0),
        ("same(c, 1, 4)", 1.0),
        ("same(c, 1, 3)", 0.5),
        ("same(c, 1)", 0.5),
        ("a.mfu_palm * sum(b.kernel_s.gemm.F)", 6.0),
    ],
)
def test_relations_are_arithmetic(text: str, found: float) -> None:
    assert parse_relation(text).compute(VALUES, "lower", "here") == found


@pytest.mark.parametrize(
    "text",
    [
        "a().b",
        "a if b else c",
        "f(a)",
        "min()",
        "a == b",
        "a < b > c",
        "__import__('os')",
        "a[b]",
        "[a]",
        "a +",
        "a < True",
        "a < 1e999",
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\. "):
        parse_relation(text)


@pytest.mark.parametrize("text", ["a / (b - b)", "c / a", "c[2]", "a ** 9999", "(b - a) ** (1 / 2)"])
def test_a_relation_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="has no"):
        parse_relation(text).compute(VALUES, "lower", "here")


# ------------------------------------------------------------------------------------------ mistakes


def test_two_claims_must_not_have_one_id(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for path in paths:
        path.write_text(yaml.safe_dump(CLAIMS))
    with pytest.raises(PlanError, match=r"a\.yaml has the same id"):
        read_claims(paths)


def test_the_command_prints_the_jobs_of_a_claim() -> None:
    runner, file = CliRunner(), str(ROOT / "validation/claims/gpipe.yaml")
    shown = runner.invoke(app, ["validate", "claims", "--claim", "gpipe-02"])
    assert shown.exit_code == 0 and "schedule: gpipe" in shown.stdout and "four" in shown.stdout
    answer = json.loads(runner.invoke(app, ["validate", "claims", file, "--claim", "gpipe-02", "--json"]).stdout)
    assert answer["rows"][0]["jobs"]["two"]["p"] == 2
    for option, given in (("--claim", "gpipe-2"), ("--system", "GPip"), ("--family", "pipelines")):
        refused = runner.invoke(app, ["validate", "claims", file, option, given])
        assert refused.exit_code == 2 and "Did you mean" in refused.stderr
    assert runner.invoke(app, ["validate", "published", "--slow"]).exit_code == 2


def test_the_page_of_the_format_shows_a_valid_file(tmp_path: Path) -> None:
    text = (ROOT / "docs/validation.md").read_text("utf-8")
    stated = text.partition("## Claims of papers")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "example.yaml"
    path.write_text(stated)
    (claim,) = read_claim_file(path).entries
    assert isinstance(claim, Claim) and validate_claims([path], 1)[0]["rows"][0]["ours"] > 1
    assert {key for key in Claim.model_fields if f"`{key}`" not in text and f"{key}:" not in text} == set()


def test_the_time_of_a_checkpoint_is_read_off_a_run() -> None:
    run = {"steps": 10, "checkpoints": {"kind": "asynchronous", "stall_s": 2, "write_s": 5}}
    job = {"model": "gpt2-124m", "cluster": "dgx-h100:1", "run": run}
    assert read_measure(simulate(load_job(job)), "run.checkpoint_s") == pytest.approx(5.0)


def test_a_ring_of_four_sends_one_and_a_half_gradients() -> None:
    job = {**JOB, "plan": {"dp": 4, "zero": 0}, "cluster": {"gpu": "h100-sxm", "gpus": 4}}
    sent = read_measure(report := simulate(load_job(job)), "sent_gib.dp.all_reduce")
    assert sent == pytest.approx([2 * 3 / 4 * 4 * report.job.model.parameters / 2**30], rel=1e-3)


def test_bytes_across_nodes_are_those_over_the_borders_of_rings_and_of_stages() -> None:
    """A flat ring of 16 ranks crosses the border of a node of eight once; in a pipeline of nodes only messages do."""
    job = {**JOB, "plan": {"dp": 16, "zero": 0}, "cluster": "dgx-h100:2", "framework": "megatron-core"}
    report = simulate(load_job(job))
    assert read_measure(report, "across_gib.dp") == pytest.approx(
        [each / 8 for each in read_measure(report, "sent_gib.dp")]  # type: ignore[union-attr]
    )
    report = simulate(load_job({**job, "plan": {"dp": 8, "pp": 2, "zero": 0}}))
    assert read_measure(report, "across_gib.dp") == [0.0, 0.0]
    assert read_measure(report, "across_gib.pp") == read_measure(report, "sent_gib.pp") != [0.0, 0.0]


def test_a_part_of_a_layer_takes_the_time_of_its_kernels_and_collectives() -> None:
    job = {**JOB, "plan": {"tp": 8}, "framework": {"name": "megatron-core", "set": {"cuda_graphs": True}}}
    report = simulate(load_job({**job, "train": {"mode": "forward-only"}}))
    parts = [read_measure(report, f"between_s.{part}") for part in ("norm2.act", "act.residual2", "norm2.residual2")]
    first, second, whole = map(float, parts)  # type: ignore[arg-type]
    assert 0 < first < whole and 0 < second < whole
    kernels = {op.name: seconds for _, op, seconds, _ in priced_ops(report)}
    assert whole - first - second == pytest.approx(kernels["act"])
    ends = kernels["up"] + kernels["all_gather norm2"] if "all_gather norm2" in kernels else kernels["up"]
    assert first == pytest.approx(ends)
    with pytest.raises(PlanError, match="no kernel of the step has this name"):
        read_measure(report, "between_s.norm2.residual3")


def test_no_step_is_shorter_with_contention() -> None:
    report = simulate(load_job({**JOB, "plan": {"dp": 8}}))
    assert float(read_measure(report, "contended_s")) >= float(read_measure(report, "step_time_s"))  # type: ignore[arg-type]


def test_a_target_is_said_as_the_paper_has_it() -> None:
    claim = make({"cases": {"a": CASE}, "relation": "a", "value": 12.0, "tolerance": 0.1}).entries[0]
    assert describe_target(claim) == "12 within 10 %"

"""Common mistakes on the command line: one line with place, value and a remedy. What each says: `tests/refusals`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import simulate
from tests.draws import drawn
from tests.experiments.cli.samples import JOB, ROOT, run, unprivileged
from tests.test_refusals import READERS, Refusal, read_tables

REFUSALS = [case.values[0] for case in read_tables()]
OF_JOBS = [
    refusal
    for refusal in REFUSALS
    if refusal.reader is READERS["job"]
    and isinstance(refusal.input, dict)
    and not refusal.files
    and "changes" not in refusal.input
]
"""Jobs that are refused, as mappings."""


class Whole(yaml.SafeDumper):
    """Writes out what is there twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def start_of_line(data: Any, path: str) -> str:
    """Returns how the line begins that has the last key or entry of a path which data have."""
    start = ""
    for key, number in re.findall(r"'?([\w-]+)'?|\[(\d+)\]", path):
        if number and isinstance(data, list) and int(number) < len(data):
            data, start = data[int(number)], "- "
        elif key and isinstance(data, dict) and key in data:
            data, start = data[key], f"{key}:"
        else:
            break
    return start


@pytest.mark.parametrize("refusal", drawn(OF_JOBS, keep=8))
def test_a_mistake_in_a_file_has_the_line_of_its_key(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of the mapping that lacks the key. What is no key of the job, such as a rule of a scheme, has no line."""
    monkeypatch.chdir(tmp_path)
    text = yaml.dump(refusal.input, Dumper=Whole, sort_keys=False, width=10**6)
    Path("job.yaml").write_text(text, "utf-8")
    with pytest.raises(MeshcastError) as refused:
        simulate("job.yaml")
    if place := re.fullmatch(r"job\.yaml:(\d+) (.*)", refused.value.where):
        line = text.splitlines()[int(place[1]) - 1].lstrip()
        start = start_of_line(refusal.input, place[2])
        assert line.startswith(start) or line.startswith(f"- {start}"), (refused.value.where, line)
    else:
        assert not refused.value.where.startswith("job.yaml:")


def refusal(*words: object) -> str:
    """The one line of a refusal."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("meshcast: ") and line.count(". ") >= 1, "a rule and a remedy"
    return line


def test_with_json_a_mistake_is_an_object(job: Path) -> None:
    result = run("predict", job, "--json", "--set", "plan.tp=3")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and result.stderr == ""
    assert error["kind"] == "PlanError" and error["value"] == 3 and error["rule"] and error["remedy"]


def test_files_that_are_too_long(tmp_path: Path) -> None:
    with (tmp_path / "large.yaml").open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    assert "104,857,600 bytes, at most 10,000,000 are read" in refusal("predict", tmp_path / "large.yaml")
    for key in ("cluster", "model"):
        job = re.sub(f"{key}: .*", f"{key}: large.yaml", JOB)
        (tmp_path / "job.yaml").write_text(job, "utf-8")
        assert "large.yaml: 104,857,600 bytes" in refusal("predict", tmp_path / "job.yaml"), key


def test_a_file_that_may_not_be_read(job: Path) -> None:
    assert "plan.tp is 3" in refusal("predict", job, "--set", "plan.tp=3"), "by now all that it takes is imported"
    job.chmod(0)
    with unprivileged():
        assert "cannot be read (Permission denied)" in refusal("predict", job)


# -------------------------------------------------------------------------------------------- lines

GOOD = '{"id": 1, "model": "gpt2", "cluster": "dgx-h100:1", "plan": {"tp": 2}}'

LINES: list[tuple[str, str]] = [
    ("not json", "not a job: not valid JSON (a value is missing"),
    ("null", "a job is a mapping"),
    (GOOD + GOOD, "not a job: not valid JSON (more follows"),
    (GOOD.replace('"tp": 2', '"tp": 2, "tp": 4'), "the key 'tp' is given twice"),
    (GOOD.replace('"tp": 2', '"tp": NaN'), "NaN is not a number in JSON"),
    (GOOD.replace('"tp": 2', '"tp": 1e999'), "not a job: 1e999 is too large for a number"),
    (GOOD.replace('"tp": 2', '"tp": -2'), "plan.tp is -2: must be above 0"),
    (GOOD.replace('"tp": 2', '"tp": 1' + "0" * 5000), "not a job: not valid JSON"),
    (GOOD.replace("gpt2", "gtp2"), "Did you mean 'gpt2'"),
    (GOOD.replace("dgx-h100:1", "\\ud800"), "half a character"),
    ("[" * 100_000, "nested too deeply"),
    (bytes(8).decode() + "\ufffd", "not a job: not valid JSON"),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", drawn([["--version"], ["list", "schedule", "1f1b", "--p", "2", "--m", "2"]], keep=2))
def test_what_cannot_be_printed_is_told(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "meshcast", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "standard output: it cannot be written (No space left" in done.stderr


def test_every_line_is_answered(tmp_path: Path) -> None:
    path, out = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(f"{line}\n{GOOD}\n" for line, _ in LINES), "utf-8")
    result = run("predict", "--jobs", path, "--out", out)
    told = f"meshcast: {path}: {2 * len(LINES)} lines, {len(LINES)} answered\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", told)
    answers = [json.loads(line, parse_constant=pytest.fail) for line in out.read_text("utf-8").splitlines()]
    assert len(answers) == 2 * len(LINES)
    for i, (line, words) in enumerate(LINES):
        error: dict[str, Any] = answers[2 * i]["error"]
        assert answers[2 * i].keys() == {"id", "line", "error"}
        assert answers[2 * i]["id"] == (1 if "tp is" in words or "gpt2" in words else None)
        assert answers[2 * i]["line"] == 2 * i + 1 and error["where"].startswith(f"{path}:{2 * i + 1}")
        assert words in f"{error['where']} is {error['value']}: {error['rule']}. {error['remedy']}", line[:80]
        assert error["remedy"] and answers[2 * i + 1]["step_time_s"] == answers[1]["step_time_s"]


def test_a_file_of_one_job_has_no_line_with_a_job(job: Path) -> None:
    told = run("predict", "--jobs", job).stderr
    assert "4 lines, 0 answered: none of them is a JSON object. Write one job a line" in told


ROW: dict[str, Any] = {"id": "a-1", "spec": {"class": "dense", "stack": "megatron-lm"}, "measured": {}}

ROWS: list[tuple[Any, str]] = [
    ("nothing", "not valid JSON"),
    ("[1]", "not an object"),
    ({**ROW, "id": 3}, "id is 3: must be text"),
    ({"id": "a"}, "spec: needed and missing"),
    *(
        ({**ROW, "spec": {**ROW["spec"], **change}}, words)
        for change, words in (
            ({"class": "dens"}, "spec.class is 'dens': not one of the valid words. Did you"),
            ({"gpuss": 3}, "spec.gpuss: no such key. Did you mean 'gpus'?"),
            ({"gpus": "8"}, "spec.gpus is '8': must be a whole number"),
            ({"mesh": {"tpp": 2}}, "spec.mesh.tpp: no such key. Did you mean 'tp'?"),
            ({"mesh": {"tp": -2}}, "spec.mesh.tp is -2: must be at least 1"),
            ({"precision": "bf61"}, "Did you mean 'bf16'?"),
            ({"filled": "gpus"}, "spec.filled is 'gpus': must be a list"),
        )
    ),
    ({**ROW, "measured": {"step_time_s": 0}}, "measured.step_time_s is 0: must be at least 1e-06"),
]


def test_every_published_row_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row, _ in ROWS), "utf-8")
    result = run("validate", "published", "--data", path, "--json", "--jobs", "1")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    for i, (row, (_, words)) in enumerate(zip(rows, ROWS, strict=True), 1):
        assert row["status"] == "refused" and f"{path}:{i}" in row["reason"], words
        assert words in row["reason"] and f"{i} ." not in row["reason"], row["reason"]

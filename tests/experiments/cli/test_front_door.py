"""The first minutes with meshcast: a first job, its schema, completion of the shell, a tidy help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshcast.experiments.schema import KINDS, schema
from meshcast.hardware.load import read_yaml
from meshcast.simulator import simulate
from meshcast.simulator.job.job import Batch, JobFile, RunLength
from meshcast.simulator.job.plan_keys import ShortPlan
from tests.draws import drawn
from tests.experiments.cli.samples import ROOT, run


def test_the_first_job_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    result = run("init", path)
    assert result.exit_code == 0 and f"meshcast predict {path}" in result.stdout
    answer = json.loads(run("predict", path, "--json").stdout)
    assert answer["status"] == "fits" and answer["id"] == "first-job"
    assert run("init", "-").stdout == path.read_text("utf-8")


def test_the_first_job_teaches_every_key_in_a_line() -> None:
    lines = run("init", "-").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    taught = set()
    for line in lines:
        key = re.match(r" *(?:# )?(\w+):", line)
        if key and (comment := line.strip().removeprefix("# ").partition(" # ")[2]):
            assert len(comment) > 8, line
            taught.add(key[1])
    keys = {*JobFile.model_fields, *ShortPlan.model_fields, *RunLength.model_fields, "global", *Batch.model_fields}
    in_comments = {"documents", "microbatches", "stages", "replicas", "lengths", "order", "samples", "rounds"}
    in_comments |= {"reshard", "unit", "prefetch"}
    assert all(f"{key}: " in "".join(lines) for key in in_comments)
    assert keys - {"total"} - taught <= {"batch", *in_comments}


def test_commented_out_keys_of_the_first_job_are_valid(tmp_path: Path) -> None:
    text = run("init", "-").stdout
    hidden = [line.strip().removeprefix("# ") for line in text.splitlines() if re.match(r" *# \w+:", line)]
    assert len(hidden) >= 9
    for line in hidden:
        fields = read_yaml(line).data
        experts = any(key.startswith(("ep", "etp")) for key in fields)
        model = {"preset": "mixtral-8x7b" if experts else "llama3-8b", "layers": 2}
        job = {"model": model, "cluster": "dgx-h100:2", "batch": {"global": 32}}
        if fields.keys() <= JobFile.model_fields.keys():
            job |= fields
        elif fields.keys() <= RunLength.model_fields.keys():
            job |= {"run": fields}
        else:
            job |= {"plan": {"tp": 4, "pp": 2, **fields}}
        (tmp_path / "job.json").write_text(json.dumps(job), "utf-8")
        simulate(tmp_path / "job.json")


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine", "utf-8")
    result = run("init", path)
    assert result.exit_code == 2
    assert path.read_text("utf-8") == "mine"
    assert run("init", path, "--force").exit_code == 0
    assert path.read_text("utf-8").startswith("# A job")


@pytest.mark.parametrize("kind", drawn(KINDS, keep=("job",)))
def test_the_schema_is_printed(kind: str) -> None:
    """That of jobs without a word."""
    result = run("schema", *[kind] * (kind != "job"))
    assert result.exit_code == 0 and json.loads(result.stdout) == schema(kind)


def test_help_fits_a_screen() -> None:
    help_ = run("--help").stdout
    assert "schema" in help_ and "init" in help_ and len(help_.splitlines()) <= 50


def test_sequences_of_a_model_are_those_of_the_batch(tmp_path: Path) -> None:
    shape, text = (
        "layers: 4, hidden: 512, heads: 8, vocab: 1000",
        "cluster: dgx-h100:1\nplan: {tp: 2}\nbatch: {global: 64, ",
    )
    (tmp_path / "open.yaml").write_text(f"model: {{{shape}}}\n{text}sequence: 1024}}\n", "utf-8")
    (tmp_path / "said.yaml").write_text(f"model: {{{shape}, seq: 1024}}\n{text}sequence: 1024}}\n", "utf-8")
    assert run("predict", tmp_path / "open.yaml").stdout == run("predict", tmp_path / "said.yaml").stdout != ""


def asked(**variables: str) -> str:
    """The completions that meshcast prints for a shell."""
    code = "import sys; sys.argv = ['meshcast']; from meshcast.experiments.cli.start import main; main()"
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "word"), drawn([("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --com")], keep=3)
)
def test_the_shells_script_is_printed(shell: str, word: str) -> None:
    script = asked(_MESHCAST_COMPLETE=f"source_{shell}")
    assert word in script and f"_MESHCAST_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize(
    ("line", "found"), drawn([("meshcast predict --str", "--strict"), ("meshcast pre", "predict")], keep=2)
)
def test_the_shell_completes(line: str, found: str) -> None:
    words = asked(_MESHCAST_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    assert words.split() == [found]

"""Errors of ``search`` and ``plan`` on launch files name the setting of that file, as ``predict`` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from tests.experiments.cli.samples import run

SCRIPT = """\
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size {batch} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
  --bf16 --use-distributed-optimizer --vocab-size 51200
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "run.sh").write_text(SCRIPT.format(batch=121))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["predict"],
        ["plan", "--with", "amp", "--no-optimum"],
    ],
)
def test_errors_name_the_flag(command: list[str], script: Path) -> None:
    name, *options = command
    found = run(name, script, *options)
    words = " ".join(found.output.split())
    assert found.exit_code == 2
    assert f"{script} is read as a launch file of Megatron-LM" in words
    assert f"{script}:3 --global-batch-size (batch.global) is 121" in words


@pytest.mark.parametrize("command", ["predict", "search"])
def test_errors_of_a_search_name_the_flag(command: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(SCRIPT.format(batch=128).replace("4096 --num-att", "4097 --num-att"))
    found = run(command, path, "--set", "plan.tp=auto")
    assert found.exit_code == 2
    assert f"{path}:2 --hidden-size (model.hidden)" in " ".join(found.output.split())


def test_a_launch_file_leaves_no_field_open(script: Path) -> None:
    found = run("search", script)
    assert found.exit_code == 2
    words = " ".join(found.output.split())
    assert "states its whole plan" in words and f"meshcast import megatron {script}" in words


def test_search_opens_fields_of_a_launch_file(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(SCRIPT.format(batch=128))
    found = run("search", path, "--set", "plan.tp=[2,4]", "--set", "plan.recompute=auto", "--top", "2")
    assert found.exit_code == 0, found.output
    assert "no plan of the space that fits with 95 % is faster" in found.output


TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
global_batch_size = {total}
seq_len = 8192
[parallelism]
pipeline_parallel_degree = {pp}
"""


@pytest.mark.parametrize(("total", "pp", "passes"), [(256, 4, 16), (16, 4, 0), (256, 1, 0)])
def test_several_passes_through_a_pipeline_of_torchtitan_are_named(total: int, pp: int, passes: int) -> None:
    text = TORCHTITAN.format(total=total, pp=pp)
    found = import_text(text, "job.toml", "torchtitan", cluster="dgx-h100:2")
    whys = {entry.shown: entry.why for entry in found.findings.approximated}
    why = whys.get("training.global_batch_size", "")
    assert bool(why) == bool(passes)
    if passes:
        assert f"over {passes} passes through the pipeline" in why


@pytest.mark.parametrize("program", EXPORTS)
def test_a_name_with_an_end_of_line_stays_in_the_comment_of_an_exported_file(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "c\ntouch PWNED\n#.yaml"
    (tmp_path / name).write_text("{node: dgx-h100, nodes: 1}", "utf-8")
    model = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
    job = {"model": model, "cluster": name, "batch": {"global": 16, "micro": 1}, "plan": {"tp": 2}}
    (tmp_path / "job.json").write_text(json.dumps(job), "utf-8")
    exported = run("export", "job.json", "--to", program)
    assert exported.exit_code == 0, exported.stderr
    assert not [line for line in exported.stdout.splitlines() if line.startswith("touch")]

"""What messages suggest for words of other programs: bare keys, GPUs as clusters, names of Hugging Face, options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.experiments.cli.samples import run

JOB = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 64}}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("tp=4", "--set tp: a job has no such key. Did you mean plan.tp?"),
        ("tensor_model_parallel_size=4", "Did you mean plan.tp?"),
        ("global_batch_size=4", "Did you mean batch.global?"),
        ("gpus=64", "cluster=dgx-h100:8 is 8 nodes of 8 GPUs"),
        (
            "plan.recompute=true",
            "words say what is recomputed. Write none, selective, operators or full",
        ),
        ("plan.foo=1", "tp, tp_scheme, unit, zero"),
        ("plans=auto", "Did you mean 'plan'?"),
        ("cluster=h100", "h100-sxm is a GPU; its usual node is dgx-h100; write 16xh100-sxm for 16 GPUs"),
        ("cluster=H100:64", "Nodes are counted, not GPUs: 64 h100-sxm are dgx-h100:8"),
        ("cluster=dgx-h10", "Did you mean 'dgx-h100:8'? Valid: dgx-h100:8, "),
        ("cluster=zzzz", "meshcast list clusters and meshcast list nodes show all"),
        ("model=Qwen/Qwen2.5-VL-7B-Instruct", "Did you mean 'qwen2.5-7b'? Valid: qwen2.5-7b, "),
        ("model=gpt-5", "no preset or file has this name. Valid: gpt2-355m, "),
        ("model=zzzz", "meshcast list models shows all"),
    ],
)
def test_a_change_of_the_job(job: Path, change: str, words: str) -> None:
    result = run("predict", str(job), "--set", change)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr) < 700


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "dgx-h100:8"], "--set cluster=dgx-h100:8"),
        (["--gpus", "64"], "--set cluster=dgx-h100:8"),
        (["--tp", "4"], "--set plan.tp=VALUE"),
        (["--set", "plan.tp", "4"], "Write --set plan.tp=4"),
    ],
)
def test_options_that_are_fields(job: Path, arguments: list[str], words: str) -> None:
    result = run("predict", str(job), *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.replace("│", " ").split())


def test_a_replaced_option_names_the_new_one(job: Path) -> None:
    result = run("search", str(job), "--unlike")
    assert result.exit_code == 2 and "called --heterogeneous now" in " ".join(result.stderr.replace("│", " ").split())


def test_a_preset_is_no_job() -> None:
    result = run("predict", "llama3-70b")
    assert result.exit_code == 2
    assert "this is a preset of a model" in result.stderr and "`model: llama3-70b`" in result.stderr


def test_sweeps_of_bare_keys_and_of_launch_files(tmp_path: Path) -> None:
    (sweep := tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"job": JOB, "vary": {"tp": [1, 2]}}))
    out = str(tmp_path / "rows.parquet")
    assert "Did you mean plan.tp?" in run("sweep", str(sweep), "--out", out).stderr
    (launch := tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    refused = run("sweep", str(launch), "--out", out).stderr
    assert "this is a launch file" in refused and "`job: run.sh` and `vary: {plan.tp: [2, 4, 8]}`" in refused


def test_import_finds_the_program_of_a_launch_file(tmp_path: Path) -> None:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    launch = tmp_path / "run.sh"
    launch.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {shape} --micro-batch-size 1 --vocab-size 512\n")
    detected, named = (run("import", *words, launch, "--cluster", "dgx-h100:1") for words in ((), ("megatron",)))
    assert detected.exit_code == 0, detected.stderr
    assert detected.stdout == named.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "nosuch.sh"), "there is no such file, nor a program of this name. Name a launch file"),
        (("import", "megatron"), "Write meshcast import megatron FILE"),
        (("import", "kineto"), "Write meshcast import kineto FILE"),
    ],
)
def test_import_of_a_single_word_that_is_no_file(arguments: tuple[str, ...], words: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2 and words in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "JOB", "--out", "o.json"), "--json > o.json, or --jobs FILE"),
        (("sweep", "JOB", "--out", "o.parquet"), "this is a job, and a sweep says what varies. Write `job: FILE`"),
        (("plot", "JOB"), "a job is drawn by meshcast plot breakdown"),
        (("predict", "JOB", "--set", "plan.schedule=zerobubble"), "It is 'zb-h1' here"),
        (("calibrate", "collectives", "NCCL"), "meshcast import nccl-tests"),
    ],
)
def test_a_message_leads_on(job: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (log := tmp_path / "nccl.txt").write_text("# nThread 1\n")
    refused = run(*({"JOB": job, "NCCL": log}.get(word, word) for word in arguments))
    assert refused.exit_code == 2 and words in refused.stderr

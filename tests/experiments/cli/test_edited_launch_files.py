"""``export JOB --against SCRIPT``: the edits of a script, and whether the edited script is forecast as the job is."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from tests.draws import drawn
from tests.experiments.cli.samples import run

SHAPE = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --swiglu --vocab-size 1000"
MEGATRON = f"""\
#!/bin/bash
ARGS="{SHAPE} --seq-length 512 --max-position-embeddings 512 --untie-embeddings-and-output-weights"
PLAN=(
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer  # as last time
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py $ARGS "${{PLAN[@]}}" --micro-batch-size 1 \\
    --global-batch-size 32 --bf16 --lr 1e-4 --save /checkpoints
"""
EXPERTS = MEGATRON.replace(
    '"\nPLAN', ' --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"\nPLAN'
)
TITAN = """\
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 4
seq_len = 2048
dataset = "c4_test"  # small
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of launch files, which is the working directory."""
    for name, text in (("run.sh", MEGATRON), ("moe.sh", EXPERTS), ("job.toml", TITAN)):
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "nodes", "plan"),
    drawn(
        [
            ("run.sh", 2, "{tp: [1, 2], pp: [1, 2], zero: [0, 1]}"),
            ("moe.sh", 1, "{tp: 1, pp: [1, 2], ep: [1, 2]}"),
            ("job.toml", 1, "{tp: [1, 2], fsdp: true, recompute: [none, full]}"),
            *(("run.sh", 2, "auto"), ("moe.sh", 1, "auto"), ("job.toml", 2, "auto")),
        ],
        keep=lambda case: case[2] != "auto",
    ),
)
def test_the_plans_of_a_search_make_scripts(folder: Path, name: str, nodes: int, plan: str) -> None:
    """All are exportable: the edited files give the announced step and memory."""
    kept = (folder / name).read_text("utf-8")
    count = 10 if plan == "auto" else 2
    changes = ("--set", f"plan={plan}", "--set", f"cluster=dgx-h100:{nodes}")
    searched = run("search", name, *changes, "--jobs-to", "best", "--top", count, "--workers", 1)
    jobs = sorted((folder / "best").glob("*.yaml"))
    assert searched.exit_code == 0 and len(jobs) == count, searched.stderr
    diffs = set()
    for job in jobs:
        edited = run("export", job, "--against", name)
        assert edited.exit_code == 0, (job.read_text(), edited.stdout, edited.stderr)
        assert f"{name} with these edits is forecast as the job is: " in edited.stderr
        diffs.add(edited.stdout)
    same = f"{name} says the same already\n"
    assert len(diffs) == count and all(f"--- {name}\n+++ {name}\n@@" in diff for diff in diffs - {same})
    assert (folder / name).read_text("utf-8") == kept


def job_with(folder: Path, **plan: object) -> str:
    """A job file with the model of the script and a plan."""
    run("import", "megatron", "run.sh", "--cluster", "dgx-h100:2", "--out", "job.yaml")
    stated = yaml.safe_load((folder / "job.yaml").read_text("utf-8"))
    (folder / "wanted.yaml").write_text(yaml.safe_dump({**stated, "plan": plan}), "utf-8")
    return "wanted.yaml"


def test_edits_are_a_diff_of_the_lines_that_change(folder: Path) -> None:
    done = run("export", job_with(folder, tp=4, recompute="full"), "--against", "run.sh")
    changed = [line for line in done.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    old, new = changed
    assert done.exit_code == 0 and old == "-" + MEGATRON.splitlines()[3]
    for words in ("--tensor-model-parallel-size 4 ", "--recompute-granularity full", "  # as last time"):
        assert words in new
    same = run("export", job_with(folder, tp=2), "--against", "run.sh")
    assert same.exit_code == 0 and same.stdout == "run.sh says the same already\n"


@pytest.mark.parametrize(
    ("plan", "named"),
    [({"zero": 3}, "plan.data (zero-3; here "), ({"pp": 2, "schedule": "zb-h1"}, "plan.pipeline (zb-h1; here 1f1b)")],
)
def test_what_the_program_cannot_be_told_is_named_and_nothing_is_written(
    folder: Path, plan: dict[str, object], named: str
) -> None:
    done = run("export", job_with(folder, **plan), "--against", "run.sh", "--write")
    assert done.exit_code == 1 and "run.sh with these edits is another job" in done.stderr
    assert "Megatron-LM cannot be told" in done.stderr and named in done.stderr
    assert (folder / "run.sh").read_text("utf-8") == MEGATRON


def test_a_batch_that_follows_from_the_degrees_is_stated_where_these_change(folder: Path) -> None:
    """torchtitan's global batch is that of all replicas: with half of them, the file has to say it."""
    run("import", "torchtitan", "job.toml", "--cluster", "dgx-h100:2", "--out", "job.yaml")
    done = run("export", "job.yaml", "--set", "plan.tp=4", "--against", "job.toml")
    assert done.exit_code == 0 and "+global_batch_size = 32\n" in done.stdout


def test_written_files_keep_their_mode_and_links_stay_inside(folder: Path) -> None:
    job = job_with(folder, tp=4)
    (folder / "run.sh").chmod(0o750)
    (folder / "link.sh").symlink_to("run.sh")
    (folder / "inner").mkdir()
    (folder / "inner" / "outside.sh").symlink_to(folder / "run.sh")
    refused = run("export", job, "--against", "inner/outside.sh", "--write")
    assert refused.exit_code == 2 and "it is a link to a file in another folder" in refused.stderr
    assert (folder / "run.sh").read_text("utf-8") == MEGATRON
    done = run("export", job, "--against", "link.sh", "--write")
    assert done.exit_code == 0 and "wrote link.sh" in done.stderr and (folder / "link.sh").is_symlink()
    assert "--tensor-model-parallel-size 4" in (folder / "run.sh").read_text("utf-8")
    assert stat.S_IMODE((folder / "run.sh").stat().st_mode) == 0o750
    assert not [*folder.glob(".*")], "no file is left beside it"
    assert run("export", job, "--against", "run.sh").stdout == "run.sh says the same already\n"


@pytest.mark.parametrize("words", [["predict", "two.yaml"], ["run", "two.yaml"], ["compare", "two.yaml", "two.yaml"]])
def test_every_page_of_a_forecast_names_what_the_program_would_refuse(folder: Path, words: list[str]) -> None:
    job = {
        "model": {"preset": "llama3-8b", "layers": 1, "kv_heads": 2},
        **{"cluster": "dgx-h100:1", "framework": "torchtitan", "batch": {"global": 8}},
        **{"plan": {"tp": 4, "fsdp": True}, "run": {"steps": 10, "seeds": 1}},
    }
    (folder / "two.yaml").write_text(yaml.safe_dump(job), "utf-8")
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert "torchtitan would refuse this: 4 tensor ranks do not divide 2 key/value" in " ".join(done.stdout.split())


def test_settings_of_other_files_are_edited_where_they_stand(folder: Path) -> None:
    """A flag in a sourced file, or the variable of the script that it takes; a configuration that a script names; the
    arguments of the command line."""
    plan = '"\nTP=2\nPP=1\n. ./plan.sh\n'
    head, _, rest = MEGATRON.partition('"\nPLAN')
    (folder / "split.sh").write_text(head + plan + rest.partition(")\n")[2], "utf-8")
    degrees = "PLAN=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size 1"
    (folder / "plan.sh").write_text(f"{degrees} --sequence-parallel --use-distributed-optimizer)\n", "utf-8")
    (folder / "titan.sh").write_text('torchrun -m torchtitan.train --job.config_file job.toml "$@"\n', "utf-8")

    job = job_with(folder, tp=4, pp=2, zero=1)
    edited = run("export", job, "--against", "split.sh", "--write")
    assert edited.exit_code == 0 and "-TP=2\n+TP=4\n" in edited.stdout, (edited.stdout, edited.stderr)
    assert "--pipeline-model-parallel-size 2" in (folder / "plan.sh").read_text("utf-8")
    assert "--tensor-model-parallel-size $TP" in (folder / "plan.sh").read_text("utf-8")
    assert run("export", job, "--against", "split.sh").stdout == "split.sh says the same already\n"

    run("import", "torchtitan", "job.toml", "--cluster", "dgx-h100:1", "--out", "job.yaml")
    stated = yaml.safe_load((folder / "job.yaml").read_text("utf-8"))
    stated["plan"] |= {"tp": 4, "recompute": "none"}
    (folder / "wanted.yaml").write_text(yaml.safe_dump(stated), "utf-8")
    arguments = ("--args", "--activation_checkpoint.mode full")
    edited = run("export", "wanted.yaml", "--against", "titan.sh", *arguments, "--write")
    assert edited.exit_code == 0, (edited.stdout, edited.stderr)
    assert "--- --args\n+++ --args\n" in edited.stdout
    assert "give --args '--activation_checkpoint.mode none'" in edited.stderr
    assert "tensor_parallel_degree = 4" in (folder / "job.toml").read_text("utf-8")


def test_the_end_of_a_name_says_what_is_written(folder: Path) -> None:
    """torchtitan reads Python today, and TOML before 2026."""
    job = job_with(folder, tp=2, fsdp=True)
    release = ("--set", "framework=torchtitan", "--set", "framework.release=2025-06")
    assert run("export", job, "--to", "torchtitan", *release, "--out", "made.toml").exit_code == 0
    assert run("export", job, "--to", "megatron", "--out", "made.slurm").exit_code == 0


def test_a_file_that_leaves_its_batch_and_recomputation_to_others(folder: Path) -> None:
    """The job says the micro-batch; recomputation that no file states is bounded by a second forecast."""
    text = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}'
    (folder / "ds.json").write_text(text, "utf-8")
    changes = ("--set", "model={preset: llama3-8b, layers: 2}", "--set", "cluster=dgx-h100:1", "--set", "batch.micro=2")
    forecast = run("predict", "ds.json", *changes, "--set", "batch.sequence=2048")
    assert "approximated recomputation: the code of the model says" in forecast.stderr, forecast.stderr
    assert "approx     recomputation" in forecast.stdout
    silent = run("predict", "ds.json", *changes, "--set", "batch.sequence=2048", "--set", "plan.recompute=none")
    assert "approx" not in silent.stdout + silent.stderr and silent.exit_code == 0
    run("import", "ds.json", *changes, "--set", "batch.sequence=2048", "--out", "job.yaml")
    edited = run("export", "job.yaml", "--set", "plan.zero=1", "--against", "ds.json")
    assert edited.exit_code == 0 and '+{"zero_optimization": {"stage": 1}' in edited.stdout, edited.stderr


def test_an_interval_of_open_questions_names_them(folder: Path) -> None:
    text = MEGATRON.replace("--micro-batch-size 1", "--micro-batch-size $MICRO")
    (folder / "open.sh").write_text(text, "utf-8")
    forecast = run("predict", "open.sh", "--set", "cluster=dgx-h100:2", "--assume-defaults")
    assert "unknown: as framework.set.regime says, which open questions" in " ".join(forecast.stdout.split())


def test_a_configuration_in_python_is_overridden_by_arguments(folder: Path) -> None:
    """What follows from its code is not edited; the command line of the script counts more."""
    registry = folder / "torchtitan" / "models" / "llama3" / "config_registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(
        "def a_run():\n"
        "    return Trainer.Config(\n"
        '        model_spec=model_registry("debugmodel"),\n'
        "        training=TrainingConfig(local_batch_size=1, seq_len=4096, steps=10),\n"
        "        parallelism=ParallelismConfig(tensor_parallel_degree=2),\n"
        "        activation_checkpoint=SelectiveAC.Config(),\n"
        "    )\n",
        "utf-8",
    )
    command = 'torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config a_run "$@"\n'
    (folder / "titan.sh").write_text(command, "utf-8")
    changes = ("--set", "cluster=dgx-h100:1", "--set", "plan.tp=4", "--set", "plan.recompute=full")
    edited = run("export", "titan.sh", *changes, "--against", "titan.sh")
    assert edited.exit_code == 0, (edited.stdout, edited.stderr)
    assert "--parallelism.tensor_parallel_degree 4" in edited.stdout and "SelectiveAC" not in edited.stdout
    assert "give --args activation-checkpoint:full" in edited.stderr

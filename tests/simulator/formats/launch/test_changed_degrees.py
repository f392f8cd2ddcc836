"""Changes of an imported plan: what the program derives from degrees follows, also where the plan needs long form."""

from __future__ import annotations

from pathlib import Path

from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job, read_job

SCRIPT = """\
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 16 --hidden-size 512 --num-attention-heads 8 \\
 --bf16 --seq-length 256 --micro-batch-size 1 --global-batch-size 32 --vocab-size 1000 --tensor-model-parallel-size 2 \\
"""
EXPERTS = (
    "  --num-experts 8 --moe-token-dispatcher-type flex --expert-model-parallel-size 4 --pipeline-model-parallel-size 2"
)


def write(folder: Path, more: str, script: str = SCRIPT) -> Path:
    (path := folder / "run.sh").write_text(script + more)
    return path


def chunks_of(job: Job) -> int:
    return int(
        next((entry.model_extra or {}).get("chunks", 1) for entry in job.plan.schemes if "pipeline/" in entry.use)
    )


def test_chunks_follow_from_the_layers_of_a_virtual_stage(tmp_path: Path) -> None:
    path = write(tmp_path, "  --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    assert [chunks_of(load_job(path, sets)) for sets in ((), ("plan.pp=4",), ("plan.pp=8",))] == [4, 2, 1]
    assert chunks_of(load_job(path, ("plan.pp=4", "plan.chunks=4"))) == 4
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    ends = write(tmp_path, f"  --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 {both}")
    assert chunks_of(load_job(ends)) == 3


def test_a_schedule_with_options_follows_from_changed_chunks(tmp_path: Path) -> None:
    path = write(tmp_path, "  --pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute")
    for chunks, use in ((1, "pipeline/1f1b"), (2, "pipeline/interleaved-1f1b")):
        entries = {entry.use: entry.model_extra for entry in load_job(path, (f"plan.chunks={chunks}",)).plan.schemes}
        assert (entries[use] or {})["deferred_output_gradients"] == 0


def test_degrees_of_a_plan_in_long_form(tmp_path: Path) -> None:
    path = write(tmp_path, EXPERTS)
    assert load_job(path).plan.views == {"experts": {"edp": 1, "ep": 4, "etp": 2}}
    assert load_job(path, ["plan.ep=8", "plan.etp=1"]).plan.views == {"experts": {"edp": 1, "ep": 8, "etp": 1}}
    job = load_job(path, ["plan.tp=1", "plan.pp=4"])  # experts are sharded as the rest where the file does not say
    assert job.plan.mesh == {"pp": 4, "dp": 4, "tp": 1} and job.plan.views["experts"]["etp"] == 1


def test_short_keys_change_a_plan_in_long_form(tmp_path: Path) -> None:
    path = write(tmp_path, EXPERTS)
    assert "mesh" in read_job(path).data["plan"]
    used = {entry.use for entry in load_job(path, ["plan.recompute=full", "plan.zero=2"]).plan.schemes}
    assert {"memory/recompute-full", "data/zero-2"} <= used and "data/ddp" not in used


def test_a_change_replaces_what_the_import_wrote(tmp_path: Path) -> None:
    path = write(tmp_path, "")  # of which the plan has sequence_parallel: false, zero: 0
    used = {entry.use for entry in load_job(path, ["plan.tp_scheme=megatron-sp", "plan.fsdp=true"]).plan.schemes}
    assert {"tensor/megatron-sp", "data/fsdp"} <= used


# ------------------------------------------------------------------------------------------ layouts

DEEPSEEK = SCRIPT.replace("--num-layers 16", "--num-layers 61 --mtp-num-layers 1").replace("nodes 2", "nodes 8")
DEEPSEEK += "  --position-embedding-type rope --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "


def test_a_stage_of_prediction_alone_takes_a_layer(tmp_path: Path) -> None:
    """DeepSeek-V3's own layout in Megatron-LM's documentation: stage 30 has the MTP layer, stage 31 the loss."""
    path = write(tmp_path, "'Et*3|(tt|)*29,m|L'", DEEPSEEK)
    assert load_job(path).plan.partition == (3, *[2] * 28, 1, 1, 0)
    found = import_text(path.read_text(), "run.sh", "megatron")
    assert "MTP is moved to the last stage, and stage 30" in found.comments["plan.partition"]
    last = import_text(f"{DEEPSEEK}'Et|(tt|)*29t|tmL'", "run.sh", "megatron")
    assert "plan.partition" not in last.assumed


def test_an_uneven_division_is_an_error_of_the_flag(tmp_path: Path) -> None:
    virtual = DEEPSEEK.replace("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage 2")
    found = import_text(virtual, "run.sh", "megatron")
    assert found.places["plan.partition"].endswith("--num-layers-per-virtual-pipeline-stage")

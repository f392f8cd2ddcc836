"""Edits of launch files: what changes is on its line or beside its neighbours, everything else stays as it is."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.changed_settings import EditedFiles, apply_setting_changes, list_changed_settings
from meshcast.simulator.formats.launch.convert import compare_keys, import_file
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.edits.shell_edits import edit_script
from meshcast.simulator.formats.launch.edits.toml_edits import edit_toml
from meshcast.simulator.formats.launch.edits.yaml_edits import edit_yaml
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchFile, parse_launch_text
from meshcast.simulator.formats.launch.table import Stated
from meshcast.simulator.loading.load import load_job

SHAPE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"

MEGATRON = f"""\
#!/bin/bash
# --tensor-model-parallel-size 8 was slow
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${{TP:-2}}
MODEL_ARGS="{SHAPE} --vocab-size 32000"
PLAN=(
    --tensor-model-parallel-size $TP --sequence-parallel --use-distributed-optimizer
    --recompute-granularity=selective  # of the core
)
torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL_ARGS "${{PLAN[@]}}" \\
    --bf16 \\
    --micro-batch-size 1 --global-batch-size 32 --save /checkpoints/tp
"""

FUNCTIONAL_TEST = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024  # short
  --max-position-embeddings: 1024
  --vocab-size: 32000
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --micro-batch-size: 1
  --global-batch-size: 32
  --bf16: true
"""

TITAN = """\
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2  # fits
seq_len = 2048
dataset = "c4"

[parallelism]
# a comment
tensor_parallel_degree = 2
module_fqns_per_model_part = [
    ["tok_embeddings"],
    ["norm", "output"],
]
"""

DEEPSPEED = """\
{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true
  }
}
"""

NEMO = """\
training:
  model:
    tensor_model_parallel_size: 2
    sequence_parallel: true
    micro_batch_size: 1  # of a rank
    global_batch_size: 32
    encoder_seq_length: 2048
    num_layers: 8
    hidden_size: 512
    num_attention_heads: 8
  trainer: {precision: bf16, num_nodes: 1}
"""

FILES = {
    "run.sh": ("megatron", MEGATRON, None),
    "test.yaml": ("megatron", FUNCTIONAL_TEST, None),
    "job.toml": ("torchtitan", TITAN.replace("module_fqns", "#").partition("#\n")[0].rpartition("#_per")[0], None),
    "ds.json": ("deepspeed", DEEPSPEED, "llama3-8b"),
    "recipe.yaml": ("nemo", NEMO, None),
}
"""Files by their names: the format, the content, and the model that the file leaves to code."""

PLANS: list[dict[str, Any]] = [
    {"tp": 4, "zero": 1, "recompute": "none"},
    {"tp": 1, "pp": 2, "zero": 1, "recompute": "none"},
    {"tp": 2, "fsdp": True, "recompute": "full"},
]


def edit(name: str, plan: dict[str, Any]) -> tuple[str, str, int, dict[str, Any]]:
    """The content of a file, the same with another plan, the number of changes, and the keys that still differ."""
    form, text, model = FILES[name]
    answers = [f"model={model}", "batch.sequence=2048"] if model else []
    file = parse_launch_text(text, name, Path(name).suffix)
    launch = import_file(file, answers, "dgx-h100:1", form=form)
    wanted = load_job({**launch.job, "plan": plan})
    changes = list_changed_settings(launch, file, load_job(launch.job), wanted)
    edited = apply_setting_changes(EditedFiles(file), changes).file.text
    back = load_job(import_file(parse_launch_text(edited, name, file.suffix), answers, "dgx-h100:1", form=form).job)
    return text, edited, len(changes), compare_keys(flatten_job(wanted), flatten_job(back))


@pytest.mark.parametrize("plan", PLANS, ids=["tp", "pp", "fsdp"])
@pytest.mark.parametrize("name", FILES)
def test_an_edited_file_says_what_it_can_and_leaves_the_rest(name: str, plan: dict[str, Any]) -> None:
    text, edited, changes, differing = edit(name, plan)
    told = {key for key in differing if not key.startswith(("batch.global", "framework.set.overlap"))}
    if name == "ds.json":  # its stages and recomputation are code; it has ZeRO-3 in place of FSDP
        told -= {"plan.pp", "plan.dp", "plan.data", "plan.pipeline", "plan.recompute", "framework.set.bucket.elements"}
        told -= {key for key in told if key.startswith(("plan.pipeline", "plan.recompute", "plan.data"))}
    if name == "job.toml":  # which has no ZeRO-1: FSDP that keeps weights is the nearest
        told -= {key for key in told if key.startswith("plan.data")}
    assert told == set(), differing
    marks = [line[:1] for line in difflib.ndiff(text.splitlines(), edited.splitlines())]
    assert marks.count("-") <= changes + 1 and marks.count("+") <= changes + 2, "the comma of JSON, the header of TOML"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("--tensor-model-parallel-size", "run.sh:7", "2", 4), "--tensor-model-parallel-size 4 --seq"),
        (("--recompute-granularity", "run.sh:8", "selective", "full"), "--recompute-granularity=full  # of"),
        (("--sequence-parallel", "run.sh:7", True, None), "-size $TP --use-distributed-optimizer\n"),
        (("--bf16", "run.sh:11", True, None), '"${PLAN[@]}" \\\n    --micro-batch-size 1'),
        (("--vocab-size", "run.sh:5", "32000", 64000), '--vocab-size 64000"\n'),
    ],
)
def test_a_flag_is_edited_where_it_stands(change: tuple[str, str, Any, Any], line: str) -> None:
    edited = edit_script(MEGATRON, SettingChange(*change))
    assert line in edited and "# --tensor-model-parallel-size 8 was slow" in edited
    assert len([*difflib.unified_diff(MEGATRON.splitlines(), edited.splitlines(), n=0, lineterm="")]) <= 5


@pytest.mark.parametrize("behind", ["", "  # fits", "\t# of 8 # or 4"])
def test_a_comment_stays_behind_its_value(behind: str) -> None:
    for value in ("2", '"a#b"'):
        edited = edit_toml(f"key = {value}{behind}\n", SettingChange("key", "job.toml:1", value, 4))
        assert edited == f"key = 4{behind}\n"


OLD = f"""\
if [ $SIZE = 7B ]; then
    MORE="{{flags}}"
    TP=2
else
    MORE="{{flags}}"
    TP=4
fi
python pretrain_gpt.py {SHAPE} --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32 --fp16 $MORE \\
    --tensor-model-parallel-size $TP --DDP-impl local
"""


BLOCK = "--activations-checkpoint-method block --activations-checkpoint-num-layers"


@pytest.mark.parametrize(
    ("flags", "plan", "told"),
    [
        ("--checkpoint-activations", {"recompute_layers": 2}, "--recompute-granularity full"),
        ("--checkpoint-activations", {"recompute": "none"}, ""),
        (
            "--recompute-granularity full --recompute-method uniform",
            {"recompute_layers": 2},
            "--recompute-method block",
        ),
        (f"{BLOCK} 1", {"recompute_layers": 2}, "--activations-checkpoint-num-layers 2"),
        (f"{BLOCK} 1", {}, "--checkpoint-activations"),
    ],
)
def test_a_flag_that_replaces_another_stands_where_that_stood(flags: str, plan: dict[str, Any], told: str) -> None:
    """Flags are of the release that has those of the file, and the other branch stays."""
    file = parse_launch_text(OLD.format(flags=flags), "old.sh", ".sh")
    launch = import_file(file, (), "dgx-a100:1", form="megatron")
    plan = {"tp": 4, "zero": 0, "sequence_parallel": False, "recompute": "full", **plan}
    wanted = load_job({**launch.job, "plan": plan})
    changes = list_changed_settings(launch, file, load_job(launch.job), wanted)
    edited = apply_setting_changes(EditedFiles(file), changes).file.text
    back = load_job(import_file(parse_launch_text(edited, "old.sh", ".sh"), (), "dgx-a100:1", form="megatron").job)
    assert flatten_job(back) | {"framework.release": None} == flatten_job(wanted) | {"framework.release": None}
    assert told in edited and edited.splitlines()[:4] == file.text.splitlines()[:4]


def test_a_flag_is_added_beside_one_that_is_cut_and_not_in_another_branch() -> None:
    file = parse_launch_text(OLD.format(flags="--checkpoint-activations"), "old.sh", ".sh")
    beside = Stated(True, "--checkpoint-activations", "old.sh:5")
    cut = SettingChange(beside.shown, beside.place, True, None)
    added = SettingChange("--recompute-granularity", "", None, "full", (beside,))
    edited = apply_setting_changes(EditedFiles(file), [cut, added]).file.text.splitlines()
    assert (
        edited[1] == '    MORE="--checkpoint-activations"' and edited[4] == '    MORE=" --recompute-granularity full"'
    )


def test_values_that_the_shell_would_divide_are_quoted() -> None:
    beside = (Stated("1", "--micro-batch-size", "run.sh:12"),)
    layout = SettingChange("--pipeline-model-parallel-layout", "", None, "Et*3|(tt|)*2m|L", beside)
    assert "--micro-batch-size 1 --pipeline-model-parallel-layout 'Et*3|(tt|)*2m|L' --global" in edit_script(
        MEGATRON, layout
    )
    modules = SettingChange("--recompute-modules", "", None, ("moe", "mlp"), beside)
    assert "--micro-batch-size 1 --recompute-modules moe mlp --global" in edit_script(MEGATRON, modules)


def titan(text: str) -> LaunchFile:
    return parse_launch_text(text, "job.toml", ".toml")


def test_a_value_over_several_lines_of_toml() -> None:
    change = SettingChange("parallelism.module_fqns_per_model_part", "job.toml:13", [["a"]], None)
    edited = apply_setting_changes(EditedFiles(titan(TITAN)), [change]).file.text
    assert edited == TITAN.partition("module_fqns")[0]
    other = SettingChange("activation_checkpoint.mode", "", None, "full")
    added = apply_setting_changes(EditedFiles(titan(TITAN)), [other]).file.text
    assert added.endswith('\n\n[activation_checkpoint]\nmode = "full"\n')


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("training = {local_batch_size = 2}\n", ("training.local_batch_size", "job.toml", 2, 4)),
        (TITAN, ("zero_optimization.stage", "ds.json:3", 2, 3)),
    ],
)
def test_what_is_written_in_another_way_is_named(text: str, change: tuple[str, str, Any, Any]) -> None:
    with pytest.raises(PlanError, match="not edited in place") as raised:
        apply_setting_changes(EditedFiles(titan(text)), [SettingChange(*change)])
    assert f"{change[2]} -> {change[3]}" in raised.value.remedy


def test_yaml_that_one_parser_alone_reads_is_not_edited() -> None:
    with pytest.raises(PlanError, match="not edited in place"):
        edit_yaml("mixed_precision:\t bf16\n", SettingChange("mixed_precision", "job.yaml:1", "bf16", "fp16"))

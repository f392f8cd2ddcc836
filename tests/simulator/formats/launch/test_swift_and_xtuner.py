"""ms-swift and xtuner: one job in every form of a file, names of all releases, defaults, files behind names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.convert import import_file
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, read_launch_file
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.programs.swift import FILES
from meshcast.simulator.formats.launch.programs.xtuner import FILES as XTUNER_FILES
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.loading.load import load_job


def import_text(
    tmp_path: Path, text: str, *changes: str, name: str = "run.sh", environment: Mapping[str, str] | None = None
) -> ImportedJob:
    """The job of a file with this text and this name, for a small dense model unless a change names another one."""
    path = tmp_path / name
    path.write_text(text)
    model = () if any(change.startswith("model=") for change in changes) else ("model=llama3-8b",)
    return import_file(read_launch_file(path, LaunchOptions(environment or {})), (*model, *changes))


def keys_of(imported: ImportedJob) -> Keys:
    """The keys of the job, without those of the cluster that the import chose."""
    keys = flatten_job(load_job(imported.job, base=Path()))
    return {key: value for key, value in keys.items() if not key.startswith("run.")}


def write_command(command: str, settings: Mapping[str, Any], **variables: int) -> str:
    """The line of a shell that starts a command. variables: of its environment."""
    words = [f"{name}={value}" for name, value in variables.items()] + [command]
    return " ".join([*words, *(f"--{name} {str(value).lower()}" for name, value in settings.items())]) + "\n"


# ---------------------------------------------------------------------------------------------- ms-swift

SWIFT = {"model": "m", "tuner_type": "lora", "torch_dtype": "bfloat16", "max_length": 4096, "lora_rank": 16}
SWIFT |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "deepspeed": "zero3"}
MEGATRON = {"model": "m", "tuner_type": "full", "tensor_model_parallel_size": 2, "max_length": 4096}
MEGATRON |= {"micro_batch_size": 2, "global_batch_size": 32, "recompute_granularity": "full"}
MEGATRON |= {"recompute_method": "uniform", "recompute_num_layers": 1, "sequence_parallel": True}


@pytest.mark.parametrize(("command", "settings"), [("swift sft", SWIFT), ("megatron sft", MEGATRON)])
def test_a_shell_script_a_file_and_a_command_with_a_file_are_one_job(
    tmp_path: Path, command: str, settings: dict[str, Any]
) -> None:
    shell = keys_of(import_text(tmp_path, write_command(command, settings, NPROC_PER_NODE=8)))
    in_file = {"ENV": {"NPROC_PER_NODE": 8}, **settings}
    assert keys_of(import_text(tmp_path, yaml.safe_dump(in_file), name="run.yaml")) == shell
    assert keys_of(import_text(tmp_path, json.dumps(in_file), name="run.json")) == shell
    (tmp_path / "beside.yaml").write_text(yaml.safe_dump(settings))
    assert keys_of(import_text(tmp_path, f"NPROC_PER_NODE=8 {command} beside.yaml\n")) == shell
    words = write_command(command, settings).split()
    pod = {"containers": [{"env": [{"name": "NPROC_PER_NODE", "value": "8"}], "command": words}]}
    manifest = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "spec": pod})
    assert keys_of(import_text(tmp_path, manifest, name="pod.yaml")) == shell
    torchrun = f"torchrun --nproc_per_node 8 swift/cli/{'_megatron/' if 'megatron' in command else ''}sft.py"
    assert keys_of(import_text(tmp_path, write_command(torchrun, settings))) == shell


def test_settings_of_releases_2_and_3_are_those_of_release_4(tmp_path: Path) -> None:
    second = {"model": "model_id_or_path", "tuner_type": "sft_type", "torch_dtype": "dtype"}
    second["per_device_train_batch_size"] = "batch_size"
    plain = {**SWIFT, "target_modules": "all-linear", "deepspeed": "zero3", "dtype": "bf16"}
    plain.pop("dtype")
    jobs = [
        keys_of(import_text(tmp_path, write_command("swift sft", settings, NPROC_PER_NODE=8)))
        for settings in (
            plain,
            {{"tuner_type": "train_type"}.get(name, name): value for name, value in plain.items()},
            {second.get(name, name): value for name, value in plain.items()},
        )
    ]
    assert jobs[0] == jobs[1] == jobs[2]
    short = {second.get(name, name): value for name, value in plain.items() if name != "max_length"}
    assert keys_of(import_text(tmp_path, write_command("swift sft", short, NPROC_PER_NODE=8)))["batch.sequence"] == 2048
    with pytest.raises(OpenQuestions, match="max_length"):
        without = {name: value for name, value in plain.items() if name != "max_length"}
        import_text(tmp_path, write_command("swift sft", without, NPROC_PER_NODE=8))


@pytest.mark.parametrize(
    ("command", "settings", "left_out", "key", "value"),
    [
        ("swift sft", SWIFT, "tuner_type", "train.mode", "lora"),
        ("swift sft", SWIFT, "lora_rank", "train.rank", 8),
        ("swift sft", SWIFT, "per_device_train_batch_size", "batch.micro", 1),
        ("swift sft", SWIFT, "torch_dtype", "precision.compute", "bf16"),
        ("swift sft", SWIFT, "deepspeed", "plan.data", "ddp"),
        ("swift sft", SWIFT, "", "plan.recompute", "full"),
        ("swift sft", {**SWIFT, "attn_impl": "flash_attn"}, "", "framework.set.attention_library", "flash-2"),
        ("swift sft", {**SWIFT, "sequence_parallel_size": 2}, "", "plan.sequence", "ulysses"),
        ("swift sft", {**SWIFT, "gradient_checkpointing": False}, "", "plan.recompute", "none"),
        ("swift sft", {**SWIFT, "torch_dtype": "float32"}, "", "precision.compute", "fp16"),
        ("swift sft", {**SWIFT, "per_device_train_batch_size": 1}, "gradient_accumulation_steps", "batch.global", 16),
        ("swift sft", {**SWIFT, "per_device_train_batch_size": 4}, "gradient_accumulation_steps", "batch.global", 32),
        ("megatron sft", MEGATRON, "tuner_type", "train.mode", "full"),
        ("megatron sft", MEGATRON, "global_batch_size", "batch.global", 16),
        ("megatron sft", MEGATRON, "micro_batch_size", "batch.micro", 1),
        ("megatron sft", {**MEGATRON, "use_distributed_optimizer": False}, "", "plan.data", "ddp"),
        ("megatron sft", MEGATRON, "", "plan.data", "zero-1"),
        ("megatron sft", MEGATRON, "", "precision.compute", "bf16"),
    ],
)
def test_what_a_file_leaves_out_is_the_default_of_the_program(
    tmp_path: Path, command: str, settings: dict[str, Any], left_out: str, key: str, value: Any
) -> None:
    settings = {name: stated for name, stated in settings.items() if name != left_out}
    keys = keys_of(import_text(tmp_path, write_command(command, settings, NPROC_PER_NODE=8)))
    assert keys[key] == value


def test_megatron_swift_recomputes_the_core_of_attention_unless_told_otherwise(tmp_path: Path) -> None:
    plain = {name: value for name, value in MEGATRON.items() if not name.startswith("recompute")}
    keys = keys_of(import_text(tmp_path, write_command("megatron sft", plain, NPROC_PER_NODE=8)))
    assert (keys["plan.recompute"], keys["plan.recompute.modules"]) == ("selective", ("core_attn",))
    off = {**plain, "recompute_granularity": "none"}
    assert (
        keys_of(import_text(tmp_path, write_command("megatron sft", off, NPROC_PER_NODE=8)))["plan.recompute"] == "none"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_name_of_deepspeed_is_the_file_behind_it(tmp_path: Path, name: str) -> None:
    named = import_text(tmp_path, write_command("swift sft", {**SWIFT, "deepspeed": name}, NPROC_PER_NODE=8))
    (tmp_path / "ds.json").write_text(json.dumps(nest(FILES[name])))
    beside = import_text(tmp_path, write_command("swift sft", {**SWIFT, "deepspeed": "ds.json"}, NPROC_PER_NODE=8))
    assert keys_of(named) == keys_of(beside)


def test_fsdp_by_name_is_the_file_behind_it_and_what_a_file_leaves_out_is_fsdp_2(tmp_path: Path) -> None:
    plain = {name: value for name, value in SWIFT.items() if name != "deepspeed"} | {"gradient_checkpointing": False}
    named = keys_of(import_text(tmp_path, write_command("swift sft", {**plain, "fsdp": "fsdp2"}, NPROC_PER_NODE=8)))
    assert (named["plan.data"], named["plan.data.reshard"], named["plan.recompute"]) == ("fsdp", True, "full")
    config = {"reshard_after_forward": True, "activation_checkpointing": True}
    (tmp_path / "own.json").write_text(json.dumps({"_note": "fsdp", "fsdp_config": config}))
    beside = import_text(tmp_path, write_command("swift sft", {**plain, "fsdp": "own.json"}, NPROC_PER_NODE=8))
    assert keys_of(beside) == named


def nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings of dotted names."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


@pytest.mark.parametrize(("visible", "processes"), [(1, None), (4, None), (4, 2), (4, 4), (8, 4), (2, 2)])
def test_a_process_with_several_gpus_is_refused(tmp_path: Path, visible: int, processes: int | None) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))}
    variables |= {"NPROC_PER_NODE": str(processes)} if processes else {}
    settings = {name: value for name, value in SWIFT.items() if name != "deepspeed"}
    text = write_command("swift sft", settings, **variables)  # type: ignore[arg-type]
    if visible // (processes or 1) > 1:
        with pytest.raises(PlanError, match="device_map"):
            import_text(tmp_path, text)
    else:
        assert load_job(import_text(tmp_path, text).job, base=Path()).cluster.gpus == visible


def test_adapters_of_a_model_with_experts_are_on_them_too(tmp_path: Path) -> None:
    settings = {**MEGATRON, "tuner_type": "lora", "expert_model_parallel_size": 8, "target_modules": "all-linear"}
    found = import_text(tmp_path, write_command("megatron sft", settings, NPROC_PER_NODE=8), "model=qwen3-30b-a3b")
    keys = keys_of(found)
    assert {"attn_qkv", "attn_proj", "expert_up", "expert_down"} <= {*keys["train.targets"]}
    assert keys["framework.set.adapters.of_each_expert"]


# ------------------------------------------------------------------------------------------------ xtuner

FIELDS = {
    **{"model.type": "SupervisedFinetune", "model.llm.pretrained_model_name_or_path": "m", "model.lora.r": 32},
    **{"train_dataloader.batch_size": 2, "train_dataloader.dataset.max_length": 4096, "sequence_parallel_size": 2},
    **{
        "optim_wrapper.type": "AmpOptimWrapper",
        "optim_wrapper.accumulative_counts": 8,
        "optim_wrapper.dtype": "float16",
    },
    "optim_wrapper.optimizer.type": "AdamW",
}


def write_configuration(fields: Mapping[str, Any]) -> str:
    """A configuration of mmengine with these fields."""
    lines = ["from xtuner.model import SupervisedFinetune"]
    for name, value in nest({name: value for name, value in fields.items() if value is not None}).items():
        lines.append(f"{name} = {write_value(value)}")
    return "\n".join(lines) + "\n"


def write_value(value: Any) -> str:
    if isinstance(value, dict):
        return "dict(" + ", ".join(f"{name}={write_value(inner)}" for name, inner in value.items()) + ")"
    return repr(value)


def test_a_configuration_behind_a_command_has_its_stage_and_one_alone_is_asked_for_it(tmp_path: Path) -> None:
    text = write_configuration(FIELDS)
    with pytest.raises(OpenQuestions, match="--deepspeed"):
        import_text(tmp_path, text, name="own.py")
    for stage in (2, 3):
        command = f"xtuner train own.py --deepspeed deepspeed_zero{stage}\n"
        behind = keys_of(import_text(tmp_path, f"NPROC_PER_NODE=8 {command}"))
        assert (behind["plan.data"], behind["precision.compute"]) == (f"zero-{stage}", "bf16")
        assert (behind["plan.cp"], behind["batch.micro"], behind["batch.global"]) == (2, 2, 2 * 8 * 8 // 2)
        assert behind["train.rank"] == 32
        answered = keys_of(import_text(tmp_path, text, f"plan.zero={stage}", name="own.py"))
        assert answered == behind


@pytest.mark.parametrize(
    "start",
    [
        *("NPROC_PER_NODE=4 NNODES=2 {}", "srun --ntasks=8 --ntasks-per-node=4 {} --launcher slurm"),
        *("srun --nodes=2 --ntasks-per-node=4 {} --launcher slurm", "#SBATCH --ntasks=8\nsrun {} --launcher slurm"),
    ],
)
def test_every_start_of_eight_processes_is_one_of_eight_gpus(tmp_path: Path, start: str) -> None:
    (tmp_path / "own.py").write_text(write_configuration(FIELDS))
    found = import_text(tmp_path, start.format("xtuner train own.py --deepspeed deepspeed_zero2") + "\n")
    assert load_job(found.job, base=Path()).cluster.gpus == 8


def test_variables_and_overrides_are_the_values_that_they_stand_for(tmp_path: Path) -> None:
    literal = keys_of(import_text(tmp_path, write_configuration(FIELDS), "plan.zero=2", name="a.py"))
    text = write_configuration({name: value for name, value in FIELDS.items() if name != "train_dataloader.batch_size"})
    text = text.replace(
        "train_dataloader = dict(", "batch_size = 1\nbatch_size *= 2\ntrain_dataloader = dict(batch_size=batch_size, "
    )
    assert keys_of(import_text(tmp_path, text, "plan.zero=2", name="b.py")) == literal
    changed = {**FIELDS, "train_dataloader.batch_size": 1}
    (tmp_path / "c.py").write_text(write_configuration(changed))
    command = "xtuner train c.py --deepspeed deepspeed_zero2 --cfg-options train_dataloader.batch_size=2\n"
    assert keys_of(import_text(tmp_path, f"NPROC_PER_NODE=8 {command}")) == literal


@pytest.mark.parametrize(
    "name", ["llama2_7b_qlora_alpaca_e3", "llama2_7b_full_wizardlm_e1", "llama3_8b_instruct_full_alpaca_e3"]
)
def test_a_configuration_by_name_is_a_file_with_its_fields(tmp_path: Path, name: str) -> None:
    recipe = load_recipes("xtuner").find(name)
    assert recipe is not None
    fields = {key: stated.value for key, stated in recipe.items()}
    (tmp_path / "own.py").write_text(write_configuration(fields))
    commands = [f"NPROC_PER_NODE=8 xtuner train {word} --deepspeed deepspeed_zero3\n" for word in (name, "own.py")]
    named, written = (keys_of(import_text(tmp_path, command)) for command in commands)
    assert named == written
    assert named["train.mode"] == ("qlora" if "qlora" in name else "full")


@pytest.mark.parametrize("name", XTUNER_FILES)
def test_names_of_deepspeed_say_stage_and_offloading(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(write_configuration(FIELDS))
    keys = keys_of(import_text(tmp_path, f"NPROC_PER_NODE=8 xtuner train own.py --deepspeed {name}\n"))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"overlap_comm": True, **XTUNER_FILES[name]}}))
    beside = keys_of(import_text(tmp_path, "NPROC_PER_NODE=8 xtuner train own.py --deepspeed ds.json\n"))
    assert keys == beside


TRAINER = """
import os
from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.train import TrainerConfig
size = int(os.environ.get("EP", os.getenv("OTHER", "1")))
trainer = TrainerConfig(
    model_cfg=get_model_config_from_hf(os.environ["PATH_OF_MODEL"]), optim_cfg=AdamWConfig(),
    fsdp_cfg=FSDPConfig(ep_size=size), dataloader_cfg=DataloaderConfig(pack_max_length=8192), global_batch_size=64)
"""


def test_a_trainer_of_release_1_takes_variables_that_are_given(tmp_path: Path) -> None:
    usual = keys_of(import_text(tmp_path, TRAINER, "model=qwen3-30b-a3b", name="own.py"))
    assert (usual["plan.data"], usual["plan.ep"], usual["plan.recompute"]) == ("fsdp", 1, "full")
    found = import_text(tmp_path, TRAINER, "model=qwen3-30b-a3b", name="own.py", environment={"EP": "8"})
    assert keys_of(found)["plan.ep"] == 8
    with pytest.raises(OpenQuestions, match="PATH_OF_MODEL"):
        import_file(read_launch_file(tmp_path / "own.py"))

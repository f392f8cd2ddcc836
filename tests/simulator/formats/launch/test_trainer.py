"""Programs on Hugging Face's Trainer: their defaults, the files that they name, and the four classes of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.simulator.formats.launch.convert import export_job, import_file
from meshcast.simulator.formats.launch.detect import detect_program
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import parse_launch_text, read_launch_file
from meshcast.simulator.formats.launch.programs.deepspeed import write_settings
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.loading.load import load_job

ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
        **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "stage3_param_persistence_threshold": "auto",
    },
}
FSDP: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
FSDP |= {"num_machines": 1, "num_processes": 8, "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def import_settings(
    tmp_path: Path, settings: dict[str, Any] | str, *changes: str, name: str = "run.yaml", **beside: dict[str, Any]
) -> ImportedJob:
    """The job of a file of settings. beside: JSON files in its folder, by the first part of their names."""
    for file, data in beside.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(data))
    path = tmp_path / name
    if isinstance(settings, str):
        path.write_text(settings)
    else:
        path.write_text(json.dumps(settings) if name.endswith(".json") else yaml.safe_dump(settings))
    launcher = () if "plan.zero=3" in changes or not is_recipe(settings) else ("plan.zero=0",)
    return import_file(read_launch_file(path), ("model=llama3-8b", *launcher, *changes))


def is_recipe(settings: dict[str, Any] | str) -> bool:
    """Whether a file leaves it to the launcher what is sharded."""
    programs = {"finetuning_type", "template", "base_model", "deepspeed", "fsdp", "distributed_type"}
    return not isinstance(settings, str) and not programs & settings.keys()


def keys_of(found: ImportedJob) -> Keys:
    return flatten_job(load_job(found.job, base=Path()))


TRAINER = {"model_name_or_path": "m", "per_device_train_batch_size": 2, "bf16": True, "output_dir": "out"}
TRAINER |= {"num_train_epochs": 3, "save_steps": 100, "logging_steps": 5, "model_max_length": 4096}
FACTORY = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "template": "x", "bf16": True}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "d"}], "micro_batch_size": 2, "sequence_len": 2048}
TRL = {"model_name_or_path": "m", "dataset_num_proc": 4, "packing_strategy": "bfd"}


@pytest.mark.parametrize(
    ("settings", "left_out", "key", "value"),
    [
        (TRAINER, "per_device_train_batch_size", "batch.micro", 8),
        (TRAINER, "bf16", "precision.compute", "fp32"),
        (TRAINER, "", "plan.recompute", "none"),
        (TRAINER, "", "plan.data", "ddp"),
        (TRAINER, "", "precision.gradients", "fp32"),
        (TRAINER, "", "framework.set.attention_library", "sdpa"),
        (FACTORY, "", "plan.recompute", "full"),
        (FACTORY, "", "batch.sequence", 2048),
        (FACTORY, "", "batch.micro", 8),
        (FACTORY, "bf16", "precision.compute", "fp32"),
        (FACTORY, "finetuning_type", "train.mode", "lora"),
        (FACTORY, "finetuning_type", "train.rank", 8),
        (FACTORY, "", "framework.set.recompute_early_stop", False),
        (AXOLOTL, "", "precision.compute", "bf16"),
        (AXOLOTL, "", "precision.main_weights", "bf16"),
        (AXOLOTL, "", "plan.recompute", "none"),
        (AXOLOTL | {"gradient_checkpointing": True}, "", "framework.set.recompute_early_stop", False),
        (AXOLOTL | {"gradient_checkpointing": True, "rl": "dpo"}, "", "framework.set.recompute_early_stop", True),
        (AXOLOTL, "micro_batch_size", "batch.micro", 1),
        (AXOLOTL, "sequence_len", "batch.sequence", 512),
        (TRL, "", "batch.sequence", 1024),
        (TRL, "", "precision.compute", "bf16"),
        (TRL, "", "plan.recompute", "full"),
        (TRL, "", "framework.set.recompute_early_stop", True),
        (TRL, "", "framework.set.loss.chunk_tokens", 256),
    ],
)
def test_defaults_of_programs(tmp_path: Path, settings: dict[str, Any], left_out: str, key: str, value: Any) -> None:
    stated = {name: entry for name, entry in settings.items() if name != left_out}
    assert keys_of(import_settings(tmp_path, stated))[key] == value


@pytest.mark.parametrize(
    ("text", "suffix", "program"),
    [
        (yaml.safe_dump(TRAINER), ".yaml", "trainer"),
        (json.dumps(TRAINER), ".json", "trainer"),
        (yaml.safe_dump(FACTORY), ".yaml", "llamafactory"),
        (yaml.safe_dump(AXOLOTL), ".yaml", "axolotl"),
        (yaml.safe_dump(TRL), ".yaml", "trl"),
        (yaml.safe_dump(FSDP), ".yaml", "accelerate"),
        (json.dumps(ZERO_3), ".json", "deepspeed"),
    ],
)
def test_programs_are_known_by_their_settings(text: str, suffix: str, program: str) -> None:
    assert detect_program(parse_launch_text(text, f"run{suffix}", suffix)).name == program


# --------------------------------------------------------------------------------------- companion files


@pytest.mark.parametrize("settings", [TRAINER, FACTORY, AXOLOTL | {"bf16": True}, TRL], ids=str)
def test_what_deepspeed_leaves_to_the_trainer_is_what_it_would_state(tmp_path: Path, settings: dict[str, Any]) -> None:
    stated = json.loads(json.dumps(ZERO_3))
    hidden = 4096
    sizes = {"reduce_bucket_size": hidden**2, "stage3_prefetch_bucket_size": int(0.9 * hidden**2)}
    stated["zero_optimization"] |= {**sizes, "stage3_param_persistence_threshold": 10 * hidden}
    named = {**settings, "deepspeed": "zero.json", "gradient_accumulation_steps": 4}
    auto = keys_of(import_settings(tmp_path, named, zero=ZERO_3))
    micro = auto["batch.micro"]
    stated |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    stated |= {"fp16": {"enabled": False}}
    assert auto == keys_of(import_settings(tmp_path, named, zero=stated))
    assert auto["plan.data"] == "zero-3" and auto["plan.data.persistence"] == 10 * hidden
    assert auto["batch.global"] == 8 * 4 * micro


def test_how_gradients_are_reduced_is_taken_from_the_configuration(tmp_path: Path) -> None:
    sizes = {"reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8, "contiguous_gradients": False}
    zero: dict[str, Any] = {"zero_optimization": {"stage": 2, "overlap_comm": True, **sizes}}
    zero |= {"seq_parallel_communication_data_type": "bf16"}
    keys = keys_of(import_settings(tmp_path, TRAINER | {"deepspeed": "zero.json"}, zero=zero))
    bucket = {"elements": 2e8, "buffers": 0, "sequence_format": "bf16"}
    assert {name: keys[f"framework.set.bucket.{name}"] for name in bucket} == bucket
    assert keys["framework.set.overlap.dp"] is True
    written = write_settings(keys | {"batch.global": 8, "batch.micro": 1})
    assert written["zero_optimization.contiguous_gradients"] is False
    assert written["seq_parallel_communication_data_type"] == "bf16"


@pytest.mark.parametrize(
    ("changes", "stage", "loads"),
    [
        ({}, 2, "fp32"),
        ({}, 3, "shards"),
        ({"pure_bf16": True}, 2, "shards"),
        ({"finetuning_type": "lora"}, 2, "shards"),
    ],
)
def test_llamafactory_casts_whole_weights_to_fp32(
    tmp_path: Path, changes: dict[str, Any], stage: int, loads: str
) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    keys = keys_of(import_settings(tmp_path, FACTORY | {"deepspeed": "zero.json"} | changes, zero=zero))
    assert keys.get("framework.set.memory.loads", "shards") == loads


def test_a_companion_that_is_not_there_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestions, match=r"run\.yaml:\d+ deepspeed: it names a file, zero\.json"):
        import_settings(tmp_path, TRAINER | {"deepspeed": "zero.json"})
    answered = import_settings(tmp_path, TRAINER | {"deepspeed": "zero.json"}, "plan.zero=3")
    assert keys_of(answered)["plan.data"] == "zero-3"


def test_a_companion_that_contradicts_the_arguments_is_asked_about(tmp_path: Path) -> None:
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    with pytest.raises(OpenQuestions, match="it differs from per_device_train_batch_size, which is 2"):
        import_settings(tmp_path, TRAINER | {"deepspeed": "zero.json"}, zero=zero)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 2}, {"plan.data": "zero-2", "framework.set.overlap.dp": False}),
        ({"stage": 3}, {"plan.data": "zero-3", "framework.set.overlap.dp": True}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"plan.data": "zero-offload"}),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, {"plan.data": "zero-1", "plan.offload": ("optimizer",)}),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}},
            {"plan.data": "zero-infinity", "plan.data.parameters": "nvme", "plan.data.optimizer": "cpu"},
        ),
        ({"stage": 3, "zero_hpz_partition_size": 8}, {"plan.data": "zero-plus-plus", "plan.data.qwz": False}),
        ({"stage": 3, "mics_shard_size": 4}, {"plan.data": "mics", "plan.replicate": 2}),
    ],
)
def test_stages_of_zero(tmp_path: Path, zero: dict[str, Any], expected: Keys) -> None:
    named = TRAINER | {"deepspeed": "zero.json"}
    keys = keys_of(import_settings(tmp_path, named, zero={"zero_optimization": zero}))
    assert {key: keys[key] for key in expected} == expected and keys["framework.name"] == "deepspeed"


# -------------------------------------------------------------------------------------------------- FSDP


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"plan.data": "fsdp", "plan.data.reshard": True, "plan.data.backward_prefetch": False}),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {"plan.data.backward_prefetch": True}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"plan.data.reshard": False}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"plan.data": "ddp"}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"plan.data.reshard": False}),
        ({"fsdp_version": 2}, {"plan.data.reshard": True, "framework.set.gathers_apart": True}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, {"plan.data.reshard": False}),
        ({"fsdp_offload_params": True}, {"plan.data": "fsdp", "plan.data.offload": True}),
        (
            {"fsdp_activation_checkpointing": True},
            {
                **{"plan.recompute": "full", "framework.set.recompute_early_stop": True},
                "framework.set.reentrant_units": False,
            },
        ),
    ],
)
def test_fsdp_of_accelerate(tmp_path: Path, changes: dict[str, Any], expected: Keys) -> None:
    section = FSDP["fsdp_config"] | changes  # type: ignore[operator]
    keys = keys_of(import_settings(tmp_path, {**FSDP, **TRAINER, "fsdp_config": section}))
    assert {key: keys[key] for key in expected} == expected


def test_one_unit_of_fsdp_has_a_second_forecast(tmp_path: Path) -> None:
    found = import_settings(tmp_path, TRAINER | {"fsdp": "full_shard"}).findings
    (entry,) = [entry for entry in found.approximated if entry.shown == "fsdp"]
    assert entry.other == {"plan.data.reshard": False}
    wrapped = import_settings(tmp_path, TRAINER | {"fsdp": "full_shard auto_wrap"}).findings
    assert not [entry for entry in wrapped.approximated if entry.shown == "fsdp"]


def test_degrees_of_accelerate(tmp_path: Path) -> None:
    degrees = {f"parallelism_config_{name}_size": 2 for name in ("dp_replicate", "dp_shard", "tp")}
    settings = {**FSDP, **TRAINER, "fsdp_config": {"fsdp_version": 2}, "parallelism_config": degrees}
    keys = keys_of(import_settings(tmp_path, settings))
    expected = {"plan.tp": 2, "plan.dp": 4, "plan.replicate": 2, "plan.data": "fsdp", "batch.global": 8}
    assert {key: keys[key] for key in expected} == expected
    degrees = {"parallelism_config_cp_size": 8, "parallelism_config_dp_shard_size": 1}
    keys = keys_of(import_settings(tmp_path, settings | {"parallelism_config": degrees}))
    assert (keys["plan.cp"], keys["plan.sequence"], keys["batch.global"]) == (8, "all-gather", 2)


def test_sizes_of_axolotl(tmp_path: Path) -> None:
    """FSDP over 2 x TP 2 x CP 2, of its documentation's kind."""
    sizes = {"dp_shard_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 2, "sample_packing": True}
    fsdp = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    keys = keys_of(import_settings(tmp_path, AXOLOTL | sizes | fsdp | {"gradient_checkpointing": True}))
    expected = {"plan.tp": 2, "plan.cp": 2, "plan.dp": 2, "plan.data": "fsdp"}
    expected |= {"plan.sequence": "all-gather", "batch.global": 4, "plan.recompute": "full"}
    assert {key: keys[key] for key in expected} == expected
    copies = keys_of(import_settings(tmp_path, AXOLOTL | sizes | fsdp, "cluster=dgx-h100:2"))
    assert (copies["plan.dp"], copies["plan.replicate"]) == (4, 2)


# ----------------------------------------------------------------------------------------- what is trained


def test_a_full_training_is_no_adapter(tmp_path: Path) -> None:
    full = import_settings(tmp_path, FACTORY)
    assert full.job["train"] == {"mode": "full"} and not any(
        entry.shown == "finetuning_type" for entry in full.findings.approximated
    )
    lora = keys_of(import_settings(tmp_path, FACTORY | {"finetuning_type": "lora", "lora_rank": 64}))
    assert (lora["train.mode"], lora["train.rank"]) == ("lora", 64)
    frozen = import_settings(tmp_path, FACTORY | {"finetuning_type": "freeze"}).findings.approximated
    assert [entry.other for entry in frozen if entry.shown == "finetuning_type"] == [{"train.mode": "lora"}]


def test_adapters_compute_in_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    plain = {name: value for name, value in FACTORY.items() if name not in ("bf16", "finetuning_type")}
    assert keys_of(import_settings(tmp_path, plain))["precision.compute"] == "bf16"


@pytest.mark.parametrize(
    ("settings", "mode", "stored"),
    [
        ({"quantization_bit": 4}, "qlora", "nf4-double"),
        ({"quantization_bit": 4, "double_quantization": False}, "qlora", "nf4"),
        ({"quantization_bit": 8}, "lora", "int8"),
        ({}, "lora", None),
    ],
)
def test_frozen_weights_have_the_bits_that_a_file_says(
    tmp_path: Path, settings: dict[str, Any], mode: str, stored: str | None
) -> None:
    keys = keys_of(import_settings(tmp_path, FACTORY | {"finetuning_type": "lora", "lora_dropout": 0.1} | settings))
    assert (keys["train.mode"], keys.get("train.frozen_weights"), keys["train.dropout"]) == (mode, stored, True)


@pytest.mark.parametrize(
    ("word", "optimizer", "errs"),
    [
        ("adamw_torch_fused", None, ""),
        ("adamw_bnb_8bit", "adam-8bit", ""),
        ("paged_adamw_8bit", "adam-8bit", "pages"),
        ("adafactor", "adafactor", ""),
        ("lion_32bit", "lion", ""),
        ("muon", "lion", "orthogonalise"),
    ],
)
def test_optimizers_have_their_states(tmp_path: Path, word: str, optimizer: str | None, errs: str) -> None:
    found = import_settings(tmp_path, TRAINER | {"optim": word})
    entries = [entry.errs for entry in found.findings.approximated if entry.shown == "optim"]
    assert keys_of(found).get("optimizer") == optimizer
    assert not entries if not errs else errs in entries[0]


def test_an_unknown_optimizer_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestions, match="which states sophia has"):
        import_settings(tmp_path, TRAINER | {"optim": "sophia"})


def test_a_pair_of_texts_is_two_sequences(tmp_path: Path) -> None:
    single, pairs = (keys_of(import_settings(tmp_path, FACTORY | {"stage": stage})) for stage in ("sft", "dpo"))
    assert pairs["batch.micro"] == 2 * single["batch.micro"] and pairs["batch.global"] == 2 * single["batch.global"]


LORA = {"finetuning_type": "lora"}


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (FACTORY | {"stage": "dpo"}, "model"),
        (FACTORY | LORA | {"stage": "dpo"}, "adapters-off"),
        (FACTORY | LORA | {"stage": "dpo", "ref_model": "m"}, "model"),
        (FACTORY | LORA | {"stage": "dpo", "pref_loss": "orpo"}, None),
        (FACTORY | {"stage": "kto"}, "model"),
        (FACTORY | {"stage": "rm"}, None),
        (AXOLOTL | {"rl": "dpo"}, "model"),
        (AXOLOTL | {"rl": "dpo", "precompute_ref_log_probs": True}, None),
        (AXOLOTL | {"rl": "ipo", "adapter": "lora", "lora_target_linear": True}, "adapters-off"),
        (AXOLOTL | {"rl": "dpo", "adapter": "lora", "lora_target_linear": True, "rl_adapter_ref_model": True}, "model"),
        (AXOLOTL | {"rl": "orpo"}, None),
        (TRL | {"beta": 0.1, "rpo_alpha": 1.0}, "model"),
        (TRL | {"beta": 0.1, "rpo_alpha": 1.0, "use_peft": True}, "adapters-off"),
        (TRL | {"beta": 0.1, "precompute_ref_log_probs": True}, None),
    ],
)
def test_a_training_on_preferences_has_a_reference(
    tmp_path: Path, settings: dict[str, Any], reference: str | None
) -> None:
    found = import_settings(tmp_path, settings)
    assert keys_of(found).get("train.reference") == reference
    assert not any("reference model is left out" in entry.why for entry in found.findings.approximated)
    if reference is not None and found.form in ("axolotl", "llamafactory"):
        job = load_job(found.job, base=Path())
        unsaid = export_job(job, found.form, lambda data, folder: load_job(data, base=folder), lambda job: None).unsaid
        assert not {key for key in unsaid if key.startswith(("train.", "batch."))}


# ------------------------------------------------------------------------------------------- the four classes


def test_every_setting_is_in_one_class(tmp_path: Path) -> None:
    settings = TRAINER | {"deepspeed": "zero.json", "warmup_ratio": 0.1, "optim": "adafactor", "seed": 1, "nonsense": 2}
    found = import_settings(tmp_path, settings, zero=ZERO_3).findings
    classes = [{entry.shown for entry in part} for part in (found.taken, found.ignored, found.approximated)]
    assert set(settings) <= set().union(*classes)
    assert not classes[0] & classes[1]


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"model_max_length": None}, "no setting says it"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree"),
        ({"use_cpu": True}, "use_cpu"),
        ({"lora_r": 8}, "lora_r"),
    ],
)
def test_what_decides_and_is_not_understood_is_asked(tmp_path: Path, change: dict[str, Any], setting: str) -> None:
    with pytest.raises(OpenQuestions, match=setting):
        import_settings(tmp_path, TRAINER | change)


@pytest.mark.parametrize("rows", [TRAINER | {"gradient_checkpointing": True, "fsdp": "full_shard auto_wrap"}, FACTORY])
def test_a_shell_a_yaml_and_a_json_file_are_the_same_job(tmp_path: Path, rows: dict[str, Any]) -> None:
    flags = " ".join(f"--{name} {json.dumps(value)}" for name, value in rows.items())
    shell = import_settings(tmp_path, f"torchrun --nproc_per_node 8 src/train.py {flags}\n", name="run.sh")
    files = [import_settings(tmp_path, rows, name=name) for name in ("run.yaml", "run.json")]
    assert keys_of(shell) == keys_of(files[0]) == keys_of(files[1])


@pytest.mark.parametrize(
    ("settings", "micro"),
    [
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 2}, 2),
        ({"evaluation_strategy": "epoch"}, 8),
        ({"eval_strategy": "no", "per_device_eval_batch_size": 2}, None),
        ({"per_device_eval_batch_size": 2}, None),
    ],
)
def test_evaluations_run_as_many_sequences_as_the_file_says(
    tmp_path: Path, settings: dict[str, Any], micro: int | None
) -> None:
    job = import_settings(tmp_path, TRAINER | settings).job
    assert job.get("run", {}).get("evaluation") == (micro and {"micro": micro})


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ({"stage3_gather_16bit_weights_on_model_save": True}, "modules"),
        ({"gather_16bit_weights_on_model_save": False}, "shards"),
        ({"stage3_gather_fp16_weights_on_model_save": True}, "modules"),
        ({"stage": 2, "stage3_gather_16bit_weights_on_model_save": True}, "shards"),
        ({}, "shards"),
    ],
)
def test_stage_3_saves_as_its_file_says(tmp_path: Path, settings: dict[str, Any], saves: str) -> None:
    file = ZERO_3 | {"zero_optimization": {**ZERO_3["zero_optimization"], **settings}}  # type: ignore[dict-item]
    job = import_settings(tmp_path, TRAINER | {"deepspeed": "ds.json"}, ds=file).job
    assert load_job(job).framework.memory.saves == saves


@pytest.mark.parametrize(("word", "saves"), [("SHARDED_STATE_DICT", "shards"), ("FULL_STATE_DICT", "units")])
def test_fsdp_saves_as_its_file_says(tmp_path: Path, word: str, saves: str) -> None:
    settings = TRAINER | {"fsdp": "full_shard auto_wrap", "fsdp_config": {"state_dict_type": word}}
    assert import_settings(tmp_path, settings).job["framework"]["set"]["memory"]["saves"] == saves
    (tmp_path / "other").mkdir()
    unknown = import_settings(tmp_path / "other", settings | {"fsdp_config": {"state_dict_type": f"{word}S"}})
    assert any("no state dict of FSDP" in entry.why for entry in unknown.findings.approximated)


# ------------------------------------------------------------------------------------------------ commands

ARGUMENTS = (
    "--model_name_or_path m --per_device_train_batch_size 2 --bf16 True --model_max_length 4096 --output_dir out"
)


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("torchrun --nproc_per_node 4 --nnodes 2 train.py", 8),
        ("torchrun --nproc_per_node 4 --nnodes 1:4 train.py", 16),
        ("deepspeed --num_gpus 4 train.py", 4),
        ("deepspeed --include localhost:0,1,5 train.py", 3),
        ("accelerate launch --multi_gpu --num_processes 6 train.py", 6),
        ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train.py", 2),
        ("python train.py", 1),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", 1),
    ],
)
def test_gpus_are_those_that_processes_start_on(tmp_path: Path, command: str, gpus: int) -> None:
    keys = keys_of(import_settings(tmp_path, f"{command} {ARGUMENTS}\n", name="run.sh"))
    assert keys["cluster.gpus"] == gpus and keys["batch.global"] == 2 * gpus


@pytest.mark.parametrize(
    ("flags", "section"),
    [
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP", FSDP),
        ("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu", {"distributed_type": "DEEPSPEED"}),
        ("--use_deepspeed", {"distributed_type": "DEEPSPEED"}),
        ("--multi_gpu", {"distributed_type": "MULTI_GPU"}),
    ],
)
def test_flags_of_accelerate_are_its_file(tmp_path: Path, flags: str, section: dict[str, Any]) -> None:
    wrap = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    stages = {"zero_stage": 3, "offload_optimizer_device": "cpu"} if "zero_stage" in flags else {}
    file = {**section, "mixed_precision": "bf16", "num_processes": 8, "compute_environment": "LOCAL_MACHINE"}
    file |= {"fsdp_config": wrap} if section is FSDP else {}
    file |= {"deepspeed_config": stages} if stages else {}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(file))
    plain = f"train.py {ARGUMENTS}"
    command = f"accelerate launch {flags} --mixed_precision bf16 --num_processes 8 {plain}"
    by_flags = keys_of(import_settings(tmp_path, command, name="run.sh"))
    named = f"accelerate launch --config_file accelerate.yaml {plain}"
    assert by_flags == keys_of(import_settings(tmp_path, named, name="run.sh"))
    data = {"--use_fsdp": "fsdp", "--use_deepspeed": "zero-infinity" if stages else "zero-2", "--multi_gpu": "ddp"}
    assert by_flags["plan.data"] == data[flags.split()[0]]


def test_accelerate_without_a_file_has_that_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestions, match=r"which is not here.*--set plan\.zero=0"):
        import_settings(tmp_path, f"accelerate launch --num_processes 8 train.py {ARGUMENTS}", name="run.sh")


@pytest.mark.parametrize(
    ("command", "settings", "program"),
    [
        ("llamafactory-cli train run.yaml", FACTORY, "llamafactory"),
        ("torchrun --nproc_per_node 8 src/train.py run.yaml", FACTORY, "llamafactory"),
        ("axolotl train run.yaml", AXOLOTL, "axolotl"),
        ("accelerate launch -m axolotl.cli.train run.yaml", AXOLOTL, "axolotl"),
        ("accelerate launch --num_processes 8 --multi_gpu scripts/run_sft.py run.yaml", TRL, "trl"),
        ("trl sft --config run.yaml", TRL, "trl"),
    ],
)
def test_a_command_is_the_file_that_it_names(
    tmp_path: Path, command: str, settings: dict[str, Any], program: str
) -> None:
    alone = import_settings(tmp_path, settings)
    started = import_settings(tmp_path, f"{command}\n", name="run.sh")
    assert started.form == alone.form == program
    assert keys_of(started) == keys_of(alone)


def test_a_value_behind_the_file_counts_more(tmp_path: Path) -> None:
    import_settings(tmp_path, FACTORY)
    found = import_settings(tmp_path, "llamafactory-cli train run.yaml cutoff_len=512\n", name="run.sh")
    assert keys_of(found)["batch.sequence"] == 512


def test_a_file_that_a_script_writes_is_followed(tmp_path: Path) -> None:
    text = f"cat > zero.json <<EOF\n{json.dumps(ZERO_3)}\nEOF\ndeepspeed train.py {ARGUMENTS} --deepspeed zero.json\n"
    assert keys_of(import_settings(tmp_path, text, name="run.sh"))["plan.data"] == "zero-3"


def test_flags_of_deepspeed_chat(tmp_path: Path) -> None:
    command = "deepspeed main.py --model_name_or_path m --deepspeed --zero_stage 3 --offload --lora_dim 64"
    command += " --per_device_train_batch_size 4"
    keys = keys_of(import_settings(tmp_path, command, name="run.sh"))
    expected = {"plan.data": "zero-infinity", "precision.compute": "fp16", "batch.micro": 4, "batch.sequence": 512}
    expected |= {"train.rank": 64}
    assert {key: keys[key] for key in expected} == expected


def test_megatron_under_llamafactory(tmp_path: Path) -> None:
    degrees = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    settings = FACTORY | degrees | {"recompute_granularity": "full", "recompute_method": "uniform"}
    keys = keys_of(import_settings(tmp_path, settings | {"recompute_num_layers": 1}))
    expected = {"framework.name": "megatron-core", "plan.tp": 2, "plan.pp": 2, "plan.data": "zero-1"}
    assert {key: keys[key] for key in expected} == expected
    with pytest.raises(OpenQuestions, match="does not count for Megatron-Core"):
        import_settings(tmp_path, FACTORY | degrees)


# ------------------------------------------------------------------------------------- what users write


@pytest.mark.parametrize(
    ("short", "full"),
    [("--max_seq 512", "--max_seq_length 512"), ("--per_device_train 3", "--per_device_train_batch_size 3")],
)
def test_an_abbreviation_of_a_command_is_the_argument(tmp_path: Path, short: str, full: str) -> None:
    start = "torchrun --nproc_per_node 2 train.py --model_name_or_path m --bf16 --save_total_limit 2"
    rest = "--gradient_accumulation_steps 2" + (" --max_seq_length 64" if "per" in short else "")
    jobs = [import_settings(tmp_path, f"{start} {rest} {flags}\n", name="run.sh") for flags in (short, full)]
    assert keys_of(jobs[0]) == keys_of(jobs[1])


@pytest.mark.parametrize(
    ("entry", "flags", "micro"),
    [("train.py", "", 2), ("train.py", "--beta 0.1", 4), ("train_dpo.py", "", 4), ("reward_modeling.py", "", 4)],
)
def test_a_pair_of_texts_is_two_sequences_and_named(tmp_path: Path, entry: str, flags: str, micro: int) -> None:
    command = f"torchrun --nproc_per_node 2 {entry} {ARGUMENTS} --max_prompt_length null {flags}\n"
    found = import_settings(tmp_path, command.replace(" --max_prompt_length null", ""), name="run.sh")
    assert keys_of(found)["batch.micro"] == micro
    named = [entry for entry in found.findings.approximated if "pair of texts" in entry.why]
    assert bool(named) == (micro == 4)


def test_fields_of_deepspeed_count_as_the_names_of_its_settings(tmp_path: Path) -> None:
    zero = ZERO_3["zero_optimization"] | {"max_live_parameters": 5e8, "param_persistence_threshold": 7}  # type: ignore[operator]
    found = import_settings(tmp_path, TRAINER | {"deepspeed": "ds.json"}, ds=ZERO_3 | {"zero_optimization": zero})
    assert keys_of(found)["plan.data.max_live"] == 5e8


@pytest.mark.parametrize(("settings", "recompute"), [({}, "full"), ({"evaluation_strategy": "no"}, "none")])
def test_defaults_of_trl_are_those_of_its_release(tmp_path: Path, settings: dict[str, Any], recompute: str) -> None:
    assert keys_of(import_settings(tmp_path, TRL | {"bf16": True} | settings))["plan.recompute"] == recompute


def test_an_unknown_release_of_trl_has_a_second_forecast(tmp_path: Path) -> None:
    command = f"accelerate launch --num_processes 2 --multi_gpu sft.py {ARGUMENTS} --dataset_name d --max_length 64\n"
    found = import_settings(tmp_path, command.replace("--model_max_length 4096 ", ""), name="run.sh")
    (entry,) = [entry for entry in found.findings.approximated if entry.shown == "gradient_checkpointing"]
    assert (entry.other, "plan.recompute" in found.assumed) == ({"plan.recompute": "none"}, True)


def test_a_launcher_of_their_own_starts_its_nodes(tmp_path: Path) -> None:
    start = f"python own.py --num_nodes 4 -- accelerate launch --multi_gpu --num_processes 8 train.py {ARGUMENTS}\n"
    assert keys_of(import_settings(tmp_path, start, name="run.sh"))["cluster.gpus"] == 32


def test_a_model_that_starts_from_nothing_has_the_sizes_of_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    sizes = "--config_overrides n_embd=256,n_layer=3,n_head=8,gradient_checkpointing=true"
    path.write_text(f"python run_clm.py --model_type gpt2 {sizes} --per_device_train_batch_size 1 --fp16\n")
    keys = keys_of(import_file(read_launch_file(path)))
    assert [keys[f"model.{name}"] for name in ("hidden", "layers", "heads", "ffn")] == [256, 3, 8, 1024]
    assert keys["plan.recompute"] == "full"


def test_a_file_of_named_configurations_is_asked_about(tmp_path: Path) -> None:
    part = {"per_device_train_batch_size": 2, "save_steps": 5}
    with pytest.raises(OpenQuestions, match="first, second"):
        import_settings(tmp_path, {"first": part, "second": part})


def test_a_script_of_another_repository_has_unknown_defaults(tmp_path: Path) -> None:
    flags = "--stage sft --finetuning_type full --model_name_or_path m --bf16"
    with pytest.raises(OpenQuestions) as asked:
        import_settings(tmp_path, f"torchrun --nproc_per_node 2 own/train.py {flags}\n", name="run.sh")
    answers = [answer for question in asked.value.questions for answer in question.answers]
    assert answers == ["plan.recompute=full", "batch.sequence=2048"]

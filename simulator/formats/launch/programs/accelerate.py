"""Hugging Face: YAML files of Accelerate (FSDP, DeepSpeed, DDP), and arguments of the Trainer as TRL, Axolotl and
LLaMA-Factory state them.

Source: huggingface/accelerate @16cb6eb8, src/accelerate/utils/dataclasses.py and commands/config; and
huggingface/transformers, src/transformers/training_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.deepspeed import flatten_settings
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import SettingRow, Stated, is_null, read_count, read_number, read_switch
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts
from meshcast.simulator.models.load import ALIASES, presets

ROWS = (
    SettingRow("per_device_train_batch_size", "batch.micro"),
    SettingRow("micro_batch_size", "batch.micro"),
    SettingRow("gradient_accumulation_steps", "batch.accumulated"),
    SettingRow("max_seq_length", "batch.sequence"),
    SettingRow("max_length", "batch.sequence"),
    SettingRow("cutoff_len", "batch.sequence"),
    SettingRow("sequence_len", "batch.sequence"),
    SettingRow("max_steps", "run.steps"),
    SettingRow("torch_compile", "framework.set.compile", "switch", {True: True, False: False}),
)

STRATEGIES = {
    **{"full_shard": ("fsdp", True), "shard_grad_op": ("fsdp", False), "no_shard": ("ddp", None)},
    **{"hybrid_shard": ("fsdp", True), "hybrid_shard_zero2": ("fsdp", False)},
    **{"1": ("fsdp", True), "2": ("fsdp", False), "3": ("ddp", None), "4": ("fsdp", True), "5": ("fsdp", False)},
}
"""Data scheme, and whether weights are resharded behind the forward pass, by the strategy of FSDP 1."""

WITHOUT_INFLUENCE = (
    r"compute_environment|debug|downcast_bf16|machine_rank|main_.*|rdzv.*|same_network|tpu_.*|use_cpu|enable_cpu_affinity"
    r"|fsdp_config\.(fsdp_)?(auto_wrap.*|cpu_ram.*|ignored.*|state_dict.*|sync_module.*|transformer_layer.*|use_orig.*|min_num.*|version|xla.*)"
    r"|deepspeed_config\.(zero3_init.*|zero3_save.*|deepspeed_multinode.*|deepspeed_hostfile|offload_\w+_nvme_path|gradient_clipping)"
    r"|learning_rate|lr_.*|warmup.*|weight_decay|adam_.*|max_grad_norm|output_dir|overwrite.*|logging.*|log_.*|save_.*|eval.*|do_.*|seed|report_to.*"
    r"|run_name|push_to_hub.*|hub_.*|dataset.*|dataloader.*|num_train_epochs|num_epochs|remove_unused.*|torch_dtype|tokenizer.*|trust_remote.*|model_type"
    r"|wandb.*|val_.*|special_tokens.*|datasets.*|chat_template.*|strict|train_on.*|group_by.*|disable_tqdm|preprocessing.*|template|stage"
    r"|plot_.*|ddp_.*|resume.*|dataset_text.*|gradient_checkpointing_kwargs.*|fsdp_transformer_layer.*"
)

REASONS = {
    r"megatron.*": "import the arguments of Megatron-LM themselves: meshcast import megatron",
    r"deepspeed": "import that file itself: meshcast import deepspeed",
    r"packing|sample_packing": "sequences are whole: state batch.documents",
    r"dynamo_config\..*": "a compiler has its defaults",
    r"use_peft|lora_.*|adapter|finetuning_type|load_in_.*|use_bnb.*": "adapters: state train.mode in the job",
    r"deepspeed_config\.deepspeed_config_file": "import that file itself: meshcast import deepspeed",
    r"attn_implementation|flash_attention|sdp_attention|flash_attn": "the profile has FlashAttention 2",
    r"use_liger_kernel|plugins|liger_.*": "fused kernels of Liger are not those of the profile",
    r"fsdp_config\.(fsdp_)?forward_prefetch": "the next unit is gathered ahead in either case",
}


VERDICTS: Verdicts = {
    **{pattern: Approximation(why) for pattern, why in REASONS.items()},
    WITHOUT_INFLUENCE: NoInfluence("it changes neither time nor memory"),
}


def read(file: LaunchFile) -> dict[str, Stated]:
    """The settings of a YAML file by their dotted names."""
    if not isinstance(file.data, Mapping):
        raise PlanError(file.where, "such a file is a mapping of keys to values", "Start with distributed_type: FSDP")
    return flatten_settings(file.data, file.text, file.where)


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows(ROWS)
    kind = reading.take_word("distributed_type")
    reading.set_key("framework.name", "deepspeed" if kind == "deepspeed" else "hf-trainer", "distributed_type")
    _read_model(reading)
    _read_training(reading)
    _read_precision(reading)
    if kind == "deepspeed":
        _read_deepspeed(reading)
    elif kind == "fsdp" or any(name.startswith("fsdp") for name in reading.stated):
        _read_fsdp(reading)
    else:
        reading.set_key("plan.data", "ddp", "distributed_type")
    checkpointing = "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing"
    if reading.take_switch("gradient_checkpointing") or reading.take_switch(*checkpointing):
        reading.set_key("plan.recompute", "full", "gradient_checkpointing", *checkpointing)
    _read_degrees(reading)


def _read_training(reading: Reading) -> None:
    """Reads the arguments of the Trainer, and the number of processes."""
    if (optimizer := reading.take_word("optim", "optimizer")) and (
        not optimizer.startswith("adam") or "8bit" in optimizer
    ):
        reading.approximate(reading.take("optim", "optimizer"), "Adam with 32-bit states is the only optimizer so far")
    if reading.take_word("dynamo_config.dynamo_backend", "dynamo_backend") not in ("", "no"):
        reading.set_key("framework.set.compile", True, "dynamo_config.dynamo_backend", "dynamo_backend")
    if "batch.micro" not in reading.keys:
        reading.assume("batch.micro", 1, "the arguments of the Trainer state it, and are not here")
    saved, strategy = reading.take("save_steps"), reading.take_word("save_strategy") or "steps"
    if saved is not None and strategy == "steps" and read_number(saved) >= 1:  # below 1 it is a share of the run
        reading.set_checkpoints(read_count(saved), False, "save_steps")
    gpus = reading.take_count("num_processes")
    if gpus:
        reading.set_key("cluster.gpus", gpus, "num_processes")
    reading.take("num_machines")


def _read_degrees(reading: Reading) -> None:
    """Reads the section of degrees, whose names may repeat that of the section."""

    def names(degree: str) -> tuple[str, str]:
        return f"parallelism_config.parallelism_config_{degree}_size", f"parallelism_config.{degree}_size"

    for degree in ("tp", "cp"):
        if size := reading.take_count(*names(degree)):
            reading.set_key(f"plan.{degree}", size, *names(degree))
    copies, shards = (reading.take_count(*names(degree)) for degree in ("dp_replicate", "dp_shard"))
    if shards and shards > 1:
        reading.set_key("plan.dp", shards * (copies or 1), *names("dp_shard"))
    if copies and copies > 1:
        reading.set_key("plan.replicate", copies, names("dp_replicate")[0])


def _read_model(reading: Reading) -> None:
    """The model, if its name on the hub is close to that of a preset."""
    stated = reading.take("model_name_or_path", "base_model")
    if stated is None or is_null(stated.value):
        return
    word = str(stated.value).rstrip("/").rpartition("/")[2].lower()
    word = word.replace("meta-", "").replace("llama-3", "llama3").replace("llama-2", "llama2")
    known = sorted({*presets(), *ALIASES}, key=len, reverse=True)
    name = next((one for one in known if word == one or word.startswith(f"{one}-") or word.startswith(f"{one}_")), None)
    if name is None:
        reading.approximate(stated, "no preset has this name: give the model")
        return
    reading.assume("model.preset", name, f"the preset closest to {stated.value}")


def _read_precision(reading: Reading) -> None:
    """Mixed precision of Accelerate, or the switches of the Trainer."""
    word = reading.take_word("mixed_precision")
    for format_ in ("bf16", "fp16"):
        stated = reading.take(format_)
        if word == format_ or (stated is not None and not is_null(stated.value) and read_switch(stated)):
            reading.set_key("precision.compute", format_, format_, "mixed_precision")
            return
    if word == "fp8":
        reading.set_key("precision.compute", "fp8-delayed", "mixed_precision")
    elif word == "no":
        reading.set_key("precision.compute", "fp32", "mixed_precision")
    elif "mixed_precision" not in reading.stated:
        reading.assume("precision.compute", "bf16", "no mixed precision is stated here")


def _read_fsdp(reading: Reading) -> None:
    """FSDP 1 by its strategy, or FSDP 2 by whether it reshards."""

    def take(name: str) -> str:
        return reading.take_word(f"fsdp_config.fsdp_{name}", f"fsdp_config.{name}")

    strategy = take("sharding_strategy")
    named = reading.take("fsdp")
    if not strategy and named is not None:
        words = named.value if isinstance(named.value, list) else str(named.value).split()
        strategy = str(words[0]).lower() if words else ""
    names = ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy", "fsdp")
    scheme, reshard = STRATEGIES.get(strategy, ("fsdp", True))
    reading.set_key("plan.data", scheme, *names)
    if strategy in ("hybrid_shard", "hybrid_shard_zero2", "4", "5"):
        reading.set_key("plan.shard_nodes", True, *names)
    again = take("reshard_after_forward")
    if again in ("true", "false"):
        reshard = again == "true"
    if scheme == "fsdp":
        reading.set_key("plan.data.reshard", bool(reshard), "fsdp_config.fsdp_reshard_after_forward", *names)
        if take("backward_prefetch") in ("backward_post", "no_prefetch"):
            reading.set_key("plan.data.backward_prefetch", False, "fsdp_config.fsdp_backward_prefetch")
    if take("offload_params") == "true":
        reading.set_key("plan.offload", ("optimizer",), "fsdp_config.fsdp_offload_params")
        why = "of what FSDP offloads, only the optimizer states are forecast in host memory"
        reading.approximate(reading.take("fsdp_config.fsdp_offload_params"), why)


def _read_deepspeed(reading: Reading) -> None:
    stage = reading.take_count("deepspeed_config.zero_stage") or 0
    offload = reading.take_word("deepspeed_config.offload_optimizer_device")
    parameters = reading.take_word("deepspeed_config.offload_param_device")
    if accumulated := reading.take_count("deepspeed_config.gradient_accumulation_steps"):
        reading.set_key("batch.accumulated", accumulated, "deepspeed_config.gradient_accumulation_steps")
    reading.set_key("plan.data", f"zero-{stage}" if stage else "ddp", "deepspeed_config.zero_stage")
    if offload in ("cpu", "nvme"):
        device = "deepspeed_config.offload_optimizer_device"
        reading.set_key("plan.data", "zero-infinity" if stage == 3 else "zero-offload", device)
        if stage == 3:
            place = parameters if parameters in ("cpu", "nvme") else "gpu"
            reading.set_key("plan.data.parameters", place, "deepspeed_config.offload_param_device")
            reading.set_key("plan.data.optimizer", offload, device)


def recognise(file: LaunchFile) -> Evidence:
    """A mapping with keys of Accelerate, or of the Trainer."""
    named = {"distributed_type", "fsdp_config", "per_device_train_batch_size", "base_model"} & file.keys
    return Evidence.LIKELY if named else Evidence.NONE


ACCELERATE = LaunchFormat("accelerate", "Hugging Face Accelerate", ".yaml", recognise, read, interpret, None, VERDICTS)

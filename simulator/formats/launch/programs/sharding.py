"""How programs on Hugging Face's Trainer shard: settings of DeepSpeed, FSDP and Accelerate, wherever they stand.

Settings of companion files have names behind a prefix: ``deepspeed.zero_optimization.stage`` of a DeepSpeed
configuration, ``accelerate.fsdp_config.version`` of a YAML file or of the flags of ``accelerate launch``. Those of
``fsdp_config`` lose their prefix ``fsdp_``, as in Accelerate.

Sources: deepspeedai/DeepSpeed v0.19.8, deepspeed/runtime/config.py, runtime/zero/config.py; huggingface/accelerate
v1.15.0, src/accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin, DeepSpeedPlugin, ParallelismConfig),
commands/launch.py; huggingface/transformers v4.57.3 and v5.24.0, src/transformers/training_args.py (fsdp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    ON,
    SettingRow,
    Stated,
    is_null,
    read_count,
    read_number,
    read_switch,
    read_words,
)

# ------------------------------------------------------------------------------------------ settings


def name_settings(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings with the names of sections that repeat the section left out: ``fsdp_config.version``."""
    named: dict[str, Stated] = {}
    for name, stated in settings.items():
        head, dot, tail = name.rpartition(".")
        for section, repeated in REPEATED.items():
            if head.endswith(section) and tail.startswith(repeated):
                tail = tail.removeprefix(repeated)
        if head.endswith("zero_optimization") and tail in FIELDS:
            tail = FIELDS[tail]
        named[f"{head}{dot}{tail}"] = stated
    return named


REPEATED = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}
"""What names inside a section may begin with."""

FIELDS = {
    **{name: f"stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")},
    **{"param_persistence_threshold": "stage3_param_persistence_threshold"},
    **{"model_persistence_threshold": "stage3_model_persistence_threshold"},
    **{
        name: "stage3_gather_16bit_weights_on_model_save"
        for name in ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    },
}
"""Settings of ZeRO by the names of DeepSpeed's fields, which it takes, too (DeepSpeedConfigModel: populate_by_name)."""


# ----------------------------------------------------------------------------------------- Accelerate

ACCELERATE_KEYS = {
    *("compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "mixed_precision", "num_machines"),
    *("num_processes", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"),
    *("gpu_ids", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "dynamo_config"),
    *("fp8_config", "mpirun_config", "ipex_config", "commands", "command_file", "tpu_name", "tpu_zone"),
    *("dynamo_backend", "deepspeed_hostfile"),
}
"""Top-level keys of a YAML file of Accelerate."""

LAUNCH_SECTIONS = {
    "fsdp_config": r"fsdp_",
    "parallelism_config": r"parallelism_config_",
    "megatron_lm_config": r"megatron_lm_",
    "dynamo_config": r"dynamo_",
    "fp8_config": r"fp8_",
}
"""Sections of the YAML file, by what the names of the flags of ``accelerate launch`` begin with."""

DEEPSPEED_FLAGS = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path"),
    *("offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag"),
    *("zero3_save_16bit_model", "deepspeed_config_file", "deepspeed_multinode_launcher"),
    "deepspeed_moe_layer_cls_names",
)
"""Flags of ``accelerate launch`` that are keys of the section ``deepspeed_config``."""

KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""``distributed_type`` by the flag of ``accelerate launch``."""


def name_launch_flags(flags: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the flags of ``accelerate launch`` by the names of the YAML file, which they replace."""
    named: dict[str, Stated] = {}
    for flag, stated in flags.items():
        section = next((key for key, begin in LAUNCH_SECTIONS.items() if flag.startswith(begin)), None)
        if flag in KINDS:
            if read_switch(stated):
                named["accelerate.distributed_type"] = replace(stated, value=KINDS[flag])
        elif flag in DEEPSPEED_FLAGS:
            named[f"accelerate.deepspeed_config.{flag}"] = stated
        elif section is not None and flag != "dynamo_backend":
            named[f"accelerate.{section}.{flag}"] = stated
        else:
            named[f"accelerate.{flag}"] = stated
    return name_settings(named)


def read_accelerate(reading: Reading) -> None:
    """Adds the YAML file that ``accelerate launch`` names, and what its section on DeepSpeed says."""
    stated = reading.take("accelerate.config_file")
    if stated is not None and (file := reading.read_companion(stated)) is not None:
        reading.add_stated(name_settings(flatten_file(file, "accelerate.", "distributed_type: FSDP")))
    if _kind(reading) == "deepspeed" and not _has_section(reading, "deepspeed"):
        _read_accelerate_deepspeed(reading)


def _kind(reading: Reading) -> str:
    return reading.take_word("accelerate.distributed_type")


def _has_section(reading: Reading, name: str) -> bool:
    """Returns whether settings of a section are stated."""
    return any(setting == name or setting.startswith(f"{name}.") for setting in reading.stated)


DEEPSPEED_SECTION = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Settings of DeepSpeed by those of Accelerate's section."""


def _read_accelerate_deepspeed(reading: Reading) -> None:
    """Adds the settings of DeepSpeed that Accelerate makes of its section, or those of the file that this names."""
    stated = reading.take("accelerate.deepspeed_config.deepspeed_config_file")
    if stated is not None and not is_null(stated.value):
        if (file := reading.read_companion(stated)) is not None:
            reading.add_stated(flatten_file(file, "deepspeed.", "{"))
        return
    section = {
        f"deepspeed.{theirs}": stated
        for name, theirs in DEEPSPEED_SECTION.items()
        if (stated := reading.take(f"accelerate.deepspeed_config.{name}")) is not None
    }
    # DeepSpeedPlugin.__post_init__: stage 2 without another.
    default = Stated(2, "zero_stage", reading.file.where)
    reading.add_stated({"deepspeed.zero_optimization.stage": default, **section})


# ------------------------------------------------------------------------------------------ DeepSpeed

Z = "deepspeed.zero_optimization"
"""The section of ZeRO."""

BUCKET = SettingRow(f"{Z}.reduce_bucket_size", "framework.set.bucket.elements", "number")
"""Gradient buckets, of the stages that do not shard weights."""

COORDINATOR = (
    SettingRow(f"{Z}.stage3_prefetch_bucket_size", "plan.data.prefetch_bucket", "number", silent=50_000_000),
    SettingRow(f"{Z}.stage3_max_live_parameters", "plan.data.max_live", "number", silent=1_000_000_000),
    SettingRow(f"{Z}.stage3_max_reuse_distance", "plan.data.max_reuse_distance", "number", silent=1_000_000_000),
    SettingRow(f"{Z}.reduce_bucket_size", "plan.data.reduce_bucket", "number", silent=500_000_000),
)
"""Settings of the stages that shard weights."""

PERSISTENCE = SettingRow(f"{Z}.stage3_param_persistence_threshold", "plan.data.persistence", "number", silent=100_000)

SUB_GROUP = SettingRow(f"{Z}.sub_group_size", "framework.set.update.sub_group", "number")
SAVING = SettingRow(
    f"{Z}.stage3_gather_16bit_weights_on_model_save",
    "framework.set.memory.saves",
    "switch",
    {True: "modules", False: "shards"},
)
"""Whether stage 3 gathers weights for a checkpoint (`_zero3_consolidated_16bit_state_dict` of runtime/engine.py)."""

OVERLAP = SettingRow(f"{Z}.overlap_comm", "framework.set.overlap.dp", "switch", ON)

QUANTISED = (("qwz", "weights"), ("qgz", "gradients"))
"""What ZeRO++ quantises: its options, and how DeepSpeed calls it."""

HIDDEN_SIZED = {
    BUCKET.name: lambda hidden: hidden * hidden,
    COORDINATOR[0].name: lambda hidden: int(0.9 * hidden * hidden),
    PERSISTENCE.name: lambda hidden: 10 * hidden,
}
"""Values for ``auto`` by the hidden size of the model (HfTrainerDeepSpeedConfig.trainer_config_finalize of
transformers v5.24.0, src/transformers/integrations/deepspeed.py)."""


def fill_auto(reading: Reading) -> None:
    """Fills the sizes that a DeepSpeed configuration leaves to the hidden size of the model."""
    hidden = reading.keys.get("model.hidden")
    for name, stated in list(reading.stated.items()):
        if not name.startswith("deepspeed.") or stated.value != "auto":
            continue
        if name in HIDDEN_SIZED and hidden:
            reading.stated[name] = replace(stated, value=HIDDEN_SIZED[name](hidden))
        elif "." in name.removeprefix("deepspeed.") or reading.take("per_device_train_batch_size") is not None:
            reading.ignore(stated, "auto: arguments of the Trainer fill it in")


def read_zero(reading: Reading) -> None:
    """Reads the stage of ZeRO, and what is offloaded, quantised or kept on every node."""
    fill_auto(reading)
    reading.set_key("framework.name", "deepspeed", "deepspeed", f"{Z}.stage")
    stated = reading.take(f"{Z}.stage")
    stage = 0 if stated is None or is_null(stated.value) else int(read_number(stated))
    reading.set_key("plan.data", f"zero-{stage}" if stage else "ddp", f"{Z}.stage", "deepspeed")
    reading.read_rows([BUCKET, OVERLAP])
    if "framework.set.overlap.dp" not in reading.keys:
        reading.set_key("framework.set.overlap.dp", stage == 3)
    if size := reading.take_count("deepspeed.tensor_parallel.autotp_size"):
        reading.set_key("plan.tp", size, "deepspeed.tensor_parallel.autotp_size")
    if (size := reading.take_count("deepspeed.sequence_parallel_size")) and size > 1:
        reading.set_key("plan.cp", size, "deepspeed.sequence_parallel_size")
        reading.set_key("plan.sequence", "ulysses", "deepspeed.sequence_parallel_size")
    _read_devices(reading, stage)
    _read_buckets(reading)
    _read_coordinator(reading, stage)
    _read_sub_groups(reading, stage)
    accumulated = reading.take_word("deepspeed.data_types.grad_accum_dtype")
    if accumulated in ("fp32", "bf16", "fp16"):
        reading.set_key("precision.gradients", accumulated, "deepspeed.data_types.grad_accum_dtype")
    for name in ("reduce_scatter", "allgather_partitions"):
        stated = reading.take(f"{Z}.{name}")
        if stated is not None and not is_null(stated.value) and not read_switch(stated):
            why = "gradients are forecast as reduce-scattered, weights as all-gathered"
            reading.approximate(stated, why, "the step is too short")


BUFFERS = f"{Z}.contiguous_gradients", "framework.set.bucket.buffers"
SEQUENCE_FORMAT = "deepspeed.seq_parallel_communication_data_type", "framework.set.bucket.sequence_format"
"""Whether gradients are copied to buffers, and the format of their reduction where sequences are sharded: settings and
keys."""


def _read_buckets(reading: Reading) -> None:
    """Reads in which buffers, and in which format, gradients are reduced."""
    name, key = BUFFERS
    contiguous = reading.take(name)
    if contiguous is not None and not is_null(contiguous.value):
        reading.set_key(key, int(read_switch(contiguous)), name)
    name, key = SEQUENCE_FORMAT
    if (word := reading.take_word(name)) in ("fp32", "bf16", "fp16"):
        reading.set_key(key, word, name)


def _read_devices(reading: Reading, stage: int) -> None:
    """Reads what lies in host memory or on disks."""
    devices = {what: reading.take_word(f"{Z}.offload_{what}.device") for what in ("optimizer", "param")}
    if reading.take_switch(f"{Z}.cpu_offload"):
        devices["optimizer"] = devices["optimizer"] or "cpu"
    grouped = _read_groups(reading, stage)
    if not grouped and (_read_super_offload(reading, stage, devices) or _read_zenflow(reading, stage, devices)):
        return
    if stage == 3 and not grouped and {"cpu", "nvme"} & set(devices.values()):
        _set_infinity(reading, devices)
    elif devices["optimizer"] in ("cpu", "nvme"):
        offload = f"{Z}.offload_optimizer.device", f"{Z}.cpu_offload"
        if grouped or stage < 2:
            reading.set_key("plan.offload", ("optimizer",), *offload)
        else:
            reading.set_key("plan.data", "zero-offload", *offload, f"{Z}.stage")


def _read_super_offload(reading: Reading, stage: int, devices: Mapping[str, str]) -> bool:
    """Reads updates of the host during the backward pass, and returns whether the file asks for them.

    devices: where what is offloaded to.
    """
    name, clipping = f"{Z}.offload_optimizer.super_offload", reading.take("deepspeed.gradient_clipping")
    fits = stage == 3 and devices["optimizer"] == "cpu" and devices["param"] not in ("cpu", "nvme")
    if not (fits and reading.take_switch(name)):
        return False
    reading.set_key("plan.data", "super-offload", name, f"{Z}.stage", f"{Z}.offload_optimizer.device")
    _read_ratio(reading, devices["optimizer"])
    clips = clipping is not None and not is_null(clipping.value) and str(clipping.value) not in ("0", "0.0")
    reading.set_key("plan.data.clips", clips, "deepspeed.gradient_clipping")
    return True


def _read_zenflow(reading: Reading, stage: int, devices: Mapping[str, str]) -> bool:
    """Reads which columns the GPU updates, and how often the host the others; returns whether the file says so.

    devices: where what is offloaded to.
    """
    section = f"{Z}.zenflow."
    if (
        stage not in (1, 2)
        or devices["optimizer"] != "cpu"
        or not any(name.startswith(section) for name in reading.stated)
    ):
        return False
    reading.set_key("plan.data", "zenflow", f"{Z}.offload_optimizer.device", f"{Z}.stage")
    if (ratio := reading.take(f"{section}topk_ratio")) is not None:
        reading.set_key("plan.data.topk_ratio", float(read_number(ratio)), f"{section}topk_ratio")
    interval = reading.take(f"{section}update_interval")
    if interval is not None and str(interval.value) != "auto":
        reading.set_key("plan.data.update_interval", read_count(interval), f"{section}update_interval")
    else:
        why = "the host updates its states every 4 steps; DeepSpeed decides by the gradients when it does"
        reading.approximate(interval, why, "the forecast may be too fast or too slow")
    if reading.take_switch(f"{section}overlap_step"):
        reading.set_key("plan.data.overlap_step", True, f"{section}overlap_step")
    return True


def _read_groups(reading: Reading, stage: int) -> bool:
    """Reads a scheme that gathers weights inside groups of ranks, if the file has it, and returns whether it does."""
    hpz = reading.take_count(f"{Z}.zero_hpz_partition_size") or 1
    quantised = {key: reading.take_switch(f"{Z}.zero_quantized_{name}") for key, name in QUANTISED}
    mics = reading.take(f"{Z}.mics_shard_size")
    if stage == 3 and mics is not None and read_number(mics) > 1:
        reading.set_key("plan.data", "mics", f"{Z}.mics_shard_size", f"{Z}.stage")
        reading.set_key("plan.mics", read_count(mics), f"{Z}.mics_shard_size")
        return True
    if stage == 3 and (hpz > 1 or any(quantised.values())):
        switches = {"hpz": f"{Z}.zero_hpz_partition_size"}
        switches |= {key: f"{Z}.zero_quantized_{name}" for key, name in QUANTISED}
        reading.set_key("plan.data", "zero-plus-plus", f"{Z}.stage", *switches.values())
        for key, value in {"hpz": hpz > 1, **quantised}.items():
            reading.set_key(f"plan.data.{key}", value, switches[key])
        return True
    return False


def _set_infinity(reading: Reading, devices: Mapping[str, str]) -> None:
    """Sets ZeRO-Infinity. devices: where what is offloaded to."""
    names = {what: f"{Z}.offload_{what}.device" for what in devices}
    reading.set_key("plan.data", "zero-infinity", f"{Z}.stage", *names.values())
    for what, key, otherwise in (("param", "parameters", "gpu"), ("optimizer", "optimizer", "cpu")):
        place = devices[what] if devices[what] in ("cpu", "nvme") else otherwise
        reading.set_key(f"plan.data.{key}", place, names[what])
    _read_ratio(reading, devices["optimizer"])
    if devices["optimizer"] not in ("cpu", "nvme"):
        why = "where weights lie in host memory, the optimizer states are forecast there, too"
        errs = "the forecast needs less memory of the GPU, and its step is longer"
        reading.approximate(reading.take(names["param"]), why, errs)


def _read_ratio(reading: Reading, device: str) -> None:
    """Reads the share of the optimizer states that is offloaded (Twin-Flow of stage 3). device: where they lie."""
    name = f"{Z}.offload_optimizer.ratio"
    stated = reading.take(name)
    if stated is None or is_null(stated.value) or device != "cpu" or (ratio := read_number(stated)) == 1:
        return
    reading.set_key("plan.data.ratio", ratio, name)
    why = "so many elements are offloaded; DeepSpeed offloads so many of the groups of sub_group_size elements"
    reading.approximate(stated, why, "with few groups in a rank's shard, less stays on the GPU")


def _read_coordinator(reading: Reading, stage: int) -> None:
    """Reads how stage 3 gathers weights."""
    if reading.keys["plan.data"] in ("zero-3", "zero-infinity", "super-offload", "zero-plus-plus"):
        reading.read_rows(COORDINATOR)
        reading.keys.pop(BUCKET.key, None)
    if reading.keys["plan.data"] == "zero-3":
        reading.read_rows([PERSISTENCE])
    else:
        stated = reading.take(PERSISTENCE.name)
        if stage == 3 and stated is not None and not is_null(stated.value):
            why = f"with data/{reading.keys['plan.data']} all parameters are forecast as shards"
            reading.approximate(stated, why, "the forecast needs a little less memory")
    for row in (*COORDINATOR, PERSISTENCE):
        if stage < 3 and row.name != BUCKET.name and row.name in reading.stated:
            reading.ignore(reading.take(row.name), "stage 3 alone gathers weights")


def _read_sub_groups(reading: Reading, stage: int) -> None:
    """Reads the size of the groups of parameters that stage 3 updates in turn, and how it saves."""
    if stage == 3:
        reading.read_rows([SUB_GROUP, SAVING])
    for row, why in ((SUB_GROUP, "updates by groups"), (SAVING, "gathers weights to save them")):
        if stage < 3 and row.name in reading.stated:
            reading.ignore(reading.take(row.name), f"stage 3 alone {why}")


CHAT = {
    **{"overlap_comm": True, "stage3_param_persistence_threshold": 10_000, "stage3_max_live_parameters": 30_000_000},
    "stage3_prefetch_bucket_size": 30_000_000,
}
"""What DeepSpeed-Chat sets beside its flags (deepspeedai/DeepSpeedExamples @38ef1962d938,
applications/DeepSpeed-Chat/dschat/utils/ds_utils.py; defaults of its flags in training/step1_supervised_finetuning)."""


def state_chat(reading: Reading) -> None:
    """States the configuration that DeepSpeed-Chat makes of its flags."""
    stage = reading.stated["zero_stage"]
    settings = {f"{Z}.{name}": replace(stage, value=value) for name, value in CHAT.items()}
    settings[f"{Z}.stage"] = stage
    if reading.take_switch("offload"):
        stated = reading.stated["offload"]
        settings |= {f"{Z}.offload_{what}.device": replace(stated, value="cpu") for what in ("param", "optimizer")}
    word = reading.take_word("dtype") or "fp16"
    settings[f"deepspeed.{word}.enabled"] = replace(reading.stated.get("dtype", stage), value=True)
    reading.stated.pop("dtype", None)
    reading.take("zero_stage", "deepspeed")
    reading.add_stated(settings)


# ------------------------------------------------------------------------------------------------ FSDP

FSDP = "fsdp"
"""The argument of the Trainer, and the data scheme."""

STRATEGIES = {
    **{"full_shard": (FSDP, True), "shard_grad_op": (FSDP, False), "no_shard": ("ddp", None)},
    **{"hybrid_shard": (FSDP, True), "hybrid_shard_zero2": (FSDP, False)},
    **{"1": (FSDP, True), "2": (FSDP, False), "3": ("ddp", None), "4": (FSDP, True), "5": (FSDP, False)},
}
"""Data scheme, and whether weights are resharded behind the forward pass, by the strategy of FSDP 1."""

HYBRID = ("hybrid_shard", "hybrid_shard_zero2", "4", "5")
"""Strategies that shard inside a node."""


def _fsdp_names(name: str) -> tuple[str, str]:
    """Returns the names of a setting of FSDP: of the Trainer, whose arguments count more, and of Accelerate."""
    return f"fsdp_config.{name}", f"accelerate.fsdp_config.{name}"


def read_fsdp(reading: Reading, version: int = 1) -> None:
    """Reads FSDP. version: where the file does not say it."""
    version = reading.take_count(*_fsdp_names("version")) or version
    words = [word.lower() for word in read_words(stated)] if (stated := reading.take(FSDP)) is not None else []
    names = (FSDP, *_fsdp_names("sharding_strategy"), *_fsdp_names("reshard_after_forward"))
    states = reading.take_word(*_fsdp_names("reshard_after_forward"))
    strategy = reading.take_word(*_fsdp_names("sharding_strategy")) if version == 1 else ""
    strategy = next((word for word in words if word in STRATEGIES), strategy) or (
        states if states in STRATEGIES else ""
    )
    scheme, reshard = STRATEGIES.get(strategy, (FSDP, True))
    if version == 2 and states in ("true", "false"):
        reshard = states == "true"
    reading.set_key("plan.data", scheme, "accelerate.distributed_type", FSDP, *_fsdp_names("sharding_strategy"))
    if strategy in HYBRID:
        reading.set_key("plan.shard_nodes", True, *names)
    if scheme != FSDP:
        return
    reading.set_key("plan.data.reshard", bool(reshard), *names)
    if reading.take_word(*(loading := _fsdp_names("cpu_ram_efficient_loading"))) == "true":
        reading.set_key("framework.set.memory.each_rank_loads", False, *loading)
    if version == 2:
        reading.set_key("framework.set.gathers_apart", True, *_fsdp_names("version"))
    else:
        # Accelerate's FullyShardedDataParallelPlugin prefetches nothing unless it is told to.
        prefetch = (*_fsdp_names("backward_prefetch"), *_fsdp_names("backward_prefetch_policy"))
        ahead = reading.take_word(*prefetch) in ("backward_pre", "1")
        reading.set_key("plan.data.backward_prefetch", ahead, *prefetch)
    _read_units(reading)
    _read_wrapping(reading)
    _read_saving(reading, version)
    _read_fsdp_offload(reading, words)


def has_fsdp(reading: Reading) -> bool:
    """Returns whether FSDP shards: an argument of the Trainer says it, or Accelerate's file."""
    stated = reading.take(FSDP)
    is_on = stated is not None and not is_null(stated.value) and str(stated.value).lower() not in ("false", "[]")
    return is_on or _kind(reading) == FSDP


def state_fsdp(reading: Reading, stated: Stated, version: Stated | None = None) -> None:
    """States FSDP in the words of the Trainer.

    stated: the setting that says it.
    version: of FSDP.
    """
    reading.stated.setdefault(FSDP, replace(stated, value=True))
    if version is not None:
        reading.stated.setdefault("fsdp_config.version", version)


def ask_sharding(reading: Reading) -> None:
    """Asks what a file of arguments leaves to the command that takes it: whether DeepSpeed or FSDP shards."""
    sections = ("deepspeed", FSDP, "accelerate.")
    if reading.file.launch is None and not any(name.startswith(sections) for name in reading.stated):
        why = "the command that starts it, or the configuration of Accelerate, says whether DeepSpeed or FSDP shards"
        reading.ask(None, why, "plan.zero=3", "plan.fsdp=true", "plan.zero=0")


def _read_wrapping(reading: Reading) -> None:
    """Reads whether ``fsdp`` wraps layers: before release 5 of transformers the word ``auto_wrap`` says so."""
    stated = reading.take(FSDP)
    if _kind(reading) == FSDP or reading.take("fsdp_config.auto_wrap_policy") is not None:
        return
    wraps = any(name.startswith(("fsdp_transformer_layer", "fsdp_config.transformer_layer")) for name in reading.stated)
    if stated is None or isinstance(stated.value, bool) or "auto_wrap" in str(stated.value) or wraps:
        return
    why = "without auto_wrap transformers before release 5 wraps the whole model as one unit; layers are forecast"
    errs = "the forecast needs less memory, and overlaps more"
    reading.approximate(stated, why, errs, {"plan.data.reshard": False})


STATE_DICTS = {"full_state_dict": "units", "sharded_state_dict": "shards", "local_state_dict": "shards"}
"""How checkpoints are saved, by the state dict of FSDP."""


def _read_saving(reading: Reading, version: int) -> None:
    """Reads whether FSDP gathers weights for a checkpoint: without a word FSDP 1 does, and FSDP 2 does not
    (huggingface/accelerate @16cb6eb8, src/accelerate/utils/dataclasses.py, set_state_dict_type)."""
    names = _fsdp_names("state_dict_type")
    word = reading.take_word(*names) or ("full_state_dict" if version == 1 else "sharded_state_dict")
    if word in STATE_DICTS:
        reading.set_key("framework.set.memory.saves", STATE_DICTS[word], *names)
    else:
        why = f"{word!r} is no state dict of FSDP: {', '.join(STATE_DICTS)}"
        reading.approximate(reading.take(*names), why, "the peak of saving a checkpoint may be another one")


def _read_units(reading: Reading) -> None:
    """Reads what FSDP wraps: the forecast gathers layer by layer."""
    stated = reading.take(*_fsdp_names("auto_wrap_policy"))
    policy = str(stated.value).lower() if stated is not None else ""
    if policy == "size_based_wrap":
        reading.approximate(stated, "a unit is forecast as one layer", "the memory errs by the size of a unit")
    elif policy == "no_wrap":
        why = "the model is one unit, whose weights are all gathered at once; units of one layer are forecast"
        other = {"plan.data.reshard": False}
        reading.approximate(stated, why, "the forecast needs less memory, and overlaps more", other)


def _read_fsdp_offload(reading: Reading, words: list[str]) -> None:
    """Reads whether all that FSDP shards lies in host memory."""
    names = *_fsdp_names("offload_params"), *_fsdp_names("cpu_offload")
    stated = reading.take(*names)
    if (stated is not None and not is_null(stated.value) and read_switch(stated)) or "offload" in words:
        reading.set_key("plan.data.offload", True, *(names if stated is not None else (FSDP,)))


# ------------------------------------------------------------------------------------- several degrees


def _degree_names(degree: str) -> tuple[str, str]:
    """Returns the names of a degree: of the Trainer, and of Accelerate."""
    return f"parallelism_config.{degree}_size", f"accelerate.parallelism_config.{degree}_size"


def read_degrees(reading: Reading) -> None:
    """Reads the section ``parallelism_config``."""
    for degree, key in (("tp", "plan.tp"), ("cp", "plan.cp"), ("sp", "plan.cp")):
        if size := reading.take_count(*_degree_names(degree)):
            if size > 1 or key not in reading.keys:
                reading.set_key(key, size, *_degree_names(degree))
            if size > 1 and key == "plan.cp":
                reading.set_key("plan.sequence", _read_sequence_scheme(reading, degree), *_degree_names(degree))
    copies, shards = (reading.take_count(*_degree_names(degree)) for degree in ("dp_replicate", "dp_shard"))
    if shards or (copies or 1) > 1:
        set_replicas(reading, copies or 1, shards or 1, _degree_names("dp_replicate"), _degree_names("dp_shard"))


def set_replicas(
    reading: Reading, copies: int, shards: int, copies_names: tuple[str, ...], shards_names: tuple[str, ...]
) -> None:
    """Sets the data-parallel ranks of a mesh of copies of shards. copies_names, shards_names: of the settings."""
    reading.set_key("plan.dp", shards * copies, *shards_names, *copies_names)
    if copies > 1 and shards > 1:
        reading.set_key("plan.replicate", copies, *copies_names)
    elif copies > 1:
        reading.set_key("plan.data", "ddp", *copies_names)


def _read_sequence_scheme(reading: Reading, degree: str) -> str:
    """Reads the scheme that shards sequences: DeepSpeed's by heads, PyTorch's by an all-gather or a ring."""
    if degree == "sp":
        return "ulysses"
    names = "parallelism_config.cp_comm_strategy", "accelerate.parallelism_config.cp_comm_strategy"
    return "ring" if reading.take_word(*names) == "alltoall" else "all-gather"


def offload_checkpoints(reading: Reading, *names: str) -> None:
    """Sets that the saved inputs of layers lie in host memory. names: of the settings that say so."""
    reading.set_key("plan.offload", (*reading.keys.get("plan.offload", ()), "activations"), *names)

"""DeepSpeed: its JSON configuration. The model, sequences and most of the parallelism are code beside it.

Source: microsoft/DeepSpeed @38327e07f, deepspeed/runtime/config.py, runtime/zero/config.py and constants of both.
``auto`` is a value that Hugging Face's Trainer fills in from its own arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import line_of
from meshcast.simulator.formats.launch.keys import nest
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    ON,
    Keys,
    SettingRow,
    Stated,
    is_null,
    read_count,
    read_number,
    read_switch,
    write_rows,
)
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts

BUCKET = SettingRow("zero_optimization.reduce_bucket_size", "framework.set.bucket.elements", "number")
"""Gradient buckets, of the stages that do not shard weights."""

ROWS = (
    SettingRow("train_batch_size", "batch.global"),
    SettingRow("train_micro_batch_size_per_gpu", "batch.micro"),
    SettingRow("gradient_accumulation_steps", "batch.accumulated"),
    SettingRow("tensor_parallel.autotp_size", "plan.tp", silent=1),
    SettingRow("sequence_parallel_size", "plan.cp", silent=1),
    BUCKET,
)

COORDINATOR = (
    SettingRow(
        "zero_optimization.stage3_prefetch_bucket_size", "plan.data.prefetch_bucket", "number", silent=50_000_000
    ),
    SettingRow("zero_optimization.stage3_max_live_parameters", "plan.data.max_live", "number", silent=1_000_000_000),
    SettingRow(
        "zero_optimization.stage3_max_reuse_distance", "plan.data.max_reuse_distance", "number", silent=1_000_000_000
    ),
    SettingRow("zero_optimization.reduce_bucket_size", "plan.data.reduce_bucket", "number", silent=500_000_000),
)
"""Settings of the stages that shard weights."""

PERSISTENCE = SettingRow(
    "zero_optimization.stage3_param_persistence_threshold", "plan.data.persistence", "number", silent=100_000
)

OVERLAP = SettingRow("zero_optimization.overlap_comm", "framework.set.overlap.dp", "switch", ON)

WITHOUT_INFLUENCE = (
    r"_meshcast.*|optimizer\.params\..*|optimizer\.legacy_fusion|scheduler.*|fp16\.(?!enabled).*|bf16\.(?!enabled).*|steps_per_print|wall_clock_breakdown"
    r"|gradient_clipping|gradient_predivide_factor|prescale_gradients|zero_allow_untested.*|zero_force_ds.*|dump_state|tensorboard.*|wandb.*"
    r"|csv_monitor.*|comet.*|comms_logger.*|flops_profiler.*|autotuning.*|elasticity.*|checkpoint.*|data_efficiency.*|curriculum.*|aio.*"
    r"|zero_optimization\.(contiguous_gradients|sub_group_size|stage3_gather_16bit.*|stage3_gather_fp16.*|cpu_offload_use_pin.*"
    r"|round_robin.*|load_from_fp32.*|ignore_unused.*|elastic_checkpoint|legacy_stage1|log_trace.*|offload_\w+\.(pin_memory|buffer_count|buffer_size|max_in_cpu|nvme_path|fast_init|pipeline.*))"
    r"|disable_allgather|seed|activation_checkpointing\.(profile|synchronize.*|number_checkpoints|contiguous.*)"
    r"|local_rank|memory_breakdown|train_steps|profile.*|nebula.*|gradient_accumulation_dtype|zero_optimization\.use_multi_rank.*"
)

REASONS = {
    r"communication_data_type": "gradients are reduced in the format in which they are accumulated",
    r"amp.*": "mixed precision by Apex is not described",
    r"compile\..*": "compilation by DeepSpeed is not described",
    r"zero_optimization\.allgather_bucket_size": "updated weights are gathered by the buckets of the profile",
    r"activation_checkpointing\..*": "whether layers are recomputed is code of the model: state plan.recompute",
    r"optimizer\.type": "Adam is the only optimizer so far",
    r"zero_optimization\.(reduce_scatter|allgather_partitions)": "gradients are reduce-scattered, weights all-gathered",
    r"(sparse_attention|compression_training|progressive_layer_drop|quantize_training|eigenvalue).*": "not described",
    r"zero_optimization\.mics_hierarchical_params_gather": "all-gathers are forecast in one step",
    r"pipeline.*": "stages of a PipelineModule are code: state plan.pp",
    r"hybrid_engine.*": "generation is not described; a step of training is forecast",
}


def flatten_settings(data: Any, text: str, where: str) -> dict[str, Stated]:
    """The settings of nested mappings, by their dotted names."""
    found: dict[str, Stated] = {}

    def walk(path: tuple[str, ...], value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk((*path, str(key)), inner)
        elif path:
            name = ".".join(path)
            line = line_of(text, path) if text else None
            found[name] = Stated(value, name, f"{where}:{line}" if line else where)

    walk((), data)
    return found


VERDICTS: Verdicts = {
    **{pattern: Approximation(why) for pattern, why in REASONS.items()},
    WITHOUT_INFLUENCE: NoInfluence("it changes neither time nor memory"),
}


def read(file: LaunchFile) -> dict[str, Stated]:
    """The settings of a JSON file."""
    if not isinstance(file.data, Mapping):
        raise PlanError(file.where, "a DeepSpeed configuration is one object", "Start with {")
    return flatten_settings(file.data, file.text, file.where)


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows(ROWS)
    reading.set_key("framework.name", "deepspeed")
    keys = reading.keys
    if keys["plan.cp"] > 1:
        reading.set_key("plan.sequence", "ulysses", "sequence_parallel_size")
    _read_precision(reading)
    if (kind := reading.take_word("optimizer.type")) and kind not in ADAMS:
        reading.approximate(reading.take("optimizer.type"), REASONS[r"optimizer\.type"])
    _read_zero(reading)
    micro, _ = reading.take("train_micro_batch_size_per_gpu"), reading.take("train_batch_size")
    if micro is not None and str(micro.value) == "auto":
        reading.assume("batch.micro", 1, "auto: the arguments of the Trainer decide")
    if "batch.micro" not in keys and {"batch.global", "batch.accumulated"} <= keys.keys():
        keys["batch.per_rank"] = keys["batch.accumulated"]


ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
"""Types of optimizers that are forecast."""


def _read_precision(reading: Reading) -> None:
    formats = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    switches = {name: reading.take(f"{name}.enabled") for name in formats}
    for name, stated in switches.items():
        if stated is not None and not is_null(stated.value) and read_switch(stated):
            reading.set_key("precision.compute", formats[name], f"{name}.enabled")
    if "precision.compute" not in reading.keys:
        if any(stated is not None and str(stated.value) == "auto" for stated in switches.values()):
            reading.assume("precision.compute", "bf16", "auto: the arguments of the Trainer decide")
        else:
            reading.set_key("precision.compute", "fp32")
    accumulate = reading.take_word("data_types.grad_accum_dtype")
    if accumulate in ("fp32", "bf16", "fp16"):
        reading.set_key("precision.gradients", accumulate, "data_types.grad_accum_dtype")


ZERO = "zero_optimization"
"""The section of ZeRO."""

QUANTISED = (("qwz", "weights"), ("qgz", "gradients"))
"""What ZeRO++ quantises: its options, and how DeepSpeed calls it."""


def _read_zero(reading: Reading) -> None:
    """Reads the stage of ZeRO, and what is offloaded, quantised or kept on every node."""
    stated = reading.take(f"{ZERO}.stage")
    stage = 0 if stated is None or is_null(stated.value) else int(read_number(stated))
    reading.set_key("plan.data", f"zero-{stage}" if stage else "ddp", f"{ZERO}.stage")
    reading.read_rows([OVERLAP])
    if "framework.set.overlap.dp" not in reading.keys:
        reading.set_key("framework.set.overlap.dp", stage == 3)
    devices = {what: reading.take_word(f"{ZERO}.offload_{what}.device") for what in ("optimizer", "param")}
    if reading.take_switch(f"{ZERO}.cpu_offload"):
        devices["optimizer"] = devices["optimizer"] or "cpu"
    grouped = _read_groups(reading, stage)
    if stage == 3 and not grouped and {"cpu", "nvme"} & set(devices.values()):
        _set_infinity(reading, devices)
    elif not grouped and devices["optimizer"] == "cpu":
        reading.set_key("plan.data", "zero-offload", f"{ZERO}.offload_optimizer.device", f"{ZERO}.cpu_offload")
    if devices["param"] in ("cpu", "nvme") and devices["optimizer"] not in ("cpu", "nvme"):
        why = "where weights lie in host memory, so do the optimizer states"
        reading.approximate(reading.take(f"{ZERO}.offload_param.device"), why)
    _read_coordinator(reading, stage)


def _read_groups(reading: Reading, stage: int) -> bool:
    """Reads a scheme that gathers weights inside groups of ranks, if there is one, and returns whether there is."""
    hpz = reading.take_count(f"{ZERO}.zero_hpz_partition_size") or 1
    quantised = {key: reading.take_switch(f"{ZERO}.zero_quantized_{name}") for key, name in QUANTISED}
    mics = reading.take(f"{ZERO}.mics_shard_size")
    if stage == 3 and mics is not None and read_number(mics) > 1:
        reading.set_key("plan.data", "mics", f"{ZERO}.mics_shard_size")
        reading.set_key("plan.mics", read_count(mics), f"{ZERO}.mics_shard_size")
        return True
    if stage == 3 and (hpz > 1 or any(quantised.values())):
        reading.set_key("plan.data", "zero-plus-plus", f"{ZERO}.zero_hpz_partition_size")
        for key, value in {"hpz": hpz > 1, **quantised}.items():
            reading.set_key(f"plan.data.{key}", value, f"{ZERO}.zero_hpz_partition_size")
        return True
    return False


def _set_infinity(reading: Reading, devices: Mapping[str, str]) -> None:
    """Sets ZeRO-Infinity. devices: where what is offloaded to."""
    names = {what: f"{ZERO}.offload_{what}.device" for what in devices}
    reading.set_key("plan.data", "zero-infinity", names["param"], names["optimizer"])
    for what, key, otherwise in (("param", "parameters", "gpu"), ("optimizer", "optimizer", "cpu")):
        place = devices[what] if devices[what] in ("cpu", "nvme") else otherwise
        reading.set_key(f"plan.data.{key}", place, names[what])


def _read_coordinator(reading: Reading, stage: int) -> None:
    """Reads how stage 3 gathers weights."""
    if reading.keys["plan.data"] in ("zero-3", "zero-infinity", "zero-plus-plus"):
        reading.read_rows(COORDINATOR)
        reading.keys.pop(BUCKET.key, None)
    if reading.keys["plan.data"] == "zero-3":
        reading.read_rows([PERSISTENCE])
    else:
        stated = reading.take(PERSISTENCE.name)
        if stage == 3 and stated is not None and not is_null(stated.value):
            reading.approximate(stated, f"with data/{reading.keys['plan.data']} all parameters are sharded")
    reading.take(*(row.name for row in COORDINATOR))


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job by their dotted names."""
    settings = write_rows(ROWS, keys)
    data, dp = str(keys.get("plan.data", "ddp")), keys.get("plan.dp", 1)
    settings["gradient_accumulation_steps"] = max(1, keys["batch.global"] // (dp * keys["batch.micro"]))
    stage = {"ddp": 0, "zero-1": 1, "zero-2": 2, "zero-offload": 2}.get(data, 3)
    settings["zero_optimization.stage"] = stage
    settings["zero_optimization.overlap_comm"] = keys.get("framework.set.overlap.dp", False)
    if data == "zero-offload" or (
        data in ("zero-1", "zero-2", "zero-3") and "optimizer" in keys.get("plan.offload", ())
    ):
        settings["zero_optimization.offload_optimizer.device"] = "cpu"
    elif data == "zero-infinity":
        settings["zero_optimization.offload_optimizer.device"] = keys.get("plan.data.optimizer", "cpu")
        if (parameters := keys.get("plan.data.parameters", "cpu")) != "gpu":
            settings["zero_optimization.offload_param.device"] = parameters
    elif data == "zero-plus-plus":
        each = keys.get("cluster.gpus_per_node", 8)
        settings["zero_optimization.zero_hpz_partition_size"] = each if keys.get("plan.data.hpz", True) else 1
        for key, name in QUANTISED:
            settings[f"{ZERO}.zero_quantized_{name}"] = keys.get(f"plan.data.{key}", True)
    elif data == "mics":
        settings["zero_optimization.mics_shard_size"] = dp // keys.get("plan.replicate", 1)
    if stage == 3 and data != "mics":
        settings.pop(BUCKET.name, None)
        settings |= write_rows(COORDINATOR, keys)
    if data == "zero-3":
        settings |= write_rows([PERSISTENCE], keys)
    compute = keys.get("precision.compute")
    settings |= {"bf16.enabled": True} if compute == "bf16" else {"fp16.enabled": True} if compute == "fp16" else {}
    settings["data_types.grad_accum_dtype"] = keys.get("precision.gradients", "fp32")
    return settings | {"optimizer.type": "AdamW", "gradient_clipping": 1.0}


def write(keys: Keys, header: list[str]) -> str:
    """A JSON file; JSON has no comments, so the header is the key ``_meshcast``, which DeepSpeed ignores."""
    comment = {"_meshcast": header} if header else {}
    return json.dumps({**comment, **nest(write_settings(keys))}, indent=2) + "\n"


def recognise(file: LaunchFile) -> Evidence:
    """A mapping with keys that only a DeepSpeed configuration has."""
    named = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & file.keys
    return Evidence.LIKELY if named else Evidence.NONE


DEEPSPEED = LaunchFormat("deepspeed", "DeepSpeed", ".json", recognise, read, interpret, write, VERDICTS)

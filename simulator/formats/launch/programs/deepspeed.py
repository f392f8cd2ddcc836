"""DeepSpeed: its JSON configuration. The model, sequences and most of the parallelism are code beside it.

Source: deepspeedai/DeepSpeed v0.19.8, deepspeed/runtime/config.py, runtime/zero/config.py and constants of both.
``auto`` is a value that Hugging Face's Trainer fills in from its arguments (`sharding.fill_auto`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.keys import nest
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.sharding import (
    BUCKET,
    BUFFERS,
    COORDINATOR,
    PERSISTENCE,
    QUANTISED,
    SAVING,
    SEQUENCE_FORMAT,
    Z,
    read_zero,
)
from meshcast.simulator.formats.launch.programs.trainer import assume_no_recomputation
from meshcast.simulator.formats.launch.programs.trainer_settings import DEEPSPEED_VERDICTS
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, SettingRow, SomeKeys, Stated, is_null, read_switch, write_rows

ROWS = (
    SettingRow("deepspeed.train_batch_size", "batch.global"),
    SettingRow("deepspeed.train_micro_batch_size_per_gpu", "batch.micro"),
    SettingRow("deepspeed.gradient_accumulation_steps", "batch.accumulated"),
    SettingRow("deepspeed.tensor_parallel.autotp_size", "plan.tp", silent=1),
    SettingRow("deepspeed.sequence_parallel_size", "plan.cp", silent=1),
)


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a JSON file."""
    return flatten_file(file, "deepspeed.", "{")


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows(ROWS)
    keys = reading.keys
    if keys["plan.cp"] > 1:
        reading.set_key("plan.sequence", "ulysses", "deepspeed.sequence_parallel_size")
    read_zero(reading)
    _read_precision(reading)
    read_optimizer(reading, "deepspeed.optimizer.type")
    _read_batch(reading)
    _read_checkpointing(reading)


def _read_checkpointing(reading: Reading) -> None:
    """Reads how layers are recomputed; the code of the model says whether they are."""
    why = "the code of the model says which layers are recomputed; none is forecast"
    section = [name for name in reading.stated if name.startswith("deepspeed.activation_checkpointing.")]
    assume_no_recomputation(reading, why, reading.take(*section[:1]))


def _read_batch(reading: Reading) -> None:
    """Reads the micro-batch: of several replicas, or left to the Trainer."""
    keys = reading.keys
    if "batch.micro" in keys:
        return
    stated = reading.take("deepspeed.train_micro_batch_size_per_gpu")
    if "batch.global" in keys:
        # DeepSpeedConfig._set_batch_related_parameters: a single pass of gradients without another number.
        keys["batch.per_rank"] = keys.get("batch.accumulated", 1)
    elif stated is not None and str(stated.value) == "auto":
        reading.ask_key("batch.micro", 1, "auto: arguments of the Trainer, which are not here, fill it in", stated)
    else:
        reading.ask_key("batch.micro", 1, "it states no batch", stated)


def _read_precision(reading: Reading) -> None:
    formats = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    switches = {name: reading.take(f"deepspeed.{name}.enabled") for name in formats}
    for name, stated in switches.items():
        if stated is not None and not is_null(stated.value) and read_switch(stated):
            reading.set_key("precision.compute", formats[name], f"deepspeed.{name}.enabled")
    if "precision.compute" not in reading.keys:
        auto = next(
            (stated for stated in switches.values() if stated is not None and str(stated.value) == "auto"), None
        )
        if auto is not None:
            why = "auto: arguments of the Trainer, which are not here, say the format of the computation"
            reading.ask_key("precision.compute", "bf16", why, auto)
        else:
            reading.set_key("precision.compute", "fp32")


def _write_infinity(keys: SomeKeys) -> Keys:
    """Writes what ZeRO-Infinity has in host memory or on disks."""
    settings: Keys = {f"{Z}.offload_optimizer.device": keys.get("plan.data.optimizer", "cpu")}
    if (ratio := keys.get("plan.data.ratio", 1)) != 1:
        settings[f"{Z}.offload_optimizer.ratio"] = ratio
    if (parameters := keys.get("plan.data.parameters", "cpu")) != "gpu":
        settings[f"{Z}.offload_param.device"] = parameters
    return settings


def _write_super_offload(keys: SomeKeys) -> Keys:
    """Writes updates of the host during the backward pass, which it makes where gradients are not clipped."""
    settings: Keys = {f"{Z}.offload_optimizer.device": "cpu", f"{Z}.offload_optimizer.super_offload": True}
    if (ratio := keys.get("plan.data.ratio", 1)) != 1:
        settings[f"{Z}.offload_optimizer.ratio"] = ratio
    return settings if keys.get("plan.data.clips") else settings | {"deepspeed.gradient_clipping": 0.0}


def _write_zenflow(keys: SomeKeys) -> Keys:
    """Writes which columns the GPU updates, and how often the host the others."""
    usual = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": False}
    section = {f"{Z}.zenflow.{name}": keys.get(f"plan.data.{name}", value) for name, value in usual.items()}
    return {f"{Z}.offload_optimizer.device": "cpu", **section}


HOST_UPDATES = {"zero-infinity": _write_infinity, "super-offload": _write_super_offload, "zenflow": _write_zenflow}
"""What writes the settings of data schemes whose optimizer states lie on the host."""


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the settings of a job by their dotted names in the file."""
    data, dp = str(keys.get("plan.data", "ddp")), keys.get("plan.dp", 1)
    settings: dict[str, Any] = write_rows((*ROWS, BUCKET), keys)
    settings["deepspeed.gradient_accumulation_steps"] = max(1, keys["batch.global"] // (dp * keys["batch.micro"]))
    for (name, key), kind in ((BUFFERS, bool), (SEQUENCE_FORMAT, str)):
        if key in keys:
            settings[name] = kind(keys[key])
    stage = {"ddp": 0, "zero-1": 1, "zero-2": 2, "zero-offload": 2, "zenflow": 2}.get(data, 3)
    settings[f"{Z}.stage"] = stage
    settings[f"{Z}.overlap_comm"] = keys.get("framework.set.overlap.dp", False)
    if data == "zero-offload" or (
        data in ("zero-1", "zero-2", "zero-3") and "optimizer" in keys.get("plan.offload", ())
    ):
        settings[f"{Z}.offload_optimizer.device"] = "cpu"
    elif data in HOST_UPDATES:
        settings |= HOST_UPDATES[data](keys)
    elif data == "zero-plus-plus":
        each = keys.get("cluster.gpus_per_node", 8)
        settings[f"{Z}.zero_hpz_partition_size"] = each if keys.get("plan.data.hpz", True) else 1
        for key, name in QUANTISED:
            settings[f"{Z}.zero_quantized_{name}"] = keys.get(f"plan.data.{key}", True)
    elif data == "mics":
        settings[f"{Z}.mics_shard_size"] = dp // keys.get("plan.replicate", 1)
    if stage == 3 and data != "mics":
        settings.pop(BUCKET.name, None)
        settings |= write_rows((*COORDINATOR, SAVING), keys)
    if data == "zero-3":
        settings |= write_rows([PERSISTENCE], keys)
    compute = keys.get("precision.compute")
    if compute in ("bf16", "fp16"):
        settings[f"deepspeed.{compute}.enabled"] = True
    settings["deepspeed.data_types.grad_accum_dtype"] = keys.get("precision.gradients", "fp32")
    settings["deepspeed.optimizer.type"] = "AdamW"
    settings.setdefault("deepspeed.gradient_clipping", 1.0)
    return {name.removeprefix("deepspeed."): value for name, value in settings.items()}


def write(keys: Keys, header: list[str]) -> str:
    """Writes a JSON file; JSON has no comments, so the header is the key ``_meshcast``, which DeepSpeed ignores."""
    comment = {"_meshcast": header} if header else {}
    return json.dumps({**comment, **nest(write_settings(keys))}, indent=2) + "\n"


def recognise(file: LaunchFile) -> Evidence:
    """Recognises a mapping with keys that only a DeepSpeed configuration has."""
    named = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & file.keys
    return Evidence.LIKELY if named else Evidence.NONE


DEEPSPEED = LaunchFormat("deepspeed", "DeepSpeed", ".json", recognise, read, interpret, write, DEEPSPEED_VERDICTS)

"""Megatron-DeepSpeed: arguments of Megatron-LM of 2021 to 2023, and the configuration of the DeepSpeed engine.

Both lineages: deepspeedai/Megatron-DeepSpeed @4efb479d and bigscience-workshop/Megatron-DeepSpeed @8387ae17,
megatron/arguments.py, megatron/training.py, pretrain_gpt.py. With ``--deepspeed`` the engine shards by the stage in its
configuration; ``--zero-stage`` only says where weights are created.
"""

from __future__ import annotations

import re
from dataclasses import replace

from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.megatron import (
    FLASH,
    OWN,
    has_megatron_arguments,
    is_with_deepspeed,
    read_batch,
    read_gpus,
    read_launch_arguments,
    read_precision,
    refuse_other_models,
)
from meshcast.simulator.formats.launch.programs.megatron_model import COMMAND_LINE, FORKS, read_shape
from meshcast.simulator.formats.launch.programs.megatron_plan import DEGREES, TRAITS, read_plan
from meshcast.simulator.formats.launch.programs.megatron_verdicts import FAST, LARGE, SMALL, VERDICTS, judge
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.sharding import Z, read_zero
from meshcast.simulator.formats.launch.programs.trainer_settings import DEEPSPEED_VERDICTS
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    UNSTATED,
    SettingRow,
    Stated,
    is_null,
    read_number,
    read_switch,
    read_words,
)
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdicts

ROWS = (
    SettingRow("ds_sequence_parallel_size", "plan.cp"),
    SettingRow("topk", "model.moe.top_k"),
)
"""Settings that Megatron-LM does not have."""

BATCHES = {
    "deepspeed.train_batch_size": "batch.global",
    "deepspeed.train_micro_batch_size_per_gpu": "batch.micro",
}
"""Batches of the configuration, which are those of the arguments."""


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the arguments of the start that counts, and those of its launchers."""
    return read_launch_arguments(file)


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    refuse_other_models(reading)
    _read_configuration(reading)
    reading.read_rows((*DEGREES, *ROWS))
    reading.read_rows(replace(row, silent=UNSTATED) for row in (*TRAITS, *OWN))  # the engine's profile has the others
    keys = reading.keys
    _read_experts(reading)
    read_shape(reading, (*COMMAND_LINE, *FORKS))
    read_batch(reading)
    read_plan(reading)
    if keys["plan.cp"] > 1:
        reading.set_key("plan.sequence", "ulysses", "ds_sequence_parallel_size")
    _read_precision(reading)
    _read_engine(reading)
    _read_recompute(reading)
    flash = reading.take_switch(*FLASH)
    reading.set_key("framework.set.attention", "flash" if flash else "unfused", *FLASH)
    if reading.take_switch("enable_zbh1_pipeline") and keys["plan.pp"] > 1:
        reading.set_key("plan.pipeline", "zb-h1", "enable_zbh1_pipeline")
    reading.take("no_pipeline_parallel")
    read_gpus(reading, "nnodes", "nproc_per_node")
    if (samples := reading.take_count("train_samples", decisive=False)) and "batch.global" in keys:
        reading.set_key("run.steps", max(1, samples // keys["batch.global"]), "train_samples")
    every = reading.take_count("save_interval", decisive=False)
    reading.set_checkpoints(every, False, "save_interval")


def _read_configuration(reading: Reading) -> None:
    """Adds the configuration of DeepSpeed, also where the script writes it."""
    stated = reading.take("deepspeed_config")
    reading.take("deepspeed")
    if stated is None and "deepspeed_config" in reading.stated:
        return  # it was asked for
    if stated is None or is_null(stated.value):
        why = "the stage of ZeRO is in a configuration of DeepSpeed, and no --deepspeed_config names it"
        reading.ask(None, why, "plan.zero=1")
        return
    file = reading.read_companion(stated)
    if file is not None:
        reading.add_stated(flatten_file(file, "deepspeed.", "{"))
    for name, key in BATCHES.items():
        plain = {"batch.global": "global_batch_size", "batch.micro": "micro_batch_size"}[key]
        value = reading.stated.get(name)
        if value is None or is_null(value.value):
            continue
        flag = reading.stated.get(plain)
        if flag is None:
            reading.add_stated({plain: value})
        elif not (flag.unknown or value.unknown) and str(flag.value) != str(value.value):
            why = f"it is {value.value}, and --{plain.replace('_', '-')} is {flag.value}: they contradict each other"
            reading.ask(reading.take(name), why, f"{key}={flag.value}")
            continue
        reading.ignore(reading.take(name), f"--{plain.replace('_', '-')} says it, too")
    reading.ignore(reading.take("deepspeed.gradient_accumulation_steps"), "the batches say it, too")


def _read_precision(reading: Reading) -> None:
    """Reads the number formats: those of the arguments, or of the configuration."""
    for half in ("bf16", "fp16"):
        stated = reading.take(f"deepspeed.{half}.enabled")
        if stated is not None and not is_null(stated.value) and read_switch(stated) and "bf16" not in reading.stated:
            reading.add_stated({half: stated})
    read_precision(reading)
    accumulated = reading.take_word("deepspeed.data_types.grad_accum_dtype")
    if accumulated in ("fp32", "bf16", "fp16"):
        reading.set_key("precision.gradients", accumulated, "deepspeed.data_types.grad_accum_dtype")


def _read_engine(reading: Reading) -> None:
    """Reads how the engine shards, offloads and updates."""
    keys = reading.keys
    stated = reading.take("zero_stage")
    stage = reading.stated.get(f"{Z}.stage")
    if stage is None and "deepspeed_config" in reading.stated and _has_configuration(reading):
        reading.set_key("plan.data", "ddp")
    else:
        offload = keys.pop("plan.offload", ())
        read_zero(reading)
        if offload and "plan.offload" not in keys:
            keys["plan.offload"] = offload
    formats = keys["precision.compute"], keys.get("precision.gradients", "fp32")
    if keys.get("plan.data") == "ddp" and formats == ("bf16", "fp32"):
        # BF16_Optimizer, which the engine takes without ZeRO, shares out the states (runtime/bf16_optimizer.py)
        reading.set_key("plan.data", "zero-1", "bf16", f"{Z}.stage")
    method = reading.stated.get("pp_partition_method")
    if method is not None and str(method.value).strip("'\"").lower() == "type:transformer|embedding":
        reading.take("pp_partition_method")
        reading.set_key("plan.partition", "ends-as-layers", "pp_partition_method")
    reading.set_key("framework.name", "megatron-deepspeed", "deepspeed")
    if stated is not None and stage is not None and read_number(stated) != read_number(stage):
        reading.ignore(stated, "the stage of the configuration counts; this one says where weights are made")
    _read_host(reading)
    read_optimizer(reading, "deepspeed.optimizer.type")


def _has_configuration(reading: Reading) -> bool:
    return any(name.startswith("deepspeed.") for name in reading.stated)


def _read_host(reading: Reading) -> None:
    """Reads what lies in host memory."""
    if reading.take_switch("cpu_optimizer") and reading.keys["plan.data"] in ("ddp", "zero-1", "zero-2"):
        reading.set_key("plan.offload", ("optimizer",), "cpu_optimizer")
    device = reading.take_word("remote_device")
    if device in ("cpu", "nvme") and reading.keys["plan.data"] == "zero-3":
        reading.ask(reading.take("remote_device"), "weights are made in host memory", "plan.zero=3")


def _read_recompute(reading: Reading) -> None:
    """Reads checkpoints of activations that lie in host memory or are divided among tensor ranks."""
    reading.take("deepspeed_activation_checkpointing")
    host = reading.take("checkpoint_in_cpu", "deepspeed.activation_checkpointing.cpu_checkpointing")
    if (
        host is not None
        and not is_null(host.value)
        and read_switch(host)
        and reading.keys.get("plan.recompute") == "full"
    ):
        offload = (*reading.keys.get("plan.offload", ()), "activations")
        names = ("checkpoint_in_cpu", "deepspeed.activation_checkpointing.cpu_checkpointing")
        reading.set_key("plan.offload", offload, *names)
    divided = reading.take("partition_activations", "deepspeed.activation_checkpointing.partition_activations")
    if divided is not None and not is_null(divided.value) and read_switch(divided):
        reading.approximate(divided, "every tensor-parallel rank keeps the inputs of recomputed layers whole", LARGE)


def _read_experts(reading: Reading) -> None:
    """Reads experts: a single number for all layers that have them, in every other layer by default."""
    stated = reading.take("num_experts")
    if stated is None or is_null(stated.value):
        return
    counts = sorted({count for word in read_words(stated) if (count := read_digits(word)) is not None})
    if len(counts) != 1:
        why = "numbers of experts that differ from layer to layer are not described"
        reading.ask(stated, why, "model.moe.experts=64")
    if not counts:
        return
    if counts == [1]:
        reading.stated.pop("num_experts")
        return
    reading.stated["num_experts"] = replace(stated, value=counts[-1])
    reading.set_key("model.moe.experts", counts[-1], "num_experts")
    reading.add_stated({"moe_router_topk": Stated(reading.keys.get("model.moe.top_k", 1), "topk", stated.place)})
    every = reading.take_count("expert_interval") or 2
    reading.add_stated({"moe_layer_freq": Stated(every, "expert_interval", stated.place)})
    names = ("moe_expert_parallel_size", "ep_world_size")
    degree = reading.take_count(*names)
    reading.set_key("plan.ep", degree or 1, *names)
    if not reading.take_switch("enable_expert_tensor_parallelism"):
        reading.set_key("plan.etp", 1)
        reading.add_stated({"expert_tensor_parallel_size": Stated(1, "enable_expert_tensor_parallelism", stated.place)})
    reading.add_stated({"moe_token_dispatcher_type": Stated("alltoall", "num_experts", stated.place)})


OWN_VERDICTS: Verdicts = {
    "ds_sequence_parallel_fpdt.*": Decision("sequences are computed chunk by chunk", ("plan.cp=1",)),
    **judge(
        NoInfluence("--checkpoint-activations says whether layers are recomputed"),
        r"deepspeed\.activation_checkpointing\..*|contigious_checkpointing|synchronize_each_layer",
    ),
    r"deepspeed\.(curriculum|data_efficiency|random_ltd).*|curriculum.*": Approximation(
        "a step with sequences of full length is forecast", "the forecast is too slow early in the run"
    ),
    "force_ds_sequence_parallel|zero_stage|zero_.*|DDP_impl|moe_.*capacity.*|load_teacher": NoInfluence(
        "the configuration of DeepSpeed, or another setting, says it"
    ),
    "deepspeed.elastic_checkpoint": NoInfluence("it is about checkpoints, which no step of training waits for"),
    "use_bnb_optimizer": Approximation("Adam with states in 32 bits is forecast", LARGE),
    "remote_device|cpu_torch_adam": NoInfluence("it is of weights or states that lie in host memory"),
    "pp_partition_method": Approximation("layers are divided evenly over the stages", f"{FAST}, or {SMALL}"),
}
"""Verdicts on settings that Megatron-LM does not have."""


def recognise(file: LaunchFile) -> Evidence:
    """Arguments of Megatron-LM together with those of DeepSpeed."""
    if not is_with_deepspeed(file) or file.launch is None:
        return Evidence.NONE
    has_flags = has_megatron_arguments(file.launch.arguments)
    is_entry = re.search(r"(^|/)pretrain_\w+\.py$", file.launch.entry)
    return Evidence.CERTAIN if has_flags and is_entry else Evidence.LIKELY if has_flags else Evidence.NONE


MEGATRON_DEEPSPEED = LaunchFormat(
    "megatron-deepspeed",
    "Megatron-DeepSpeed",
    ".sh",
    recognise,
    read,
    interpret,
    None,
    {**OWN_VERDICTS, **DEEPSPEED_VERDICTS, **VERDICTS},
)

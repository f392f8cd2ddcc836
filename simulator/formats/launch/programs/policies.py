"""What trainers of policies share: models by their id, on FSDP or on Megatron-Core, with rollouts or without.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core; pytorch, torch/distributed/fsdp and tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshcast.simulator.formats.launch.programs.megatron_plan import DEGREES, TRAITS, read_plan, read_recipe
from meshcast.simulator.formats.launch.programs.trainer import EVERYWHERE, set_targets
from meshcast.simulator.formats.launch.programs.trainer_settings import SHORT
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    ON,
    SettingRow,
    Stated,
    is_null,
    read_number,
    read_switch,
    read_words,
)
from meshcast.simulator.formats.launch.verdicts import Approximation
from meshcast.simulator.models.adapter_targets import ALL_LINEAR

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Number formats by their names."""

MOVED = Approximation(
    "it lies in host memory between the phases of a step and comes back for the update: the copies are left out",
    "the step is too short",
)
"""On what moves to host memory for the time of a rollout."""


def ask_about_rollout(reading: Reading, stated: Stated | None, name: str) -> None:
    """Asks whether the training step alone is meant.

    stated: the setting of the rollout.
    name: what generates.
    """
    why = f"it generates in every step, by a rollout ({name or 'no engine is named'}), which meshcast does not forecast"
    reading.ask(stated, f"{why}: the answer is an update of the policy alone", "train.mode=full", "train.mode=lora")


def read_policy(reading: Reading, name: str) -> None:
    """Reads the model by its id or its folder, of which the last part counts where nothing says what is above it."""
    stated = reading.stated.get(name)
    if stated is not None and stated.unknown and "$" not in (last := str(stated.value).rstrip("/").rpartition("/")[2]):
        reading.stated[name] = replace(stated, value=last, unknown=())
    reading.read_model(name)


def approximate_reinforcement(reading: Reading, stated: Stated | None) -> None:
    """Lists what else a step of reinforcement learning does."""
    why = "generation, rewards, and the passes of the reference and the critic are left out"
    reading.approximate(stated, why, "the step is too short, and the memory too small by the other models")


def add_defaults(reading: Reading, defaults: Mapping[str, Any]) -> None:
    """Adds what the program's configuration has where the file does not have it."""
    where = f"default of {reading.program}"
    reading.add_stated({name: Stated(value, name, where) for name, value in defaults.items()})


FUSION = SettingRow("gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", ON, silent=False)
"""A switch that is off in the configuration of Megatron-Core, and on where its command line says nothing."""


def read_megatron_step(reading: Reading) -> None:
    """Reads degrees, sharding, recomputation and number formats in the words of Megatron-Core."""
    reading.read_rows((*DEGREES, *TRAITS, FUSION))
    read_plan(reading, silent_share=0.0)
    read_recipe(reading, "bf16")
    if reading.take_count("recompute_num_layers") == 1:
        reading.ignore(reading.take("recompute_num_layers"), "each layer is recomputed alone")
    stated = reading.take("grad_reduce_in_fp32")
    if stated is not None and not is_null(stated.value):
        reading.set_key("precision.gradients", "fp32" if read_switch(stated) else "bf16", "grad_reduce_in_fp32")
    reading.set_key("framework.set.regime", "family")
    predicted = reading.take("mtp_num_layers")
    if predicted is not None and not is_null(predicted.value) and read_number(predicted) > 0:
        reading.approximate(predicted, "the layers that predict further tokens are left out", SHORT)
    reading.take("use_precision_aware_optimizer")
    for key, name in (("main_weights", "main_params_dtype"), ("moments", "exp_avg_dtype")):
        if (word := reading.take_word(name).removeprefix("torch.")) in FORMATS:
            reading.set_key(f"precision.{key}", FORMATS[word], name)


VERSIONS = {"fsdp": 1, "fsdp2": 2}
"""Versions of FSDP by their names."""


def shard(reading: Reading, *names: str) -> None:
    """Sets that data-parallel ranks share out weights, gradients and states. names: of the settings that say so."""
    reading.set_key("plan.data", "fsdp", *names)


def set_fsdp(reading: Reading, version: int, *names: str) -> None:
    """Sets FSDP over a model of transformers, with weights in fp32 that are gathered and computed with in 16 bits.

    version: of FSDP. names: of the settings that say so.
    """
    for name in names:
        reading.take(name)
    reading.set_key("framework.name", "hf-trainer")
    reading.set_key("framework.set.regime", "unknown")
    shard(reading, *names)
    reading.set_key("framework.set.gathers_apart", version == 2, *names)
    for key, word in (("gradients", "fp32"), ("main_weights", "fp32"), ("moments", "fp32")):
        reading.set_key(f"precision.{key}", word)


def set_compute(reading: Reading, *names: str) -> None:
    """Sets the format of the products. names: of its setting."""
    word = reading.take_word(*names).removeprefix("torch.") or "bfloat16"
    if word not in FORMATS:
        reading.ask(reading.take(*names), f"understood are {', '.join(FORMATS)}", "precision.compute=bf16")
    reading.set_key("precision.compute", FORMATS.get(word, "bf16"), *names)


def set_rank(reading: Reading, switch: str, rank: int, targets: str) -> None:
    """Sets low-rank adapters.

    switch: name of the setting that says so.
    targets: of that of their layers.
    """
    reading.set_key("train.mode", "lora", switch)
    reading.set_key("train.rank", rank, switch)
    stated = reading.take(targets)
    words = [word.lower() for word in read_words(stated)] if stated is not None and not is_null(stated.value) else []
    everywhere = not words or bool({*words} & {*EVERYWHERE, "true"})
    set_targets(reading, [ALL_LINEAR] if everywhere else words, stated or reading.take(switch), targets)

"""Jobs as arguments of programs on Hugging Face's Trainer: what LLaMA-Factory, Axolotl and Accelerate share.

Sections that these programs read from a separate file (DeepSpeed, FSDP) stand inside theirs, which both take.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.launch.keys import compose_model, nest
from meshcast.simulator.formats.launch.programs.deepspeed import write_settings
from meshcast.simulator.formats.launch.programs.evaluations import MICRO
from meshcast.simulator.formats.launch.programs.optimizers import MOMENT_COPIES
from meshcast.simulator.formats.launch.programs.sharding import FSDP, STATE_DICTS
from meshcast.simulator.formats.launch.table import Keys, SomeKeys
from meshcast.simulator.ir.ops import STORED_FORMATS
from meshcast.simulator.models.adapter_targets import DOWNS, UPS
from meshcast.simulator.models.load import find_id_of_shape, find_model, load_model, model_source

ATTENTIONS = {"flash-2": "flash_attention_2", "flash-3": "flash_attention_3", "sdpa": "sdpa"}
"""``attn_implementation`` by the library of attention."""

MODULES: dict[str, tuple[str, ...]] = {
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    **{"attn_q": ("q_proj",), "attn_k": ("k_proj",), "attn_v": ("v_proj",)},
    "attn_proj": ("o_proj",),
    **{"attn_q_down": ("q_a_proj",), "attn_q_up": ("q_b_proj",)},
    **{"attn_kv_down": ("kv_a_proj_with_mqa",), "attn_kv_up": ("kv_b_proj",)},
    **{"mixer_in": ("in_proj",), "mixer_out": ("out_proj",)},
    **dict.fromkeys(UPS, ("gate_proj", "up_proj")),
    **dict.fromkeys(DOWNS, ("down_proj",)),
    **{"router": ("gate",), "shared_gate": ("shared_expert_gate",)},
}
"""Modules of models of transformers by the targets of adapters."""


def name_adapted_modules(keys: SomeKeys) -> list[str]:
    """Returns the modules of transformers that have adapters."""
    return list(dict.fromkeys(name for target in keys.get("train.targets", ()) for name in MODULES[target]))


OPTIMIZER_WORDS = {
    **{"adam-8bit": "adamw_bnb_8bit", "adam-4bit": "adamw_torch_4bit", "lion": "lion_32bit", "lion-8bit": "lion_8bit"},
    **{"ademamix": "ademamix", "ademamix-8bit": "ademamix_8bit", "sgd": "sgd", "adafactor": "adafactor"},
    "muon": "muon",
}
"""``optim`` by the optimizers of jobs, beside Adam."""

USUAL_DROPOUT = 0.05
"""Dropout of the inputs of adapters, where a job says that there is some; TRL's default."""


def name_model(keys: SomeKeys) -> str | None:
    """Returns the id on the hub of a model of this shape, or the preset; None where only a config.json says it."""
    shape = nest({key: value for key, value in keys.items() if key != "model.moe.routing"}, "model")  # no id says it
    model = compose_model(shape)
    if not isinstance(model, str):
        return find_id_of_shape(load_model(shape))
    hub = re.search(r"Hugging Face ([\w.-]+/[\w.-]+)", model_source(model))
    return hub[1] if hub is not None and find_model(hub[1]) == model else model


def count_passes(keys: SomeKeys) -> int:
    """Returns the micro-batches of a replica in a step."""
    return max(1, keys["batch.global"] // (keys["plan.dp"] * keys["batch.micro"]))


def name_attention(keys: SomeKeys) -> str | None:
    """``attn_implementation`` of a job; None where the profile has no word for it."""
    if keys.get("framework.set.attention") == "unfused":
        return "eager"
    return ATTENTIONS.get(keys.get("framework.set.attention_library", ""))


def compares_pairs(keys: SomeKeys) -> bool:
    """Returns whether a training compares pairs of texts with a reference: a micro-batch has whole pairs."""
    return bool(keys.get("train.reference")) and keys["batch.micro"] % 2 == 0 and keys["batch.global"] % 2 == 0


def count_pairs(keys: Keys) -> Keys:
    """Returns the keys of a job with samples in its batch, of which each is two sequences where it compares pairs."""
    if not compares_pairs(keys):
        return keys
    sizes = ("batch.micro", "batch.global", "run.evaluation.micro")
    return {**keys, **{name: keys[name] // 2 for name in sizes if name in keys}}


def recomputes(keys: SomeKeys) -> bool:
    """Returns whether all layers are recomputed."""
    return bool(keys.get("plan.recompute") == "full")


def fuses_loss(keys: SomeKeys) -> bool:
    """Returns whether the loss is computed over chunks of the tokens by Liger's kernels or Apple's."""
    return bool(keys.get("framework.set.loss.chunk_tokens") == "liger")


def name_optimizer(keys: SomeKeys) -> str:
    """``optim`` of a job; AdamW of PyTorch by its implementation."""
    if (word := OPTIMIZER_WORDS.get(keys.get("optimizer", "adam"))) is not None:
        return word
    copies = keys.get("framework.set.update.moment_copies", 0)
    return next(name for name, number in MOMENT_COPIES.items() if number == min(copies, 1))


def has_adapters(keys: SomeKeys) -> bool:
    """Returns whether adapters alone are trained."""
    return keys.get("train.mode") in ("lora", "qlora")


def count_frozen_bits(keys: SomeKeys) -> int:
    """Returns the bits of the matrices under adapters: 4, 8 or 16."""
    stored = keys.get("train.frozen_weights") or ("nf4-double" if keys.get("train.mode") == "qlora" else "bf16")
    return round(8 * STORED_FORMATS[stored].codes) if stored in STORED_FORMATS else 16


def quantises_scales(keys: SomeKeys) -> bool:
    """Returns whether the scales of 4-bit blocks are quantised themselves."""
    return keys.get("train.frozen_weights", "nf4-double") == "nf4-double"


def offloads(keys: SomeKeys, state: str) -> bool:
    """Returns whether a state, activations or that of the optimizer, lies in host memory."""
    return state in keys.get("plan.offload", ())


def shards_by_fsdp(keys: SomeKeys) -> bool:
    """Returns whether FSDP shards."""
    return bool(keys.get("plan.data") == FSDP)


def shards_by_deepspeed(keys: SomeKeys) -> bool:
    """Returns whether the engine of DeepSpeed runs a job."""
    return str(keys.get("plan.data", "ddp")) not in ("ddp", FSDP) or keys.get("framework.name") == "deepspeed"


def is_second_fsdp(keys: SomeKeys) -> bool:
    """Returns whether FSDP 2 is written: it has other degrees, and gathers into buffers."""
    degrees = any(keys.get(f"plan.{degree}", 1) > 1 for degree in ("tp", "cp"))
    return degrees or bool(keys.get("framework.set.gathers_apart"))


def write_fsdp(keys: SomeKeys, version: str = "version") -> Keys:
    """Writes the section ``fsdp_config``. version: name of its version."""
    section: Keys = {version: 2 if is_second_fsdp(keys) else 1, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if is_second_fsdp(keys):
        section["reshard_after_forward"] = keys.get("plan.data.reshard", True)
    elif keys.get("plan.data.backward_prefetch", True):
        section["backward_prefetch"] = "BACKWARD_PRE"
    if keys.get("plan.data.offload"):
        section["offload_params"] = True
    if not keys.get("framework.set.memory.each_rank_loads", True):
        section["cpu_ram_efficient_loading"] = True
    names = {saves: name for name, saves in reversed(STATE_DICTS.items())}
    if (name := names.get(keys.get("framework.set.memory.saves", ""))) is not None:
        section["state_dict_type"] = name.upper()
    return section


def name_strategy(keys: SomeKeys) -> str:
    """Returns the strategy of FSDP 1 in small letters; FSDP 2 has the first two."""
    reshard = keys.get("plan.data.reshard", True)
    if is_hybrid(keys) and not is_second_fsdp(keys):
        return "hybrid_shard" if reshard else "hybrid_shard_zero2"
    return "full_shard" if reshard else "shard_grad_op"


def is_hybrid(keys: SomeKeys) -> bool:
    """Returns whether shards have copies."""
    return bool(keys.get("plan.replicate", 1) > 1)


def write_evaluation(keys: SomeKeys) -> Keys:
    """Writes evaluations, of separate micro-batches; none where a job does not say it."""
    micro = keys.get(MICRO)
    return {} if micro is None else {"eval_strategy": "steps", "per_device_eval_batch_size": micro}


def write_deepspeed(keys: SomeKeys) -> Keys:
    """Writes the configuration of DeepSpeed, as a section."""
    return nest(write_settings(keys))


def write_formats(keys: SomeKeys) -> Keys:
    """Writes the switches of mixed precision."""
    compute = keys.get("precision.compute")
    return {str(compute): True} if compute in ("bf16", "fp16") else {}

"""LLaMA-Factory: its arguments in a YAML or JSON file or a command, for ``llamafactory-cli train``.

Source: hiyouga/LLaMA-Factory v0.9.5, src/llamafactory/hparams (parser.py, model_args.py, data_args.py,
finetuning_args.py), model/model_utils/checkpointing.py, model/adapter.py, launcher.py.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.optimizers import set_optimizer
from meshcast.simulator.formats.launch.programs.trainer import (
    TrainerProgram,
    follow_file,
    offload_checkpoints,
    read_trainer_file,
    read_training,
    set_adapters,
    set_attention,
    set_fused_loss,
    set_quantised_weights,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    LITTLE,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    SHORT,
    VERDICTS,
    table,
)
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, is_null, read_switch
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision

PROGRAM = TrainerProgram(
    sequence=2048,
    sequence_names=("cutoff_len",),
    loads="fp32",
    checkpointing=True,
    checkpointing_names=("gradient_checkpointing", "activation_checkpointing"),
    reentrant=True,
)
"""model_args.py: ``disable_gradient_checkpointing`` and ``use_reentrant_gc``; data_args.py: ``cutoff_len``; adapter.py:
trained weights are cast to fp32."""

PREFERENCES = ("dpo", "kto")
"""Stages with a reference model."""

LLAMAFACTORY_VERDICTS = table(
    ("template tool_format default_system media_dir tokenized_path packing neat_packing buffer_size max_samples", DATA),
    ("enable_thinking preserve_thinking image_* video_* audio_* use_audio* crop_to_patches split_special*", DATA),
    ("new_special* init_special* add_special* disable_shuffling train_on_prompt mask_history data_shared*", DATA),
    ("use_swanlab swanlab* print_param_status ms_hub_token om_hub_token hf_hub_token profiler* profile_modules", NAMES),
    ("export_* infer_* vllm_* sglang_* do_sample temperature top_p top_k num_beams max_new_tokens max_length", NAMES),
    ("repetition_penalty length_penalty skip_special* use_kv_cache offload_folder enable_torch_profiler", NAMES),
    (
        "lora_alpha lora_dropout use_rslora loraplus* pref_* dpo_label* kto_* simpo_gamma ld_alpha eaft_alpha",
        OPTIMISATION,
    ),
    ("moe_aux_loss_coef asft_alpha use_dft_loss use_eaft_loss rope_scaling galore_* apollo_* badam_*", OPTIMISATION),
    ("quantization_method quantization_type double_quantization quantization_device_map train_from_scratch", LOADING),
    ("create_new_adapter adapter_name_or_path adapter_folder ref_model* reward_model*", LOADING),
    ("use_dora pissa_*", Approximation("adapters of plain LoRA are forecast", SHORT)),
    ("upcast_layernorm upcast_lmhead_output", Approximation("the usual formats are forecast", LITTLE)),
    ("use_asft_loss", Approximation("the pass of a reference model is left out", SHORT)),
    ("use_unsloth use_v1_kernels use_kt kt_*", Approximation("kernels of transformers are forecast", LONG)),
    ("fp8_backend fp8_enable*", Approximation("the recipe of Transformer Engine is forecast", LITTLE)),
    ("shift_attn mixture_of_depths use_llama_pro additional_target", Approximation("it is left out", EITHER)),
    (
        "use_mca use_hyper_parallel*",
        Decision("Megatron-Core runs the training, whose degrees are not read here", ("plan.tp=1",)),
    ),
)


def read(file: LaunchFile) -> dict[str, Stated]:
    """The settings of a file or a command; those behind its configuration file (``key=value``) count more."""
    settings = read_trainer_file(file)
    if file.launch is not None:
        for stated in file.launch.positional:
            name, equals, value = str(stated.value).partition("=")
            if equals and re.fullmatch(r"[\w.]+", name):
                settings[name] = Stated(value, name, stated.place, stated.unknown)
            else:
                settings.setdefault("configuration", stated)
    return settings


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    if (stated := reading.take("configuration")) is not None:
        follow_file(reading, stated)
    _read_switches(reading)
    read_training(reading, PROGRAM)
    _read_kernels(reading)
    _read_tuning(reading)
    _read_stage(reading)


def _read_switches(reading: Reading) -> None:
    """Turns the switch that disables checkpointing into the one of the Trainer."""
    stated = reading.take("disable_gradient_checkpointing")
    if stated is not None and not is_null(stated.value):
        is_on = not read_switch(stated)
        reading.stated["activation_checkpointing"] = Stated(is_on, stated.shown, stated.place)
    stated = reading.take("use_reentrant_gc")
    if stated is not None and not is_null(stated.value):
        reading.stated["gradient_checkpointing_kwargs.use_reentrant"] = stated
    if reading.take_word("accelerate.fsdp_config.version", "fsdp_config.version") == "2":
        # prepare_model_for_training: FSDP 2 takes no reentrant checkpoints.
        reading.stated["gradient_checkpointing_kwargs.use_reentrant"] = Stated(False, "fsdp_version")
    if take_on(reading, "pure_bf16") is not None:
        reading.stated |= {"torch_dtype": Stated("bfloat16", "pure_bf16", reading.stated["pure_bf16"].place)}


ATTENTIONS = {
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "sdpa": "sdpa",
    "disabled": "eager",
    "off": "eager",
}
"""``attn_implementation`` by ``flash_attn``."""


def _read_kernels(reading: Reading) -> None:
    word = reading.take_word("flash_attn")
    if word in ATTENTIONS:
        set_attention(reading, ATTENTIONS[word], "flash_attn")
    if (stated := take_on(reading, "enable_liger_kernel")) is not None:
        set_fused_loss(reading, stated)
    if take_on(reading, "use_unsloth_gc") is not None:
        offload_checkpoints(reading, "use_unsloth_gc")
    if take_on(reading, "fp8") is not None:
        reading.set_key("precision.compute", "fp8-delayed", "fp8")


def _read_tuning(reading: Reading) -> None:
    """Reads which weights are trained: without a word, adapters are."""
    kind = reading.take_word("finetuning_type") or "lora"
    bits = reading.take_count("quantization_bit") or 16
    stated = reading.take("finetuning_type")
    if kind in ("lora", "oft"):
        set_adapters(reading, stated, 8, ("lora_rank",), "lora_target", everywhere=True)
        if kind == "oft":
            reading.approximate(stated, "adapters of LoRA are forecast, not of OFT", "the step is too short")
    elif kind == "full":
        reading.set_key("train.mode", "full", "finetuning_type")
    else:
        why = "it trains some layers, which meshcast does not describe: it trains all weights, or adapters"
        reading.ask(stated, why, "train.mode=full", "train.mode=lora")
    if bits < 16:
        set_quantised_weights(reading, bits, reading.take("quantization_bit"))
    for name in ("badam", "galore", "apollo", "adam_mini", "muon"):
        if (optimizer := take_on(reading, f"use_{name}")) is not None:
            set_optimizer(reading, optimizer, name)


def _read_stage(reading: Reading) -> None:
    stage = reading.take_word("stage") or "sft"
    stated = reading.take("stage")
    if stage == "ppo":
        why = "PPO generates and scores in every step; meshcast forecasts a step of training alone"
        reading.ask(stated, why, "train.mode=full", "train.mode=lora")
    elif stage in (*PREFERENCES, "rm"):
        if stage in ("dpo", "rm"):
            double_samples(reading, stated)
        if stage in PREFERENCES:
            approximate_reference(reading, stated)
    if stage in ("pt", "sft"):
        reading.credits.setdefault("stage", [])


def double_samples(reading: Reading, stated: Stated | None) -> None:
    """Doubles the micro-batch: a sample is a pair of texts, chosen and rejected, which pass the model together."""
    micro = reading.keys.get("batch.micro")
    if micro:
        names = [name for name, entry in reading.stated.items() if entry is reading.origins.get("batch.micro")]
        reading.set_key("batch.micro", 2 * micro, *names)
        if (total := reading.keys.get("batch.global")) is not None:
            reading.set_key("batch.global", 2 * total, "deepspeed.train_batch_size")


def approximate_reference(reading: Reading, stated: Stated | None) -> None:
    """Lists that the reference model is left out."""
    why = "the reference model is left out: its weights in 16 bits, and its forward pass over the batch"
    errs = "the step is too short by a forward pass, and the memory too small by up to 2 bytes a parameter"
    reading.approximate(stated, why, errs)


# ------------------------------------------------------------------------------------------ recognising

STRONG = {"finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target", "quantization_bit", "plot_loss"}
"""Settings that no other program on the Trainer has together."""


def recognise(file: LaunchFile) -> Evidence:
    """Its command, or its settings."""
    names = set(file.keys)
    if file.launch is not None:
        if re.search(r"llamafactory-cli|llama_factory|llamafactory|^lmf ", file.launch.entry):
            return Evidence.CERTAIN
        names = set(file.launch.arguments)
    if "finetuning_type" in names and {"stage", "template", "cutoff_len"} & names:
        return Evidence.CERTAIN
    is_likely = "finetuning_type" in names or ("stage" in names and STRONG & names)
    return Evidence.LIKELY if is_likely else Evidence.NONE


LLAMAFACTORY = LaunchFormat(
    "llamafactory", "LLaMA-Factory", ".yaml", recognise, read, interpret, None, {**LLAMAFACTORY_VERDICTS, **VERDICTS}
)

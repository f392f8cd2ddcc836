"""LLaMA-Factory: its arguments in a YAML or JSON file or a command, for ``llamafactory-cli train``.

Source: hiyouga/LLaMA-Factory v0.9.5, src/llamafactory/hparams (parser.py, model_args.py, data_args.py,
finetuning_args.py), model/model_utils/checkpointing.py, model/adapter.py, launcher.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.keys import drop_inactive
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.megatron_model import omit_derived
from meshcast.simulator.formats.launch.programs.megatron_plan import DEGREES, TRAITS, read_plan, write_plan
from meshcast.simulator.formats.launch.programs.optimizers import set_optimizer
from meshcast.simulator.formats.launch.programs.sharding import FSDP, offload_checkpoints, read_accelerate, state_fsdp
from meshcast.simulator.formats.launch.programs.trainer import (
    LIGER_LOSS,
    TrainerProgram,
    approximate_divergence,
    approximate_freezing,
    double_samples,
    follow_file,
    list_names,
    read_trainer_file,
    read_training,
    set_adapters,
    set_attention,
    set_chunked_loss,
    set_quantised_weights,
    set_reference,
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
    list_verdicts,
)
from meshcast.simulator.formats.launch.programs.trainer_writing import (
    USUAL_DROPOUT,
    compares_pairs,
    count_frozen_bits,
    count_pairs,
    count_passes,
    fuses_loss,
    has_adapters,
    name_adapted_modules,
    name_attention,
    name_model,
    name_optimizer,
    name_strategy,
    offloads,
    quantises_scales,
    recomputes,
    shards_by_deepspeed,
    shards_by_fsdp,
    write_deepspeed,
    write_evaluation,
    write_formats,
    write_fsdp,
)
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.table import (
    Keys,
    SomeKeys,
    Stated,
    is_null,
    read_switch,
    write_rows,
)
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence
from meshcast.simulator.formats.launch.yaml_text import write_yaml

PROGRAM = TrainerProgram(
    sequence=2048,
    sequence_names=("cutoff_len",),
    loads="fp32",
    checkpointing=True,
    checkpointing_names=("gradient_checkpointing", "activation_checkpointing"),
    reentrant=True,
    framework="llama-factory",
)
"""model_args.py: ``disable_gradient_checkpointing`` and ``use_reentrant_gc``; data_args.py: ``cutoff_len``; adapter.py:
trained weights are cast to fp32."""

OLD_SEQUENCE = 1024
"""``cutoff_len`` before v0.8, whose script was train_bash.py."""

OWN_ENTRY = re.compile(r"llama[-_]?factory|(^|\s|/)src/train|train_bash\.py|(^|\s)lmf\s|bash|srun", re.IGNORECASE)
"""Starts of its scripts and commands, or of shells, inside of which they may be."""

PREFERENCES = ("dpo", "kto")
"""Stages with a reference model."""

LLAMAFACTORY_VERDICTS = list_verdicts(
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
    ("use_unsloth use_v1_kernels kt_*", Approximation("kernels of transformers are forecast", LONG)),
    ("fp8_enable*", Approximation("weights are gathered in 16 bits", LONG)),
    ("shift_attn use_llama_pro additional_target", Approximation("it is left out", EITHER)),
    ("mixture_of_depths", Decision("it changes the model", ("model=config.json",))),
    ("freeze_*", NoInfluence("finetuning_type says whether weights are frozen")),
    ("use_mca", NoInfluence("settings of Megatron-Core say it")),
    ("use_hyper_parallel*", Decision("it is not read", ("plan.tp=1",))),
    ("dist_config.* init_config.* kernel_config.* peft_config.* batching_*", LOADING),
    ("bias_activation_fusion apply_rope_fusion moe_grouped_gemm moe_token_dispatcher_type", LOADING),
    ("recompute_method recompute_num_layers", Approximation("all layers of a stage are recomputed", EITHER)),
)


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file or a command; those behind its configuration file (``key=value``) count more."""
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
    _refuse_other_tasks(reading)
    if (stated := take_on(reading, "use_kt")) is not None:
        rule = "KTransformers computes the experts on the CPU, which is no training that meshcast describes"
        raise stated.refuse(rule, "Leave it out to forecast the training on GPUs")
    if FIRST & reading.stated.keys():
        _read_first(reading)
    _read_switches(reading)
    launch = reading.file.launch
    old = launch is not None and re.search(r"train_bash\.py$", launch.entry) is not None
    program = replace(PROGRAM, sequence=OLD_SEQUENCE) if old else PROGRAM
    if launch is not None and not OWN_ENTRY.search(" ".join(word.text for word in launch.command.words)):
        program = replace(program, sequence=None)
        if not {"gradient_checkpointing", "activation_checkpointing"} & reading.stated.keys():
            why = "it is a script of another repository, whose default is not known; LLaMA-Factory recomputes layers"
            reading.ask_key("plan.recompute", "full", why)
    read_training(reading, program)
    _read_workers(reading)
    _read_kernels(reading)
    _read_tuning(reading)
    _read_casts(reading)
    _read_stage(reading)
    if MEGATRON & reading.stated.keys():
        _read_megatron(reading)


OTHER_TASKS: Mapping[str, str] = {
    **{"export_dir": "it merges adapters or converts a model", "peft_config.export_dir": "it merges adapters"},
    **{"do_predict": "it generates", "tokenized_path": "it prepares a data set"},
}
"""What a file does by settings that a training does not need."""


def _refuse_other_tasks(reading: Reading) -> None:
    """Raises PlanError for a file of another task: nothing is trained without ``do_train`` (workflow.py of stages)."""
    task = next((name for name in OTHER_TASKS if take_on(reading, name) is not None), None)
    if task is not None and take_on(reading, "do_train") is None:
        rule = f"{OTHER_TASKS[task]} ({task} without do_train), and trains nothing"
        raise PlanError(reading.file.where, rule, "Name the file of the training")


def _read_first(reading: Reading) -> None:
    """Gives the settings of the trainer of release 1 (USE_V1=1) the names of the older trainer.

    Source: src/llamafactory/v1/config/training_args.py, plugins/trainer_plugins/distributed/fsdp2.py.
    """
    names = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
    for name, older in names.items():
        if name in reading.stated:
            reading.stated[older] = reading.stated.pop(name)
    stated = reading.take("enable_activation_checkpointing")
    if stated is not None:
        reading.stated["activation_checkpointing"] = stated
    if reading.take_word("dist_config.name").startswith(FSDP):
        stated = reading.stated["dist_config.name"]
        state_fsdp(reading, stated, replace(stated, value=2))
    if size := reading.take_count("cp_size"):
        reading.set_key("plan.cp", size, "cp_size")
        scheme = "ulysses" if reading.take_word("cp_mode") == "ulysses" else "ring"
        reading.set_key("plan.sequence", scheme, "cp_mode", "cp_size")
    precision = reading.stated.get("bf16")
    if precision is None:
        reading.stated["bf16"] = Stated(True, "bf16", reading.file.where)
    elif not read_switch(precision):
        reading.ask_key("precision.compute", "bf16", "the checkpoint decides the format of weights", precision)
    if "finetuning_type" not in reading.stated:
        kind = reading.take_word("peft_config.name") or "full"
        reading.stated["finetuning_type"] = Stated(kind, "peft_config.name", reading.file.where)


FIRST = {"dist_config.name", "cp_mode", "peft_config.name", "init_config.name", "kernel_config.name"}
"""Settings of the trainer of release 1."""


def _read_switches(reading: Reading) -> None:
    """Turns switches of checkpointing, and of training in pure BF16, into those of the Trainer."""
    stated = reading.take("disable_gradient_checkpointing")
    if stated is not None and not is_null(stated.value):
        is_on = not read_switch(stated)
        reading.stated["activation_checkpointing"] = Stated(is_on, stated.shown, stated.place)
    stated = reading.take("use_reentrant_gc")
    if stated is not None and not is_null(stated.value):
        reading.stated["gradient_checkpointing_kwargs.use_reentrant"] = stated
    read_accelerate(reading)
    if reading.take_word("accelerate.fsdp_config.version") == "2":
        # prepare_model_for_training: FSDP 2 takes no reentrant checkpoints.
        reading.stated["gradient_checkpointing_kwargs.use_reentrant"] = Stated(False, "fsdp_version")
    if (stated := take_on(reading, *HALF)) is not None:
        reading.stated |= {"torch_dtype": Stated("bfloat16", stated.shown, stated.place)}


HALF = ("pure_bf16", "use_badam")
"""Switches with which trained weights keep 16 bits (``init_adapter`` of model/adapter.py)."""


def _read_workers(reading: Reading) -> None:
    """Reads how many GPUs it runs on: the variables of its launcher, workers of Ray, or a single GPU."""
    if (workers := reading.take_count("ray_num_workers")) is not None:
        reading.set_key("cluster.gpus", workers, "ray_num_workers")
    variables = reading.file.launch.environment if reading.file.launch is not None else {}
    counts = {
        name: count
        for name, word in variables.items()
        if name in ("NPROC_PER_NODE", "NNODES") and not word.unknown and (count := read_digits(word.text)) is not None
    }
    if each := counts.get("NPROC_PER_NODE"):
        set_gpus(reading, counts.get("NNODES"), each)
    layerwise = take_on(reading, "galore_layerwise", "apollo_layerwise")
    if layerwise is not None:  # parser.py refuses more GPUs
        reading.set_key("cluster.gpus", 1, "galore_layerwise", "apollo_layerwise")
        why = "gradients of a layer are gone before those of the next are there, which meshcast does not describe"
        reading.ask(layerwise, why, "precision.moments=bf16")


MEGATRON = {row.name for row in DEGREES if row.key in ("plan.tp", "plan.pp", "plan.cp", "plan.ep")}
"""Settings of Megatron-Core (USE_MCA=1: alibaba/ROLL, mcore_adapter/src/mcore_adapter/training_args.py)."""


def _read_megatron(reading: Reading) -> None:
    """Reads the settings of Megatron-Core, which then runs the training in place of the Trainer."""
    for key in [key for key in reading.keys if key.startswith(("framework.", "plan."))]:
        reading.keys.pop(key)
        reading.origins.pop(key, None)
    reading.read_rows((*DEGREES, *TRAITS))
    read_plan(reading)
    if "recompute_granularity" not in reading.stated:
        why = "disable_gradient_checkpointing does not count for Megatron-Core, and no other setting says it"
        reading.ask_key("plan.recompute", "none", why)


ATTENTIONS = {
    **{"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager", "off": "eager"},
    **{"flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_3"},
}
"""``attn_implementation`` by ``flash_attn``."""


def _read_kernels(reading: Reading) -> None:
    word = reading.take_word("flash_attn")
    if word in ATTENTIONS:
        set_attention(reading, ATTENTIONS[word], "flash_attn")
    if take_on(reading, "enable_liger_kernel") is not None:
        set_chunked_loss(reading, LIGER_LOSS, "enable_liger_kernel")
    if take_on(reading, "use_unsloth_gc") is not None:
        offload_checkpoints(reading, "use_unsloth_gc")
    if take_on(reading, "fp8") is not None:
        # fp8_utils.py: torchao scales rows, Transformer Engine tensors with the scales of earlier steps.
        engine = reading.take_word("fp8_backend") in ("te", "msamp")
        reading.set_key("precision.compute", "fp8-delayed" if engine else "fp8-rowwise", "fp8", "fp8_backend")


def _read_tuning(reading: Reading) -> None:
    """Reads which weights are trained: without a word, adapters are."""
    kind = reading.take_word("finetuning_type") or "lora"
    bits = reading.take_count("quantization_bit") or 16
    stated = reading.take("finetuning_type")
    if kind in ("lora", "oft"):
        set_adapters(reading, stated, 8, ("lora_rank",), "lora_target", everywhere=True)
        if reading.keys.get("precision.compute") == "fp32" and take_on(reading, "bf16", "fp16") is None:
            # patcher.py: frozen weights have the format of the checkpoint, and so has the computation.
            reading.assume("precision.compute", "bf16", "the format of the checkpoint, without bf16 and fp16")
            if reading.keys["framework.name"] != "deepspeed":  # without autocast products have the adapters' format
                reading.set_key("framework.set.adapters.products", "fp32")
            if reading.keys["plan.data"] == "ddp":  # adapter.py: trained weights are cast to fp32
                reading.set_key("precision.gradients", "fp32")
        if kind == "oft":
            reading.approximate(stated, "adapters of LoRA are forecast, not of OFT", "the step is too short")
    elif kind == "full":
        reading.set_key("train.mode", "full", "finetuning_type")
    else:
        approximate_freezing(reading, stated)
    if bits < 16:
        set_quantised_weights(reading, bits, reading.take("quantization_bit"))
    for name in ("badam", "galore", "apollo", "adam_mini", "muon"):
        if (optimizer := take_on(reading, f"use_{name}")) is not None:
            set_optimizer(reading, optimizer, name)


WHOLE_WEIGHTS = ("ddp", "zero-1", "zero-2", "zero-offload")
"""Schemes whose ranks have all weights."""


def _read_casts(reading: Reading) -> None:
    """Reads that all weights are cast to fp32 on the GPU, to which they were loaded (`device_map` of patcher.py), until
    the engine of DeepSpeed converts them; ranks of stage 3 load shards."""
    engine, whole = reading.keys["framework.name"], reading.keys["plan.data"] in WHOLE_WEIGHTS
    full = reading.keys.get("train.mode", "full") == "full"
    if engine == "deepspeed" and whole and full and take_on(reading, *HALF) is None:
        reading.set_key("framework.set.memory.loads", "fp32", "finetuning_type")


def _read_stage(reading: Reading) -> None:
    stage = reading.take_word("stage") or "sft"
    stated = reading.take("stage")
    if stage == "ppo":
        why = "PPO generates and scores in every step; meshcast forecasts a step of training alone"
        reading.ask(stated, why, "train.mode=full", "train.mode=lora")
    elif stage in (*PREFERENCES, "rm"):
        if stage in ("dpo", "rm"):
            double_samples(reading, stated)
        if stage in PREFERENCES and reading.take_word("pref_loss") not in ("orpo", "simpo"):
            set_reference(reading, stated)
        if stage == "kto":
            approximate_divergence(reading, stated)


# ------------------------------------------------------------------------------------------ recognising

STRONG = {"finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target", "quantization_bit", "plot_loss"}
"""Settings that no other program on the Trainer has together."""


def recognise(file: LaunchFile) -> Evidence:
    """Its command, or its settings."""
    names = list_names(file)
    if file.launch is not None and re.search(r"llamafactory-cli|llama_factory|llamafactory|^lmf ", file.launch.entry):
        return Evidence.CERTAIN
    if "finetuning_type" in names or ("stage" in names and STRONG & names):
        return Evidence.CERTAIN
    if "model" in names and {"dist_config", "peft_config", "init_config", "kernel_config"} & names:
        return Evidence.LIKELY
    return Evidence.NONE


# ---------------------------------------------------------------------------------------------- writing

FP8 = {"fp8-rowwise": "torchao", "fp8-delayed": "te"}
"""``fp8_backend`` by the recipe."""


def write(keys: Keys, header: list[str]) -> str:
    """Writes a YAML file, with the configurations of DeepSpeed and FSDP inside; for release 1 where sequences are
    sharded."""
    if keys.get("plan.cp", 1) > 1 and shards_by_fsdp(keys):
        return write_yaml(_write_first(keys), header)
    is_compared, keys = compares_pairs(keys), count_pairs(keys)
    settings: Keys = {
        "model_name_or_path": name_model(keys) or "config.json",
        "stage": "dpo" if is_compared else "sft",
        "do_train": True,
    }
    settings |= _write_tuning(keys)
    if is_compared and has_adapters(keys) and keys["train.reference"] == "model":
        settings["ref_model"] = settings["model_name_or_path"]
    settings |= {
        "template": "default",
        "cutoff_len": keys["batch.sequence"],
        "per_device_train_batch_size": keys["batch.micro"],
        "gradient_accumulation_steps": count_passes(keys),
        **write_formats(keys),
        "optim": name_optimizer(keys),
    }
    is_megatron = keys.get("framework.name") == "megatron-core"
    if not is_megatron:
        settings["disable_gradient_checkpointing"] = not recomputes(keys)
        settings["use_reentrant_gc"] = not keys.get("framework.set.recompute_early_stop", True)
    words = {implementation: word for word, implementation in list(ATTENTIONS.items())[:4]}
    if (name := name_attention(keys)) is not None:
        settings["flash_attn"] = words[name]
    if fuses_loss(keys):
        settings["enable_liger_kernel"] = True
    if keys.get("precision.compute") in FP8:
        settings |= {"bf16": True, "fp8": True, "fp8_backend": FP8[keys["precision.compute"]]}
    if keys.get("framework.set.compile"):
        settings["torch_compile"] = True
    if offloads(keys, "activations"):
        settings["use_unsloth_gc"] = True
    settings |= _write_megatron(keys) if is_megatron else _write_sharding(keys)
    if keys.get("run.steps"):
        settings["max_steps"] = keys["run.steps"]
    return write_yaml(settings | write_evaluation(keys), header)


def _write_first(keys: SomeKeys) -> Keys:
    """Writes the settings of the trainer of release 1, which alone shards sequences."""
    settings: Keys = {
        "model": name_model(keys) or "config.json",
        "cutoff_len": keys["batch.sequence"],
        "micro_batch_size": keys["batch.micro"],
        **(write_formats(keys) or {"bf16": False}),
        "enable_activation_checkpointing": recomputes(keys),
        "dist_config": {"name": "fsdp2"},
        "cp_mode": "ulysses" if keys.get("plan.sequence") == "ulysses" else "ring",
        "cp_size": keys["plan.cp"],
    }
    if (name := name_attention(keys)) is not None:
        settings["flash_attn"] = name
    if keys.get("run.steps"):
        settings["max_steps"] = keys["run.steps"]
    return settings


def _write_megatron(keys: SomeKeys) -> Keys:
    """Writes the settings of Megatron-Core (USE_MCA=1)."""
    said = drop_inactive(omit_derived(dict(keys)))
    return {"recompute_granularity": None, **write_rows((*DEGREES, *TRAITS), said), **write_plan(said)}


def _write_tuning(keys: SomeKeys) -> Keys:
    if not has_adapters(keys):
        return {"finetuning_type": "full"}
    modules = name_adapted_modules(keys)
    settings: Keys = {"finetuning_type": "lora", "lora_rank": keys.get("train.rank", 16)}
    settings["lora_target"] = ",".join(modules)
    if keys.get("train.dropout"):
        settings["lora_dropout"] = USUAL_DROPOUT
    if (bits := count_frozen_bits(keys)) < 16:
        settings |= {"quantization_bit": bits, "quantization_method": "bnb"}
        settings |= {"double_quantization": quantises_scales(keys)} if bits == 4 else {}
    return settings


def _write_sharding(keys: SomeKeys) -> Keys:
    if shards_by_deepspeed(keys):
        return {"deepspeed": write_deepspeed(keys)}
    if shards_by_fsdp(keys):
        return {FSDP: f"{name_strategy(keys)} auto_wrap", "fsdp_config": write_fsdp(keys)}
    is_pure = keys.get("precision.main_weights") == "bf16" and not has_adapters(keys)
    return {"pure_bf16": True} if is_pure else {}


LLAMAFACTORY = LaunchFormat(
    "llamafactory",
    "LLaMA-Factory",
    ".yaml",
    recognise,
    read,
    interpret,
    write,
    {**LLAMAFACTORY_VERDICTS, **VERDICTS},
    remark=lambda keys: ["It names no data set and no template of a chat: add dataset, and the template of the model."],
)

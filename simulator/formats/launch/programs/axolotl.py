"""Axolotl: its YAML file, for ``axolotl train`` or ``accelerate launch -m axolotl.cli.train``.

Source: axolotl-ai-cloud/axolotl v0.19.0, src/axolotl/utils/schemas (config.py, training.py, peft.py, validation.py,
enums.py), utils/distributed.py (_get_parallel_config_kwargs), utils/config/__init__.py (resolve_dtype),
core/builders/base.py, integrations/liger/args.py, integrations/cut_cross_entropy/args.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.evaluations import (
    MICRO,
    SEQUENCE,
    EvaluationSettings,
    has_any,
    read_evaluation,
)
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.sharding import set_replicas, state_fsdp
from meshcast.simulator.formats.launch.programs.trainer import (
    CUT_LOSS,
    LIGER_LOSS,
    WHOLE_LOGITS,
    TrainerProgram,
    approximate_divergence,
    double_samples,
    follow_file,
    read_trainer_file,
    read_training,
    set_adapters,
    set_attention,
    set_chunked_loss,
    set_classes,
    set_quantised_weights,
    set_reference,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    LITTLE,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    PADDING,
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
    offloads,
    quantises_scales,
    recomputes,
    shards_by_deepspeed,
    shards_by_fsdp,
    write_deepspeed,
    write_formats,
    write_fsdp,
)
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, SomeKeys, Stated, is_null, read_words
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence
from meshcast.simulator.formats.launch.yaml_text import write_yaml

PROGRAM = TrainerProgram(
    micro=1,
    micro_names=("micro_batch_size",),
    sequence=512,
    sequence_names=("sequence_len",),
    model_names=("base_model",),
    compute="bf16",
    loads="compute",
    reentrant=True,
    framework="axolotl",
    evaluation=None,
)
"""``bf16: auto`` is bf16 on every GPU that has it, and weights are loaded in that format. Checkpoints are reentrant
(`normalize_config` of src/axolotl/utils/config/__init__.py, v0.4.0 to v0.18.0)."""

NOT_REENTRANT = ("rl", "unfrozen_parameters")
"""Settings with which they are not (`_configure_gradient_checkpointing` of src/axolotl/core/builders/base.py)."""

AXOLOTL_VERDICTS = list_verdicts(
    ("datasets* test_datasets* pretraining_dataset* dataset_* sample_packing* eval_sample_packing multipack*", DATA),
    ("pretrain_* excess_length* min_sample_len train_on_inputs special_tokens* tokens added_tokens* roles*", DATA),
    ("default_system* eot_tokens chat_template* curriculum_sampling streaming* skip_prepare* processor_*", DATA),
    ("fix_untrained* noisy_embedding* group_by_length image_*", DATA),
    ("base_model_* model_type cls_model_config mean_resizing* shrink_* embeddings_skip* lora_model_dir", LOADING),
    (
        "overrides_of* device device_map max_memory gpu_memory_limit gptq bnb_config* strict ddp is_*_derived_model",
        LOADING,
    ),
    (
        "model_quantization_config model_quantization_config_kwargs.dequantize model_quantization_config_kwargs",
        LOADING,
    ),
    ("experimental_* qlora_sharded* lora_on_cpu peft_init* use_tensorboard", LOADING),
    ("saves_per_epoch do_bench* bench_* loss_watchdog* use_wandb use_mlflow use_comet gradio*", NAMES),
    ("use_otel* otel* use_trackio profiler* axolotl_config* num_dataset_shards* generat* dynamic_checkpoint*", NAMES),
    ("world_size", NAMES),
    (
        "cosine_* lora_alpha lora_dropout lora_fan_in* lora_modules_to_save* peft_use_rslora loraplus* orpo_alpha",
        OPTIMISATION,
    ),
    ("simpo_* cpo_alpha kto_* rl_beta dpo_* beta neftune* dion_* qgalore* galore_* torchdistx_path", OPTIMISATION),
    ("torch_compile_*", NoInfluence("the profile of a compiler has its defaults")),
    ("batch_flattening max_prompt_len use_pose pose_*", PADDING),
    (
        "liger_rope liger_rms_norm* liger_layer_norm liger_swiglu liger_glu_activation liger_use_token*"
        " liger_kernel_impl lora_*_kernel flash_attn_* use_kernels unsloth_*"
        " fused_attn_kernel experts_implementation use_scattermoe",
        Approximation("fused kernels are forecast as those of transformers", LONG),
    ),
    (
        "peft_use_dora lora_rank_pattern* peft_layers_* peft_layer_replication*",
        Approximation("adapters of plain LoRA are forecast on all layers", LITTLE),
    ),
    ("plugins", NoInfluence("what plugins change is in their settings")),
    ("heads_k_stride", Approximation("keys and values of all heads are gathered at once", "it needs more memory")),
    ("tiled_mlp_use_original_mlp", NoInfluence("both kinds of MLP are forecast as that of transformers")),
    (
        "selective_checkpointing*",
        Approximation("whole layers are recomputed", "the forecast is too slow"),
    ),
    (
        "relora* lisa* spectrum* unfrozen_parameters freeze_*",
        Decision("it says which weights are trained; meshcast trains all, or adapters", ("train.mode=full",)),
    ),
    ("qat*", Decision("training for quantisation adds kernels and formats", ("precision.compute=bf16",))),
    ("fp8_config* fp8_enable* quantization*", Approximation("the usual recipe is forecast", LITTLE)),
    ("deepcompile", Approximation("compilation by DeepSpeed is left out", LONG)),
    ("trl* vllm*", NoInfluence("rollouts are left out")),
    ("layer_offloading ple_cpu_offload", Decision("weights lie in host memory", ("plan.zero=3",))),
    ("batch_size", NoInfluence("gradient_accumulation_steps says it")),
)


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file or a command."""
    settings = read_trainer_file(file)
    if file.launch is not None:
        for stated in file.launch.positional:
            if str(stated.value).lower().endswith((".yaml", ".yml")):
                settings.setdefault("configuration", stated)
    return settings


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    if (stated := reading.take("configuration")) is not None:
        follow_file(reading, stated)
    _rename(reading)
    others = (stated for name, stated in reading.stated.items() if name.partition(".")[0] in NOT_REENTRANT)
    read_training(reading, replace(PROGRAM, reentrant=all(is_null(stated.value) for stated in others)))
    read_optimizer(reading, "optimizer")
    _read_degrees(reading)
    _read_kernels(reading)
    _read_tiles(reading)
    _read_adapters(reading)
    _read_evaluation(reading)
    _read_reinforcement(reading)
    quantised = reading.take("model_quantization_config")
    if quantised is not None and take_on(reading, "model_quantization_config_kwargs.dequantize") is None:
        why = "weights stay quantised, in a format that is not described"
        reading.ask(quantised, why, "precision.compute=bf16")
    if (packing := take_on(reading, "sample_packing")) is not None:
        why = "sequences are forecast as one text each, not as packed documents (state batch.documents)"
        reading.approximate(packing, why, "the time of attention is too long")


EVALUATION = EvaluationSettings(("eval_batch_size",), sequence="eval_sequence_len")
"""``eval_batch_size`` is ``micro_batch_size`` without a word (utils/config/__init__.py, normalize_config)."""

TIMES = ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")
"""Settings that say when there are evaluations; the Trainer has none without them."""


def _read_evaluation(reading: Reading) -> None:
    """Reads how many sequences an evaluation runs at once (core/builders/base.py,
    _configure_save_and_eval_strategy)."""
    lists = any(name.startswith("test_datasets") for name in reading.stated)
    aside = has_any(reading.take("val_set_size", decisive=False), False) or lists
    runs = aside and any(take_on(reading, name) is not None for name in TIMES)
    read_evaluation(reading, EVALUATION, runs, *TIMES, "val_set_size")


def _rename(reading: Reading) -> None:
    """Gives settings the names and values that the Trainer has for them."""
    stated = reading.stated
    version = reading.take("fsdp_version")
    section = next((entry for name, entry in stated.items() if name.startswith("fsdp_config.")), None)
    if section is not None:
        state_fsdp(reading, replace(section, shown="fsdp_config"), version)
    if str(getattr(stated.get("bf16"), "value", "")).lower() in ("auto", "full"):
        if stated["bf16"].value == "full":
            stated.setdefault("dtype", Stated("bfloat16", "bf16", stated["bf16"].place))
        stated["bf16"] = Stated(True, "bf16", stated["bf16"].place)
    for name, word in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")):
        if (entry := take_on(reading, name)) is not None:
            stated.setdefault("dtype", Stated(word, name, entry.place))
            stated.setdefault("bf16", Stated(False, name, entry.place))
    checkpointing = stated.get("gradient_checkpointing")
    if checkpointing is not None and re.match("offload|unsloth", str(checkpointing.value).lower()):
        stated["gradient_checkpointing"] = Stated(True, checkpointing.shown, checkpointing.place)
        stated.setdefault("activation_offloading", checkpointing)
    total = stated.get("batch_size")
    if total is not None and "gradient_accumulation_steps" not in stated:
        micro, count = reading.take_count("micro_batch_size") or 1, reading.take_count("batch_size") or 1
        stated["gradient_accumulation_steps"] = replace(total, value=max(1, count // micro))


def _read_degrees(reading: Reading) -> None:
    """Reads the sizes of the mesh: what they leave over are shards, or copies of them."""
    tensor, context = "tensor_parallel_size", ("context_parallel_size", "sequence_parallel_degree")
    ranks = 1
    for key, names in (("plan.tp", (tensor,)), ("plan.cp", context)):
        if size := reading.take_count(*names):
            reading.set_key(key, size, *names)
            ranks *= size
    if reading.keys.get("plan.cp", 1) > 1:
        # check_ring_attn: packed samples use the kernels of Llama 3's all-gather, others a ring.
        word = reading.take_word("ring_attn_func")
        gathers = "llama3" in word or (not word and take_on(reading, "sample_packing") is not None)
        reading.set_key("plan.sequence", "all-gather" if gathers else "ring", *context, "ring_attn_func")
    if experts := reading.take_count("expert_parallel_size"):
        reading.set_key("plan.ep", experts, "expert_parallel_size")
        if experts > 1:
            reading.set_key("plan.expert", "deepep", "expert_parallel_size")
    shards, copies = reading.take_count("dp_shard_size"), reading.take_count("dp_replicate_size")
    if shards and copies:
        set_replicas(reading, copies, shards, ("dp_replicate_size",), ("dp_shard_size",))
    elif copies and copies > 1:
        reading.set_key("plan.replicate", copies, "dp_replicate_size")
    elif shards:
        reading.set_key("plan.mics", shards, "dp_shard_size")
        if "cluster.gpus" not in reading.keys:
            reading.set_key("cluster.gpus", ranks * shards * (experts or 1), "dp_shard_size")


FP8 = "fp8-tensorwise"
"""What torchao computes with ``fp8``."""

ATTENTION_SWITCHES = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
}
"""``attn_implementation`` by the switches of older files."""


def _read_kernels(reading: Reading) -> None:
    switch = next((name for name in ATTENTION_SWITCHES if take_on(reading, name) is not None), None)
    if switch is not None and "attn_implementation" not in reading.stated:
        set_attention(reading, ATTENTION_SWITCHES[switch], switch)
    plugins = reading.stated.get("plugins")
    words = " ".join(read_words(plugins)) if plugins is not None else ""
    _read_loss(reading, words)
    if take_on(reading, "fp8") is not None:
        reading.set_key("precision.compute", FP8, "fp8")


def _read_loss(reading: Reading, plugins: str) -> None:
    """Reads a loss without the logits of all tokens. plugins: the names of all."""
    cut = reading.take("cut_cross_entropy")
    if take_on(reading, FUSED_LOSS) is not None:
        set_chunked_loss(reading, LIGER_LOSS, FUSED_LOSS)
    elif take_on(reading, "chunked_cross_entropy") is not None:
        reading.ignore(reading.take("chunked_cross_entropy_num_chunks"), "its kernels move as many bytes in any number")
        set_chunked_loss(reading, WHOLE_LOGITS, "chunked_cross_entropy")
    elif (fused := take_on(reading, "unsloth_cross_entropy_loss")) is not None:
        set_chunked_loss(reading, WHOLE_LOGITS, "unsloth_cross_entropy_loss")
        why = "the kernel of Unsloth is forecast as one that makes the gradient of logits in 16 bits beside them"
        reading.approximate(fused, why, "the forecast may need more memory, by up to 4 bytes a logit")
    elif cut is not None or "cut_cross_entropy" in plugins:
        if cut is None or not (is_null(cut.value) or str(cut.value).lower() == "false"):
            set_chunked_loss(reading, CUT_LOSS, "cut_cross_entropy", "plugins")


TILE = 32768
"""Tokens of a tile of an MLP (`_build_tiled_forward` of axolotl's src/axolotl/monkeypatch/tiled_mlp/patch.py)."""


def _read_tiles(reading: Reading) -> None:
    """Reads into how many tiles the MLPs of a sequence are cut."""
    number = reading.take_count("tiled_mlp_num_shards")
    if take_on(reading, "tiled_mlp") is None:
        reading.ignore(reading.take("tiled_mlp_num_shards"), "MLPs are not cut")
        return
    tokens = reading.keys.get("batch.sequence", 0) // reading.keys.get("plan.cp", 1)
    reading.set_key("plan.mlp_tiles", number or max(1, -(-tokens // TILE)), "tiled_mlp", "tiled_mlp_num_shards")


def _read_adapters(reading: Reading) -> None:
    stated = take_on(reading, "adapter")
    four, eight = take_on(reading, "load_in_4bit"), take_on(reading, "load_in_8bit")
    if stated is None:
        reading.set_key("train.mode", "full", "adapter")
        for name, entry in reading.stated.items():
            if name.startswith("lora_"):
                reading.ignore(reading.take(name) or entry, "no adapter is set")
        return
    everywhere = take_on(reading, "lora_target_linear") is not None
    set_adapters(reading, stated, 8, ("lora_r",), "lora_target_modules", everywhere=everywhere)
    if str(stated.value).lower() == "qlora" or four is not None:
        set_quantised_weights(reading, 4, four or stated)
    elif eight is not None:
        set_quantised_weights(reading, 8, eight)


def _read_reinforcement(reading: Reading) -> None:
    kind = reading.take_word("rl")
    stated = reading.take("rl")
    if kind in ("grpo", "gdpo", "ebft"):
        why = "it generates in every step, which meshcast does not forecast: the answer is a step of training alone"
        reading.ask(stated, why, "train.mode=full", "train.mode=lora")
    elif kind:
        if kind != "kto":
            double_samples(reading, stated)
        if kind in ("dpo", "ipo", "kto"):
            set_reference(reading, stated)
        if kind == "kto":
            approximate_divergence(reading, stated)
    if take_on(reading, "reward_model", "process_reward_model") is not None:
        double_samples(reading, reading.take("reward_model"))
        if take_on(reading, "process_reward_model") is not None:  # two labels of steps (docs/reward_modelling.qmd)
            set_classes(reading, 2, "process_reward_model")
            reading.set_key("model.output.pool", "none", "process_reward_model")
        else:
            set_classes(reading, 1, "reward_model")


def recognise(file: LaunchFile) -> Evidence:
    """Its command, or its settings."""
    if file.launch is not None:
        known = re.search(r"^axolotl\b|axolotl\.cli\.train|axolotl/cli", file.launch.entry)
        return Evidence.CERTAIN if known else Evidence.NONE
    if "base_model" in file.keys and {"micro_batch_size", "sequence_len", "datasets", "adapter"} & file.keys:
        return Evidence.CERTAIN
    return Evidence.LIKELY if "base_model" in file.keys else Evidence.NONE


# ---------------------------------------------------------------------------------------------- writing


FUSED_LOSS, LIGER = "liger_fused_linear_cross_entropy", "axolotl.integrations.liger.LigerPlugin"
"""The setting of a loss over chunks, and its plugin."""

CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
"""The plugin of a loss that never has all logits at once."""


def _write_activations(keys: SomeKeys) -> Keys:
    """Writes what becomes of activations beside recomputation."""
    settings: Keys = {"activation_offloading": True} if offloads(keys, "activations") else {}
    if tiles := keys.get("plan.mlp_tiles"):
        settings |= {"tiled_mlp": True, "tiled_mlp_num_shards": tiles}
    return settings


def write(keys: Keys, header: list[str]) -> str:
    """Writes a YAML file, with the configurations of DeepSpeed and FSDP inside."""
    is_compared, keys = compares_pairs(keys), count_pairs(keys)
    settings: Keys = {
        "base_model": name_model(keys) or "config.json",
        "sequence_len": keys["batch.sequence"],
        "micro_batch_size": keys["batch.micro"],
        "gradient_accumulation_steps": count_passes(keys),
        **(write_formats(keys) or {"bf16": False}),
        "optimizer": name_optimizer(keys),
        "gradient_checkpointing": recomputes(keys),
    }
    if recomputes(keys):
        is_reentrant = not keys.get("framework.set.recompute_early_stop", True)
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": is_reentrant}
    if (name := name_attention(keys)) is not None:
        settings["attn_implementation"] = name
    settings |= _write_activations(keys)
    settings |= _write_adapters(keys) if has_adapters(keys) else {}
    if is_compared:
        settings["rl"] = "dpo"
        settings |= {"rl_adapter_ref_model": True} if has_adapters(keys) and keys["train.reference"] == "model" else {}
    if fuses_loss(keys):
        is_cut = keys.get("framework.set.loss.recomputed")
        settings["plugins"] = [CUT_CROSS_ENTROPY if is_cut else LIGER]
        settings["cut_cross_entropy" if is_cut else FUSED_LOSS] = True
    if keys.get("precision.compute") == FP8:
        settings |= {"bf16": True, "fp8": True}
    if keys.get("framework.set.compile"):
        settings["torch_compile"] = True
    settings |= _write_sizes(keys) | _write_sharding(keys)
    if keys.get("run.steps"):
        settings["max_steps"] = keys["run.steps"]
    return write_yaml(settings | _write_evaluation(keys), header)


def _write_evaluation(keys: SomeKeys) -> Keys:
    """Writes evaluations, of separate micro-batches; none where a job does not say it."""
    if (micro := keys.get(MICRO)) is None:
        return {}
    settings: Keys = {"val_set_size": USUAL_SHARE, "eval_strategy": "epoch", "eval_batch_size": micro}
    length = keys.get(SEQUENCE, keys["batch.sequence"])
    return settings | ({"eval_sequence_len": length} if length != keys["batch.sequence"] else {})


USUAL_SHARE = 0.05
"""Share of the samples that is set aside, where a job says that there are evaluations: that of Axolotl's examples."""


def _write_adapters(keys: SomeKeys) -> Keys:
    modules = name_adapted_modules(keys)
    settings: Keys = {"adapter": "lora", "lora_r": keys.get("train.rank", 16), "lora_target_modules": modules}
    if keys.get("train.dropout"):
        settings["lora_dropout"] = USUAL_DROPOUT
    if (bits := count_frozen_bits(keys)) == 4:
        settings |= {"adapter": "qlora", "load_in_4bit": True}
        settings |= {} if quantises_scales(keys) else {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}
    elif bits == 8:
        settings["load_in_8bit"] = True
    return settings


def _write_sizes(keys: SomeKeys) -> Keys:
    copies = keys.get("plan.replicate", 1)
    sizes = {"tensor_parallel_size": keys.get("plan.tp", 1), "context_parallel_size": keys.get("plan.cp", 1)}
    if keys.get("plan.expert") == "deepep":
        sizes["expert_parallel_size"] = keys.get("plan.ep", 1)
    settings: Keys = {name: size for name, size in sizes.items() if size > 1}
    if sizes["context_parallel_size"] > 1:
        ring = keys.get("plan.sequence") == "ring"
        settings["ring_attn_func"] = "batch_ring" if ring else "varlen_llama3"
    if shards_by_fsdp(keys):
        settings |= {"dp_shard_size": keys["plan.dp"] // copies}
        settings |= {"dp_replicate_size": copies} if copies > 1 else {}
    return settings


def _write_sharding(keys: SomeKeys) -> Keys:
    if shards_by_deepspeed(keys):
        return {"deepspeed": write_deepspeed(keys)}
    if not shards_by_fsdp(keys):
        return {}
    section = write_fsdp(keys, "fsdp_version")
    return {"fsdp_version": section.pop("fsdp_version"), "fsdp_config": section}


AXOLOTL = LaunchFormat(
    "axolotl",
    "Axolotl",
    ".yaml",
    recognise,
    read,
    interpret,
    write,
    {**AXOLOTL_VERDICTS, **VERDICTS},
    remark=lambda keys: ["It names no data set: add datasets."],
)

"""What `swift` and `megatron` of ms-swift share: settings of all releases by the names of release 4, starts and files.

Source: modelscope/ms-swift @3602360a56 (release 4, August 2026), swift/cli/main.py (``NPROC_PER_NODE`` and ``NNODES``
start torchrun; a YAML or JSON file is arguments, its section ``ENV`` variables), swift/utils/env.py (``is_mp``);
@39bfc8a4ac (3.6) and @0e4e9c3446 (2.4), swift/llm/utils/argument.py, for names of releases 3 and 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import Launch
from meshcast.simulator.formats.launch.program import Evidence
from meshcast.simulator.formats.launch.programs.trainer import (
    STARTERS,
    approximate_divergence,
    double_samples,
    read_environment,
    read_trainer_file,
    set_classes,
    set_reference,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    LENGTH,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    PADDING,
    SHORT,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.table import Stated, is_null, read_words
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence

RENAMED: Mapping[str, str] = {
    **{"sft_type": "tuner_type", "train_type": "tuner_type", "model_id_or_path": "model", "dtype": "torch_dtype"},
    **{"batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size"},
    **{"quantization_bit": "quant_bits", "lora_target_modules": "target_modules", "use_liger": "use_liger_kernel"},
    **{"deepspeed_config_path": "deepspeed", "device_map_config": "device_map", "ref_model_id_or_path": "ref_model"},
    **{"lora_modules_to_save": "modules_to_save", "load": "mcore_model", "save_interval": "save_steps"},
}
"""Names of release 4 by those of releases 2 and 3."""

SECOND_RELEASE = {
    *("sft_type", "model_id_or_path", "batch_size", "quantization_bit", "lora_target_modules", "template_type"),
}
"""Settings that release 2 alone has."""

TUNERS = {"tuner_type", "train_type", "sft_type"}
"""Settings that no other program has."""

USUAL = {
    *("split_dataset_ratio", "load_from_cache_file", "model_author", "quant_bits", "truncation_strategy", "attn_impl"),
    *("target_modules", "torch_dtype", "loss_scale", "use_hf", "use_liger_kernel"),
}
"""Settings that files of ms-swift have, two of them beside ``model`` and ``dataset``."""

MEGATRON = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "mcore_model"),
    *("context_parallel_size", "micro_batch_size", "global_batch_size", "recompute_granularity", "attention_backend"),
}
"""Settings that `megatron` has, and `swift` has not."""

SHARED_VERDICTS = list_verdicts(
    ("load_from_cache_file split_dataset_ratio system model_author dataset_* streaming* strict lazy_tokenize", DATA),
    ("packing_num_proc packing_strategy loss_scale add_non_thinking* template*", DATA),
    ("truncation_strategy use_chat_template agent_template response_prefix custom_* external_plugins columns*", DATA),
    ("cached_* val_dataset* shuffle_buffer_size download_mode self_cognition* train_dataset_* train_dataloader*", DATA),
    ("max_pixels norm_bbox sequential_interleave* interleave_prob stopping_strategy tools_prompt", DATA),
    ("enable_thinking stop_words channels remove_unused_columns problem_type", DATA),
    ("preprocess_num_proc check_dataset_strategy use_loss_scale loss_scale_config* template_backend", DATA),
    ("max_new_tokens temperature top_k top_p do_sample num_beams repetition_penalty stream* logprobs", NAMES),
    ("model_name add_version create_checkpoint_symlink check_model* use_hf hub_* acc_strategy acc_steps", NAMES),
    (
        "early_stop_interval push_hub_strategy ignore_args_error swift_version report_to add_output_dir_suffix"
        " test_oom_error",
        NAMES,
    ),
    ("NODE_RANK MASTER_ADDR MASTER_PORT ddp_* load_args load_data_args merge_lora", LOADING),
    ("model_type model_revision model_kwargs* local_repo_path init_strategy new_special_tokens init_weights", LOADING),
    ("init_lora_weights use_ray config", LOADING),
    ("adapters ref_adapters modules_to_save quant_method bnb_4bit_* hqq_* lora_ga_*", LOADING),
    ("lora_alpha lora_dropout* use_rslora lorap_lr_ratio lora_lr_ratio vit_lr aligner_lr use_dft_loss", OPTIMISATION),
    ("beta rpo_alpha label_smoothing desirable* undesirable* loss_type cpo_alpha f_divergence*", OPTIMISATION),
    ("simpo_gamma ld_alpha loss_weights enable_dft_loss enable_channel_loss center_rewards*", OPTIMISATION),
    ("reward_* cosine_* repetition_* soft_* epsilon* delta tau_* importance_sampling* scale_rewards", OPTIMISATION),
    ("advantage_estimator kl_in_reward whiten_rewards kl_coef cliprange* gamma lam", OPTIMISATION),
    (
        "use_vllm vllm_* sleep_level offload_model offload_optimizer num_generations* max_completion_length"
        " move_model*",
        NoInfluence("it is about rollouts, which are left out"),
    ),
    (
        "steps_per_generation generation_batch_size num_iterations num_ppo_epochs num_mini_batches max_turns lmbda"
        " dynamic_sample multi_turn* async_generate log_completions log_entropy overlong_filter max_resample_times"
        " response_length missing_eos_penalty sync_ref_model ref_model_* seq_kd offload_bridge offload_teacher_model"
        " gkd_* chord_* fipo_* sft_alpha use_gym_env gym_env top_entropy_quantile gc_collect_after_offload",
        NoInfluence("it is about rollouts, which are left out"),
    ),
    (
        "freeze_vit freeze_aligner vit_gradient_checkpointing* vit_attn_impl",
        Approximation("the language model alone is forecast, without encoders of images", SHORT),
    ),
    (
        "freeze_parameters* freeze_llm trainable_parameters* additional_trainable_parameters target_parameters",
        Decision("it says which weights are trained", ("train.mode=full", "train.mode=lora")),
    ),
    ("group_by_length", PADDING),
    ("packing padding_free", Approximation("attention is forecast over whole sequences: state batch.documents", LONG)),
    ("num_train_epochs max_epochs", LENGTH),
    (
        "moe_expert_capacity_factor",
        Approximation("experts take all tokens that are routed to them", "the forecast is too slow if some drop"),
    ),
    ("target_regex", Approximation("adapters of all linear layers are forecast", SHORT)),
    ("lora_rank target_modules", NoInfluence("tuner_type says what is trained")),
    (
        "device_groups.*",
        Approximation("groups of GPUs of Ray are not read: the cluster says how many there are", "the GPUs may differ"),
    ),
    (
        "PYTORCH_* NCCL_* OMP_* TORCH_* HF_* USE_HF MODELSCOPE_* WANDB_* SWIFT_* *PIXELS *FRAMES FPS*",
        NoInfluence("a variable of libraries, with which meshcast forecasts their defaults"),
    ),
    ("reward_model value_model", NoInfluence("the models beside the one that is trained are left out")),
    (
        "teacher_*",
        Approximation("a step of the model alone is forecast, without a teacher", SHORT),
    ),
    ("use_dora lora_bias lora_dtype", Approximation("adapters of plain LoRA are forecast", "the step errs by little")),
    (
        "max_memory device_map",
        Decision("layers are spread over the GPUs of a process, which is no plan of meshcast", ("plan.pp=1",)),
    ),
)
"""On settings of both programs."""


VARIABLES: Mapping[str, str] = {
    **{"NPROC_PER_NODE": "launcher.nproc_per_node", "NNODES": "launcher.nnodes", "NODE_RANK": "launcher.node_rank"},
    **{"MASTER_ADDR": "launcher.master_addr", "MASTER_PORT": "launcher.master_port"},
}
"""Options of torchrun by the variables that ms-swift gives to it."""


def read_settings(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file or of a start by the names of release 4, with the variables that start processes."""
    settings = read_trainer_file(file)
    if file.launch is not None:
        for word in file.launch.positional[:1]:
            settings.setdefault("configuration", word)
        settings = {**read_environment(file.launch, *VARIABLES, VISIBLE), **settings}
    return rename_settings(settings)


def rename_settings(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings by the names of release 4; variables of a section ``ENV`` as those of a command."""
    plain = {name.removeprefix("ENV."): stated for name, stated in settings.items()}
    return {RENAMED.get(name, VARIABLES.get(name, name)): stated for name, stated in plain.items()}


def is_second_release(file: LaunchFile) -> bool:
    """Returns whether the settings are those of release 2."""
    names = {*file.keys, *(file.launch.arguments if file.launch is not None else ())}
    return bool(names & SECOND_RELEASE) or ("model_type" in names and "model" not in names)


KINDS = "sft|pt|rlhf|dpo|orpo|simpo"
"""Words behind the commands, the last three of release 2."""


def names_program(file: LaunchFile, program: str) -> bool:
    """Returns whether a start is that of `swift` or `megatron`: by its command, its module, or its script."""
    if file.launch is None:
        return False
    module = r"swift[/.]cli[/.]" if program == "swift" else r"swift[/.]cli[/.]_megatron[/.]"
    pattern = re.compile(rf"{program} ({KINDS})$|{module}({KINDS})(\.py)?$")
    words = (file.launch.entry, *(word.text for word in file.launch.command.words))
    return any(pattern.search(word) for word in words)


def weigh_settings(file: LaunchFile, is_megatron: bool) -> Evidence:
    """Returns how sure it is by its settings alone that a file is of ms-swift, or of Megatron-SWIFT."""
    names = set(file.launch.arguments) if file.launch is not None else set(file.keys)
    if bool(names & MEGATRON) != is_megatron:
        return Evidence.NONE
    is_likely = file.launch is None and {"model", "dataset"} <= names and len(names & USUAL) > 1
    return Evidence.CERTAIN if names & TUNERS else Evidence.LIKELY if is_likely else Evidence.NONE


def follow_configuration(reading: Reading) -> None:
    """Adds the settings of the YAML or JSON file that the command names."""
    stated = reading.take("configuration")
    if stated is not None and (file := reading.read_companion(stated)) is not None:
        reading.add_stated(rename_settings(read_trainer_file(file)))


# ------------------------------------------------------------------------------------------ processes


EACH, NODES, VISIBLE = "launcher.nproc_per_node", "launcher.nnodes", "CUDA_VISIBLE_DEVICES"


def count_processes(reading: Reading) -> None:
    """Reads how many processes of a GPU each are started."""
    each, nodes = reading.take_count(EACH, decisive=False), reading.take_count(NODES, decisive=False)
    visible = reading.take(VISIBLE, decisive=False)
    if each is not None:
        reading.ignore(visible, "NPROC_PER_NODE says how many processes of a GPU are started")
        set_gpus(reading, nodes, each, EACH, NODES)


def refuse_device_map(reading: Reading) -> None:
    """Raises PlanError where a process of the Trainer has several GPUs, over which it spreads the layers; without word
    of processes and of GPUs it is assumed to have a single GPU."""
    launch, visible = reading.file.launch, _count_visible(reading)
    each = reading.take_count(EACH, decisive=False)
    if each is not None:
        _refuse_several(reading, visible, each)
    elif launch is not None and not ({EACH, NODES} & reading.stated.keys() or STARTERS & _list_launchers(launch)):
        _refuse_several(reading, visible, 1)
        why = "without NPROC_PER_NODE it starts one process, which spreads the layers over all GPUs that it sees"
        if visible is None:
            reading.assume("cluster.gpus", 1, why)
        else:
            reading.set_key("cluster.gpus", 1, VISIBLE)


def _list_launchers(launch: Launch) -> set[str]:
    return {launcher.name for launcher in launch.launchers}


def _count_visible(reading: Reading) -> int | None:
    """Returns the number of GPUs that a process sees, if the file says it."""
    stated = reading.take(VISIBLE, decisive=False)
    words = read_words(stated) if stated is not None and not is_null(stated.value) else ()
    return len(words) or None


def _refuse_several(reading: Reading, visible: int | None, processes: int) -> None:
    if visible is None or visible // processes < 2:
        return
    rule = (
        f"{processes} process{'es see' if processes > 1 else ' sees'} {visible} GPUs, so the layers of a process are "
        "spread over GPUs that wait for each other (device_map), which is read from no launch file"
    )
    remedy = f"Start a process on every GPU: NPROC_PER_NODE={visible}. A job says it with plan.schedule: naive"
    raise reading.stated[VISIBLE].refuse(rule, remedy)


# -------------------------------------------------------------------------------------------- weights

ADAPTERS = ("lora", "longlora", "adalora", "lora_llm", "dora")
"""Words of ``tuner_type`` for adapters of low rank."""


def name_model(reading: Reading) -> None:
    """Gives the model the name of its converted checkpoint, or of release 2, where nothing else names it."""
    for name, ending in (("mcore_model", r"-mcore/?$"), ("model_type", r"^$")):
        stated = reading.stated.get(name)
        if "model" not in reading.stated and stated is not None and not stated.unknown:
            text = re.sub(ending, "", str(stated.value)).replace("_", "." if name == "model_type" else "_")
            reading.stated["model"] = replace(stated, value=text)


def read_task(reading: Reading) -> None:
    """Reads what the model is trained for: a head of few classes has no logits over the vocabulary.

    Source: swift/llm/model/register.py; a reward model has a single label (rlhf_args.py).
    """
    task, labels = reading.take_word("task_type"), reading.take("num_labels")
    if task == "seq_cls":
        classes = int(str(labels.value)) if labels is not None and str(labels.value).isdecimal() else 2
        set_classes(reading, classes, "task_type", "num_labels")
    elif reading.take_word("rlhf_type") == "rm":
        set_classes(reading, 1, "rlhf_type")
    elif task in ("reranker", "embedding"):
        if task == "reranker":
            set_classes(reading, 1, "task_type")
        else:
            reading.set_key("model.output.pool", "token", "task_type")
        why = "a sample, which is a query with its texts, is forecast as a single sequence"
        reading.approximate(reading.take("task_type"), why, "the step of more texts takes so many times as long")
    elif task not in ("", "causal_lm", "generative_reranker"):
        why = f"a loss over the vocabulary is forecast, which {task} has not"
        reading.approximate(reading.take("task_type"), why, "the forecast is too slow, and needs more memory")


UNLIMITED = "without max_length sequences are as long as the data has them, up to the limit of the model"
"""Reason of the question for the length of sequences."""

PAIRS = ("dpo", "orpo", "simpo", "cpo", "rm")
"""Kinds of training whose samples are pairs of texts."""

REFERENCES = ("dpo", "kto")
"""Kinds with a reference model (swift/arguments/rlhf_args.py)."""

GENERATING = ("grpo", "ppo", "gkd")
"""Kinds that generate in every step."""


def read_preferences(reading: Reading) -> None:
    """Reads what the kind of training adds to a step: ``rlhf_type``, or the word behind the command."""
    launch, stated = reading.file.launch, reading.take("rlhf_type")
    word = re.search(r"(rlhf|dpo|orpo|simpo)(\.py)?$", launch.entry) if launch is not None else None
    kind = reading.take_word("rlhf_type") or (word[1].replace("rlhf", "dpo") if word else "sft")
    if kind in GENERATING:
        why = f"{kind} generates in every step, which is not forecast: the answer is a step of training alone"
        reading.ask(stated, why, "batch.sequence=2048")
        return
    if kind in PAIRS:
        double_samples(reading, stated)
    if kind in REFERENCES and not reading.take_switch("reference_free"):
        set_reference(reading, stated or Stated(kind, "rlhf", reading.file.where))
    if kind == "kto":
        approximate_divergence(reading, stated)

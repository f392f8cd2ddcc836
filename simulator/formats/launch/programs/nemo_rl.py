"""NeMo-RL: its YAML files with the files that they change (``defaults``), and ``run_sft.py --config`` in scripts.

Of reinforcement learning the update of the policy alone is read.

Source: NVIDIA-NeMo/RL @7ea279ab, nemo_rl/utils/config.py (load_config_with_inheritance), models/megatron/setup.py,
models/automodel/setup.py (setup_distributed), examples/configs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import Launch
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.evaluations import EvaluationSettings, has_any, read_evaluation
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS as MEGATRON_VERDICTS
from meshcast.simulator.formats.launch.programs.nemo import read_overrides
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.policies import (
    MOVED,
    add_defaults,
    approximate_reinforcement,
    ask_about_rollout,
    read_megatron_step,
    read_policy,
    set_compute,
    set_fsdp,
    set_rank,
)
from meshcast.simulator.formats.launch.programs.trainer import (
    double_samples,
    set_recomputation,
    set_reference,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    EVALUATION,
    LITTLE,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    SAVING,
    SHORT,
    START,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.references import fill_references
from meshcast.simulator.formats.launch.table import SettingRow, Stated, is_null
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdicts

CHAIN = 20
"""Files that change each other at most."""

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
"""Sections of the two trainers, of which a file enables one."""

PLAIN = {
    "policy.train_global_batch_size": "global_batch_size",
    "policy.train_micro_batch_size": "micro_batch_size",
    "policy.max_total_sequence_length": "seq_length",
    **{f"{MEGATRON}.{section}.": "" for section in ("optimizer", "distributed_data_parallel_config", "fp8_cfg")},
    f"{MEGATRON}.": "",
}
"""What Megatron-Core calls settings, by their names or by what they begin with; the first that fits counts."""

APART = ("enabled", "activation_checkpointing", "env_vars", "checkpoint", "scheduler", "peft", "name")
"""Settings of the section whose names mean something else in Megatron-Core."""

FOLLOWED = "followed"
"""Name of the setting that names the file whose settings are listed themselves."""

ROWS = (
    SettingRow("policy.train_global_batch_size", "batch.global"),
    SettingRow("policy.train_micro_batch_size", "batch.micro"),
    SettingRow("policy.max_total_sequence_length", "batch.sequence"),
    SettingRow(f"{DTENSOR}.tensor_parallel_size", "plan.tp", silent=1),
    SettingRow(f"{DTENSOR}.context_parallel_size", "plan.cp", silent=1),
    SettingRow(f"{DTENSOR}.dp_replicate_size", "plan.replicate", silent=1),
)
"""Settings of the trainer on DTensors."""

REINFORCEMENT = ("grpo", "ppo", "distillation", "on_policy_distillation")
"""Top-level sections of algorithms that generate in every step."""


# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file over those of the files that it changes, with the overrides of a command."""
    if file.launch is None:
        words = [Stated(word, word, "--args") for word in file.options.arguments]
        settings = _read_chain(file, CHAIN)
    else:
        words = list(file.launch.positional)
        config = file.launch.arguments.get("config")
        companion = file.find_companion(str(config.value)) if config is not None else None
        settings = _read_chain(companion, CHAIN) if companion is not None else {}
        config = config or Stated("its default", "--config", file.launch.place)
        settings["config" if companion is None else FOLLOWED] = config
    settings = fill_references(_lay_over(settings, read_overrides(words)))
    return _name_plainly(settings) if _is_on(settings, f"{MEGATRON}.enabled") else settings


def _read_chain(file: LaunchFile, left: int) -> dict[str, Stated]:
    """Reads the settings of a file over those of its defaults. left: files that may still follow."""
    settings = {name: stated for name, stated in flatten_file(file, example="policy:").items() if stated.value != {}}
    stated = settings.pop("defaults", None)
    names = stated.value if stated is not None and isinstance(stated.value, list) else [stated.value] if stated else []
    below: dict[str, Stated] = {}
    for name in names:
        companion = file.find_companion(str(name)) if left else None
        if companion is not None:
            below = _lay_over(below, _read_chain(companion, left - 1))
        elif stated is not None:
            below["defaults"] = replace(stated, value=name)
    return _lay_over(below, settings)


def _lay_over(below: Mapping[str, Stated], above: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings of two files, of which the second counts more: a null there ends a whole section."""
    sections = {name for name in below if any(other.startswith(f"{name}.") for other in above)}
    kept = {
        name: stated
        for name, stated in below.items()
        if name not in sections and not any(name.startswith(f"{other}.") for other in _list_ended(above))
    }
    return {**kept, **above}


def _list_ended(settings: Mapping[str, Stated]) -> list[str]:
    return [name for name, stated in settings.items() if is_null(stated.value)]


def _is_on(settings: Mapping[str, Stated], name: str) -> bool:
    return name in settings and str(settings[name].value).lower() == "true"


def _name_plainly(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings with those of Megatron-Core by its names, without what a switch of theirs turns off."""
    recomputes, quantises = _is_on(settings, f"{MEGATRON}.activation_checkpointing"), f"{MEGATRON}.fp8_cfg."
    plain: dict[str, Stated] = {}
    for name, stated in settings.items():
        begin = next(
            (begin for begin in PLAIN if name == begin or (begin.endswith(".") and name.startswith(begin))), ""
        )
        tail = PLAIN.get(begin, "") + name.removeprefix(begin) if begin else name
        is_apart = tail.partition(".")[0] in APART or ("." in tail and begin)
        is_off = (tail.startswith("recompute_") and not recomputes) or (
            begin == quantises and not _is_on(settings, f"{quantises}enabled")
        )
        plain[name if is_apart or is_off else tail] = stated
    return plain


# -------------------------------------------------------------------------------------- interpreting


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    for name in ("defaults", "config"):
        if (stated := reading.take(name)) is not None:
            why = f"it names a file, {stated.value}, whose settings it changes, and which is not beside it"
            reading.ask(stated, why, "model=llama3-8b", "plan.tp=1", "--assume-defaults")
    reading.ignore(reading.take(FOLLOWED), "the settings of its file are listed")
    read_policy(reading, "policy.model_name")
    nodes, each = reading.take_count("cluster.num_nodes"), reading.take_count("cluster.gpus_per_node")
    if each:
        set_gpus(reading, nodes, each, "cluster.gpus_per_node", "cluster.num_nodes")
    if take_on(reading, f"{MEGATRON}.enabled") is not None:
        _read_megatron(reading)
    else:
        reading.set_key("model.mtp", 0)  # classes of transformers have no layers that predict further tokens
        _read_dtensor(reading)
    _read_packing(reading)
    _read_evaluation(reading)
    _read_algorithm(reading)


def _read_evaluation(reading: Reading) -> None:
    """Reads the micro-batches of evaluations of fine-tuning (algorithms/sft.py, dpo.py and rm.py); those of others
    generate."""
    sections = {name.partition(".")[0] for name in reading.stated}
    section = next((name for name in ("sft", "dpo", "rm") if name in sections), None)
    if section is not None:
        period = f"{section}.val_period"
        runs = has_any(reading.take(period, decisive=False), False)
        read_evaluation(reading, EvaluationSettings((f"{section}.val_micro_batch_size",), 1), runs, period)


def _read_megatron(reading: Reading) -> None:
    """Reads the trainer on Megatron-Core."""
    _ignore_below(reading, f"{DTENSOR}.", "the trainer on Megatron-Core is enabled")
    for section in ("recompute_", "fp8_cfg."):
        _ignore_below(reading, f"{MEGATRON}.{section}", "its switch is off")
    if take_on(reading, f"{MEGATRON}.activation_checkpointing") is not None:
        add_defaults(reading, {"recompute_granularity": "full"})
    read_megatron_step(reading)
    _set_compute(reading)
    adapters = f"{MEGATRON}.peft"
    if take_on(reading, f"{adapters}.enabled") is not None:
        rank = reading.take_count(f"{adapters}.dim") or 8
        set_rank(reading, f"{adapters}.enabled", rank, f"{adapters}.target_modules")


def _ignore_below(reading: Reading, prefix: str, why: str) -> None:
    """Lists all settings whose names begin alike as without influence."""
    for name in [name for name in reading.stated if name.startswith(prefix)]:
        reading.ignore(reading.take(name, decisive=False), why)


def _set_compute(reading: Reading) -> None:
    """Sets the format of the products to that of the policy, where no recipe of 8 bits stands above it."""
    if str(reading.keys.get("precision.compute", "")).startswith(("fp8", "mxfp8", "nvfp4")):
        reading.ignore(reading.take("policy.precision"), "the recipe of 8 bits counts")
    else:
        set_compute(reading, "policy.precision")


def _read_dtensor(reading: Reading) -> None:
    """Reads the trainer on DTensors: FSDP2 over what the other degrees leave."""
    _ignore_below(reading, f"{MEGATRON}.", "the trainer on DTensors is enabled")
    reading.read_rows(ROWS)
    keys = reading.keys
    set_fsdp(reading, 2, f"{DTENSOR}.enabled", f"{DTENSOR}._v2")
    set_compute(reading, "policy.precision")
    checkpointing = f"{DTENSOR}.activation_checkpointing"
    recomputes = take_on(reading, checkpointing)
    set_recomputation(reading, recomputes is not None, checkpointing)
    # models/dtensor/parallelize.py wraps attention, the MLP and both norms of a layer, not the layer.
    why = "attention, MLP and norms are recomputed one by one, and keep their inputs; whole layers are forecast"
    reading.approximate(recomputes, why, "the forecast memory is too small, by three inputs a layer")
    if take_on(reading, f"{DTENSOR}.cpu_offload") is not None:
        reading.set_key("plan.data.offload", True, f"{DTENSOR}.cpu_offload")
    is_on = take_on(reading, f"{DTENSOR}.sequence_parallel") is not None
    if keys["plan.tp"] > 1:
        reading.set_key("plan.tensor", "megatron-sp" if is_on else "megatron", f"{DTENSOR}.sequence_parallel")
    if keys["plan.cp"] > 1:
        reading.set_key("plan.sequence", "all-gather", f"{DTENSOR}.context_parallel_size")
    experts = reading.take_count(f"{DTENSOR}.expert_parallel_size")
    if experts and experts > 1:
        deep = f"{DTENSOR}.automodel_kwargs.backend.enable_deepep"
        reading.set_key("plan.ep", experts, f"{DTENSOR}.expert_parallel_size")
        reading.set_key("plan.etp", 1)
        reading.set_key("plan.expert", "deepep" if take_on(reading, deep) is not None else "all-to-all", deep)
    read_optimizer(reading, "policy.optimizer.name")
    adapters = f"{DTENSOR}.lora_cfg"
    if take_on(reading, f"{adapters}.enabled") is None:
        reading.set_key("train.mode", "full", f"{adapters}.enabled")
        return
    everywhere = reading.take(f"{adapters}.match_all_linear")
    targets = f"{adapters}.target_modules"
    if everywhere is None or str(everywhere.value).lower() == "true":
        reading.take(targets)
        targets = f"{adapters}.match_all_linear"
    set_rank(reading, f"{adapters}.enabled", reading.take_count(f"{adapters}.dim") or 8, targets)


def _read_packing(reading: Reading) -> None:
    """Reads micro-batches that hold as many samples as have room in a number of tokens."""
    for section in ("policy.sequence_packing", "policy.dynamic_batching"):
        stated = take_on(reading, f"{section}.enabled")
        tokens = reading.take_count(f"{section}.train_mb_tokens") if stated is not None else None
        if stated is not None:
            sequence = reading.keys.get("batch.sequence")
            if tokens and sequence:
                reading.set_key("batch.micro", max(1, tokens // sequence), f"{section}.train_mb_tokens")
            why = "samples are forecast as sequences of full length, not packed: state batch.documents"
            reading.approximate(stated, why, LONG)


def _read_algorithm(reading: Reading) -> None:
    """Reads what is trained for: pairs of preferences, and rollouts, which are asked about."""
    sections = {name.partition(".")[0]: stated for name, stated in reading.stated.items() if "." in name}
    section = next((name for name in REINFORCEMENT if name in sections), None)
    if section is not None:
        stated = replace(sections[section], shown=section, value=section)
        backend = reading.take_word("policy.generation.backend")
        ask_about_rollout(reading, reading.take("policy.generation.backend") or stated, backend)
        approximate_reinforcement(reading, stated)
    if "dpo" in sections or "rm" in sections:
        stated = replace(
            sections.get("dpo", sections.get("rm", Stated("", ""))), shown="dpo" if "dpo" in sections else "rm"
        )
        double_samples(reading, stated)
        if "dpo" in sections:
            set_reference(reading, stated)
            why = "weights of the reference are forecast on the GPU; they come from the host for its pass"
            errs = "the memory is too large by these weights, and the step too short by the copies"
            reading.approximate(stated, why, errs)


OWN_VERDICTS: Verdicts = {
    **list_verdicts(
        ("cluster.* *.env_vars* env.* teacher.generation*", START),
        ("sft.* dpo.* rm.* grpo.* ppo.* distillation.* loss_fn.* reward_penalties* teacher*", OPTIMISATION),
        ("checkpointing.* policy.megatron_cfg.checkpoint* *save*", SAVING),
        ("policy.generation* policy.logprob* policy.refit* policy.draft*", NoInfluence("it is of the rollout")),
        ("policy.tokenizer.* data.* policy.make_sequence*", DATA),
        ("logger.* *_label", NAMES),
        ("policy.max_grad_norm policy.optimizer* policy.scheduler* *.lora_cfg.* *.peft.*", OPTIMISATION),
        ("policy.megatron_cfg.scheduler.* policy.megatron_cfg.name", OPTIMISATION),
        ("policy.dequantize_base_checkpoint *.force_reconvert_from_hf policy.reward_model*", LOADING),
        ("policy.sequence_packing.* policy.dynamic_batching.*", NoInfluence("its switch says whether it acts")),
        ("policy.offload_optimizer_for_logprob", MOVED),
        ("policy.quant_*", Approximation("the kernels that simulate quantised weights are left out", SHORT)),
        (
            "policy.hf_config_overrides.max_position* policy.hf_config_overrides.rope* *.router_aux_loss_coef"
            " policy.hf_config_overrides",
            NoInfluence("it changes values, not the work of a step"),
        ),
        ("policy.hf_config_overrides.*", Decision("it changes the model", ("model=llama3-8b",))),
        ("policy.megatron_cfg.model_overrides*", Decision("it changes the model", ("model=llama3-8b",))),
        ("moe_router_enable_expert_bias", NoInfluence("it changes values, not the work of a step")),
        ("data_plane* async_rl* on_policy_distillation* value*", NoInfluence("it is of other phases than the update")),
        ("policy.dtensor_cfg.automodel_kwargs*", Approximation("kernels of transformers are forecast", EITHER)),
        ("policy.dtensor_cfg.moe_parallelizer*", Approximation("experts are sharded with the other weights", LITTLE)),
        (
            "policy.dtensor_cfg.defer_fsdp_grad_sync",
            Approximation("gradients are reduced after every micro-batch", LONG),
        ),
        ("policy.dtensor_cfg.custom_parallel_plan", Approximation("the plan of tensor ranks is the usual one", EITHER)),
        ("policy.dtensor_cfg.clear_cache*", Approximation("the cache of the allocator is not emptied", SHORT)),
        ("converter* force_reconvert* empty_unused* use_gloo* moe_per_layer* track_moe* use_linear_ce*", START),
        ("freeze_moe_router moe_router_load* moe_router_bias* layernorm_epsilon", OPTIMISATION),
        (
            "defer_fp32_logits use_fused_linear* fused_linear* use_fused_weighted*",
            Approximation("the usual loss", LONG),
        ),
        ("pipeline_dtype params_dtype bf16 fp16 fp8_param", NoInfluence("policy.precision says it")),
        ("eval* val*", EVALUATION),
    ),
}


def recognise(file: LaunchFile) -> Evidence:
    """Recognises a policy with the sections of its trainers, a file that changes such a policy, or a start of its
    examples."""
    if file.launch is not None:
        return _weigh_start(file, file.launch)
    return Evidence.CERTAIN if _has_policy(file, CHAIN) else Evidence.NONE


def _weigh_start(file: LaunchFile, launch: Launch) -> Evidence:
    """Returns how sure it is that a start is of this program: other programs have scripts of these names."""
    config = launch.arguments.get("config")
    companion = file.find_companion(str(config.value)) if config is not None else None
    overrides = (str(word.value).lstrip("+~") for word in launch.positional)
    if any(word.startswith("policy.") for word in overrides) or (
        companion is not None and _has_policy(companion, CHAIN)
    ):
        return Evidence.CERTAIN
    is_known = re.search(r"(^|/)run_(sft|dpo|rm|grpo\w*|ppo|vlm_\w+|distillation)\.py$", launch.entry) is not None
    return Evidence.POSSIBLE if is_known and config is not None else Evidence.NONE


def _has_policy(file: LaunchFile, left: int) -> bool:
    """Returns whether a file, or a file that it changes, has a policy with settings. left: files to follow."""
    if not isinstance(file.data, Mapping):
        return False
    policy, base = file.data.get("policy"), file.data.get("defaults")
    names = {"dtensor_cfg", "megatron_cfg", "train_global_batch_size", "max_total_sequence_length"}
    if isinstance(policy, Mapping) and names & policy.keys():
        return True
    companion = file.find_companion(base) if left and isinstance(base, str) else None
    return companion is not None and _has_policy(companion, left - 1)


NEMO_RL = LaunchFormat(
    "nemo-rl", "NeMo-RL", ".yaml", recognise, read, interpret, None, {**OWN_VERDICTS, **MEGATRON_VERDICTS}
)

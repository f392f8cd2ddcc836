"""verl: commands of its trainers with overrides of Hydra, and their YAML files.

Of reinforcement learning (``main_ppo``) the update of the actor alone is read: rollouts, the reference, the critic and
rewards have their settings, degrees and phases.

Source: volcengine/verl @b178a3cd, verl/trainer/config (sft_trainer.yaml, sft_trainer_engine.yaml, ppo_trainer.yaml,
actor, engine/fsdp.yaml, engine/megatron.yaml, model/hf_model.yaml), trainer/fsdp_sft_trainer.py,
workers/fsdp_workers.py and megatron_workers.py (update_actor), utils/megatron_utils.py (get_model).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS as MEGATRON_VERDICTS
from meshcast.simulator.formats.launch.programs.nemo import read_overrides
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.policies import (
    FORMATS,
    MOVED,
    VERSIONS,
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
    offload_checkpoints,
    set_attention,
    set_recomputation,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    EVALUATION,
    LENGTH,
    LITTLE,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    PADDING,
    SAVING,
    START,
    UNITS,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.references import fill_references
from meshcast.simulator.formats.launch.table import SettingRow, Stated, is_null, read_number
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdicts


class VerlTrainer(NamedTuple):
    """A trainer of verl.

    entry: pattern of the module that starts it.
    renamed: what its settings are called here, by what their names begin with: ``engine.`` those of FSDP or Megatron,
        ``model.`` and ``actor.``; the first that fits counts.
    version: of FSDP without a setting.
    """

    entry: str
    renamed: Mapping[str, str]
    version: int


ACTOR = "actor_rollout_ref.actor."

TRAINERS = {
    "sft": VerlTrainer(
        r"verl\.trainer\.fsdp_sft_trainer|fsdp_sft_trainer\.py",
        {
            "model.fsdp_config.": "engine.",
            "model.strategy": "engine.strategy",
            "model.partial_pretrain": "model.path",
            "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
            "use_remove_padding": "model.use_remove_padding",
        },
        2,
    ),
    "engine": VerlTrainer(r"verl\.trainer\.sft_trainer(_ray)?", {}, 1),
    "ppo": VerlTrainer(
        r"verl\.trainer\.main_ppo|(^|[./])main_(ppo|dapo|grpo|prime|sppo|spin|gspo)(\.py)?$",
        {
            f"{ACTOR}fsdp_config.": "engine.",
            f"{ACTOR}megatron.": "engine.",
            f"{ACTOR}ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
            f"{ACTOR}strategy": "engine.strategy",
            f"{ACTOR}optim.": "optim.",
            ACTOR: "actor.",
            "actor_rollout_ref.model.": "model.",
        },
        1,
    ),
}

KIND = "trainer_kind"
"""Name of the setting for the trainer that a command starts."""

OPTIMIZER = "optim.override_optimizer_config."
MEGATRON_SECTIONS = ("engine.override_transformer_config.", "engine.override_ddp_config.", "engine.", OPTIMIZER)
"""What the names of settings of Megatron-Core begin with, the last those of its optimizer."""

CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""Names of its configurations, whose defaults are known here."""

SELECTORS = ("engine.strategy", "engine", "config_name", "model_engine", "defaults")
"""Settings that choose FSDP or Megatron-Core."""

SFT_ROWS = (
    SettingRow("data.train_batch_size", "batch.global", silent=256),
    SettingRow("data.micro_batch_size_per_gpu", "batch.micro", silent=4),
    SettingRow("data.max_length", "batch.sequence", silent=1024),
)


# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a command with its overrides, or of a YAML file, by the names that trainers share here."""
    if file.launch is None:
        words = [Stated(word, word, "--args") for word in file.options.arguments]
        settings = {**flatten_file(file, example="actor_rollout_ref:"), **read_overrides(words)}
        kind = "ppo" if "actor_rollout_ref" in file.keys else "sft" if "partial_pretrain" in file.text else "engine"
        settings[KIND] = Stated(kind, "trainer", file.where)
    else:
        launch = file.launch
        settings = {**_read_configuration(file), **read_overrides(launch.positional)}
        for launcher in launch.launchers:
            for name in ("nnodes", "nproc_per_node"):
                if name in launcher.settings:
                    settings[f"launcher.{name}"] = launcher.settings[name]
        kind = next((name for name, trainer in TRAINERS.items() if re.search(trainer.entry, launch.entry)), "ppo")
        settings[KIND] = Stated(kind, launch.entry, launch.place)
    return _name_plainly(fill_references(settings), kind)


def _read_configuration(file: LaunchFile) -> dict[str, Stated]:
    """Reads the arguments of a command, and the settings of the configuration that they name, if it is none of
    verl's."""
    arguments = dict(file.launch.arguments) if file.launch is not None else {}
    name, path = arguments.get("config_name"), arguments.get("config_path")
    stem = re.sub(r"\.ya?ml$", "", str(name.value).strip("'\"")) if name is not None else ""
    if name is None or stem in CONFIGURATIONS:
        return arguments
    companion = file.find_companion(f"{path.value if path is not None else 'config'}/{stem}.yaml")
    if companion is None:
        return {**arguments, "configuration": name}
    return {**flatten_file(companion, example="actor_rollout_ref:"), **arguments}


def _name_plainly(settings: Mapping[str, Stated], kind: str) -> dict[str, Stated]:
    """Returns the settings by the names that trainers share, those of Megatron-Core by its names."""
    named: dict[str, Stated] = {}
    for name, stated in settings.items():
        begins = TRAINERS[kind].renamed.items()
        begin, tail = next(((begin, tail) for begin, tail in begins if _begins(name, begin)), ("", ""))
        named[tail + name.removeprefix(begin)] = stated
    if _runs_megatron(named):
        for name in [name for name in named if name.startswith(("engine.", OPTIMIZER)) and name not in SELECTORS]:
            section = next(section for section in MEGATRON_SECTIONS if name.startswith(section))
            named[name.removeprefix(section)] = named.pop(name)
    return named


def _begins(name: str, begin: str) -> bool:
    return name.startswith(begin) if begin.endswith(".") else name == begin


def _runs_megatron(settings: Mapping[str, Stated]) -> bool:
    """Returns whether a strategy, an engine, or the name of the configuration says Megatron-Core."""
    return any("megatron" in str(settings[name].value).lower() for name in SELECTORS if name in settings)


# -------------------------------------------------------------------------------------- interpreting


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    stated = reading.take(KIND)
    kind = str(stated.value) if stated is not None else "sft"
    megatron = _runs_megatron(reading.stated)
    for name in SELECTORS:
        reading.take(name)
    for name in ("config_name", "config_path"):
        reading.ignore(reading.take(name), "the settings of the configuration are listed, or are verl's")
    if (missing := reading.take("configuration")) is not None:
        why = "it names a configuration, which may say the plan and is not beside the script"
        reading.ask(missing, why, "plan.fsdp=true", "plan.tp=1")
    read_policy(reading, "model.path")
    if not (megatron and take_on(reading, "model.mtp.enable") is not None):
        reading.set_key("model.mtp", 0, "model.mtp.enable")  # workers/engine/megatron/transformer_impl.py @1dda039b
    _read_processes(reading, kind)
    if megatron:
        _read_megatron(reading)
    else:
        _read_fsdp(reading, TRAINERS[kind].version)
    if kind == "ppo":
        _read_actor(reading)
    else:
        _read_tuning(reading, kind)
    _read_adapters(reading)
    steps = reading.take("trainer.total_training_steps", decisive=False)
    if steps is not None and not is_null(steps.value) and kind != "ppo":
        reading.set_key("run.steps", read_number(steps), "trainer.total_training_steps")


def _read_processes(reading: Reading, kind: str) -> None:
    """Reads the GPUs: of torchrun, or of the cluster of Ray that the trainer asks for."""
    if kind == "ppo":
        names, usual = ("trainer.n_gpus_per_node", "trainer.nnodes"), 8
    else:
        names, usual = ("launcher.nproc_per_node", "launcher.nnodes"), 0
    each, nodes = (reading.take_count(name) for name in names)
    if each or usual:
        set_gpus(reading, nodes, each or usual, *names)


def _read_fsdp(reading: Reading, usual: int) -> None:
    """Reads FSDP of transformers' models. usual: the version without a setting."""
    strategy = reading.take_word("engine.strategy")
    version = VERSIONS.get(strategy, usual)
    set_fsdp(reading, version, "engine.strategy")
    if strategy and strategy not in VERSIONS:
        reading.ask(reading.take("engine.strategy"), f"{strategy!r} is neither FSDP nor Megatron", "plan.fsdp=true")
    reshards = reading.take("engine.reshard_after_forward")
    is_off = reshards is not None and str(reshards.value).lower() == "false"
    reading.set_key("plan.data.reshard", not is_off, "engine.reshard_after_forward")
    size = reading.take("engine.fsdp_size")
    if size is not None and not is_null(size.value) and read_number(size) > 0:
        reading.set_key("plan.mics", int(read_number(size)), "engine.fsdp_size")
    set_compute(reading, "engine.mixed_precision.param_dtype", "engine.dtype")
    reduced = "engine.mixed_precision.reduce_dtype"
    if (word := reading.take_word(reduced)) in FORMATS:
        reading.set_key("precision.gradients", FORMATS[word], reduced)
    if reading.take_word("engine.model_dtype") in ("bf16", "bfloat16"):
        for key in ("main_weights", "moments"):
            reading.set_key(f"precision.{key}", "bf16", "engine.model_dtype")
    checkpointing = reading.take("model.enable_gradient_checkpointing")
    recomputes = checkpointing is None or str(checkpointing.value).lower() == "true"
    set_recomputation(reading, recomputes, "model.enable_gradient_checkpointing")
    if take_on(reading, "model.enable_activation_offload") is not None:
        offload_checkpoints(reading, "model.enable_activation_offload")
    shards = reading.take_count("model.tiled_mlp.num_shards") or 4
    if take_on(reading, "model.tiled_mlp.enabled") is not None:
        reading.set_key("plan.mlp_tiles", shards, "model.tiled_mlp.num_shards", "model.tiled_mlp.enabled")
    read_optimizer(reading, "optim.optimizer")
    _read_ulysses(reading)
    _read_offload(reading, version)


def _read_ulysses(reading: Reading) -> None:
    """Reads the ranks that share out the heads of attention, which is FlashAttention-2."""
    set_attention(reading, "flash_attention_2")
    ranks = reading.take_count("engine.ulysses_sequence_parallel_size") or 1
    reading.set_key("plan.cp", ranks, "engine.ulysses_sequence_parallel_size")
    if ranks > 1:
        reading.set_key("plan.sequence", "ulysses", "engine.ulysses_sequence_parallel_size")


def _read_offload(reading: Reading, version: int) -> None:
    """Reads whether all that FSDP shards lies in host memory during the update, too. version: of FSDP."""
    if take_on(reading, "engine.offload_policy") is not None or (
        take_on(reading, "engine.cpu_offload") is not None
        and (version == 2 or take_on(reading, "engine.offload_params") is not None)
    ):
        reading.set_key("plan.data.offload", True, "engine.offload_policy", "engine.cpu_offload")


def _read_megatron(reading: Reading) -> None:
    """Reads the engine on Megatron-Core."""
    defaults = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "moe_token_dispatcher_type": "alltoall"}
    add_defaults(reading, defaults)
    read_megatron_step(reading)
    if isinstance(reading.origins.get("plan.tensor"), str):  # no setting says it
        reading.set_key("plan.tensor", "megatron-sp")
    set_compute(reading, "dtype")
    reading.keys.pop("batch.micro", None)
    if (stated := reading.take("model.enable_gradient_checkpointing")) is not None:
        reading.ignore(stated, "of Megatron-Core recompute_granularity says it")


def _read_tuning(reading: Reading, kind: str) -> None:
    """Reads the batch of supervised tuning. kind: of the trainer."""
    reading.read_rows(SFT_ROWS)
    _share_micro_batch(reading, "data.micro_batch_size")
    dynamic = reading.take("data.use_dynamic_bsz")
    if kind == "engine" and (dynamic is None or str(dynamic.value).lower() == "true"):
        tokens = reading.take_count("data.max_token_len_per_gpu") or 8192
        _set_dynamic_batch(reading, tokens, dynamic, "data.max_token_len_per_gpu", "data.use_dynamic_bsz")
    if (packing := take_on(reading, "model.use_remove_padding")) is not None:
        reading.approximate(packing, PADDING.why, PADDING.errs)


def _read_actor(reading: Reading) -> None:
    """Reads the batch of an update of the actor, and asks whether it alone is meant."""
    lengths = "data.max_prompt_length", "data.max_response_length"
    reading.set_key("batch.sequence", sum(reading.take_count(name) or 512 for name in lengths), *lengths)
    batch = "actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n"
    prompts, answers = reading.take_count(batch[0]) or 256, reading.take_count(batch[1]) or 1
    reading.set_key("batch.global", prompts * answers, *batch)
    micro = "actor.ppo_micro_batch_size_per_gpu"
    count, dynamic = reading.take_count(micro), take_on(reading, "actor.use_dynamic_bsz")
    if dynamic is not None:
        reading.ignore(reading.take(micro), "actor.use_dynamic_bsz decides how many sequences a micro-batch has")
        names = "actor.ppo_max_token_len_per_gpu", "actor.use_dynamic_bsz"
        _set_dynamic_batch(reading, reading.take_count(names[0]) or 16384, dynamic, *names)
    elif count:
        reading.set_key("batch.micro", count, micro)
    elif not _share_micro_batch(reading, "actor.ppo_micro_batch_size"):
        reading.ask_key("batch.micro", 1, "no micro-batch of the actor is set", reading.take(micro))
    if (packing := take_on(reading, "model.use_remove_padding", "actor.use_remove_padding")) is not None:
        reading.approximate(packing, PADDING.why, PADDING.errs)
    rollout = reading.take("actor_rollout_ref.rollout.name")
    ask_about_rollout(reading, rollout or reading.stated[KIND], str(rollout.value) if rollout is not None else "")
    approximate_reinforcement(reading, reading.stated[KIND])


def _set_dynamic_batch(reading: Reading, tokens: int, stated: Stated | None, *names: str) -> None:
    """Sets a micro-batch that holds as many sequences as have room, by those that divide the batch.

    tokens: of a GPU.
    stated: the setting that says so. names: of the settings.
    """
    keys = reading.keys
    room = max(1, tokens * keys["plan.cp"] // keys["batch.sequence"])
    share = max(1, keys["batch.global"] // _count_replicas(reading))
    reading.set_key("batch.micro", max(size for size in range(1, min(room, share) + 1) if share % size == 0), *names)
    why = "micro-batches hold tokens, not sequences: sequences of full length are forecast"
    reading.approximate(stated, why, PADDING.errs)


def _share_micro_batch(reading: Reading, name: str) -> bool:
    """Sets the micro-batch by a setting of the first releases, which counts those of all ranks together. Returns
    whether the file has it."""
    count = reading.take_count(name)
    if count:
        reading.set_key("batch.micro", max(1, count // _count_replicas(reading)), name)
    return bool(count)


def _count_replicas(reading: Reading) -> int:
    ranks = math.prod(reading.keys.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp"))
    return int(max(1, reading.keys.get("cluster.gpus", ranks) // ranks))


def _read_adapters(reading: Reading) -> None:
    """Reads low-rank adapters, of transformers or of Megatron-Core."""
    for name, targets in (
        ("model.lora_rank", "model.target_modules"),
        ("model.lora.rank", "model.lora.target_modules"),
    ):
        stated = reading.take(name)
        if stated is not None and not is_null(stated.value) and read_number(stated) > 0:
            set_rank(reading, name, int(read_number(stated)), targets)
            return
    reading.set_key("train.mode", "full", "model.lora_rank", "model.lora.rank")


OWN_VERDICTS: Verdicts = {
    **list_verdicts(
        ("actor_rollout_ref.rollout* actor_rollout_ref.hybrid_engine", NoInfluence("it is of the rollout")),
        ("actor_rollout_ref.ref*", NoInfluence("it is of the reference, which is named as left out")),
        ("critic* reward* custom_reward* algorithm*", NoInfluence("it is of other phases than the update")),
        ("trainer.*freq trainer.max_*ckpt* trainer.resume* trainer.checkpoint* checkpoint* *.checkpoint.*", SAVING),
        ("trainer.val* trainer.test*", EVALUATION),
        ("trainer.total_epochs trainer.total_training_steps", LENGTH),
        ("trainer.*n_gpus_per_node trainer.nnodes", NoInfluence("torchrun says how many processes there are")),
        ("trainer.balance_batch", NoInfluence("all ranks are forecast with as many tokens")),
        ("trainer.* profiler* *.profiler* global_profiler* transfer_queue*", NAMES),
        ("ray_kwargs* *nccl_timeout trainer.device launcher.* env.* hydra*", START),
        ("data.*", DATA),
        ("optim.* *.optim.*", OPTIMISATION),
        (
            "actor.*clip* actor.*loss* actor.*entropy* actor.*kl* actor.tau* actor.grad_clip actor.shuffle"
            " actor.data_loader_seed actor.ppo_epochs actor.policy_loss* actor.calculate* actor.load_weight",
            OPTIMISATION,
        ),
        ("actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len*", NoInfluence("actor.use_dynamic_bsz decides")),
        ("actor.use_torch_compile engine.use_torch_compile", Approximation("the loss alone is compiled", LITTLE)),
        ("actor.router_replay*", Approximation("experts are chosen anew in the update", LITTLE)),
        ("engine.wrap_policy* engine.use_orig_params engine.forward_prefetch", UNITS),
        ("engine.param_offload engine.optimizer_offload param_offload optimizer_offload grad_offload", MOVED),
        ("engine.mixed_precision.buffer_dtype", LOADING),
        ("engine.seed engine.full_determinism engine.forward_only forward_only seed", START),
        (
            "use_mbridge vanilla_mbridge use_dist_checkpointing dist_checkpointing* load_weight use_remove_padding",
            LOADING,
        ),
        ("model.*alpha model.lora.* model.lora_* model.exclude_modules model.target_modules", OPTIMISATION),
        ("model.trust_remote_code model.external_lib model.use_shm model.*tokenizer* model.custom_chat*", LOADING),
        ("model.hf_config_path model.mtp*", LOADING),
        (
            "model.use_liger model.use_fused_kernels *.use_fused_kernels *.fused_kernel_options*"
            " model.fused_kernel_options*",
            Approximation("fused kernels are forecast as those of transformers", LONG),
        ),
        ("model.override_config.max_position_embeddings", NoInfluence("positions are rotated, without weights")),
        ("model.override_config.*", Decision("it changes the model", ("model=llama3-8b",))),
        ("attention_backend *.attention_backend", Approximation("attention is that of the profile", EITHER)),
    ),
}


def recognise(file: LaunchFile) -> Evidence:
    """Recognises a start of its trainers, or the sections of their files."""
    if file.launch is not None:
        if re.search(r"^verl\.trainer\.(main_ppo|\w*sft_trainer)|(^|/)fsdp_sft_trainer\.py$", file.launch.entry):
            return Evidence.CERTAIN
        has_actor = any(str(word.value).lstrip("+~").startswith(ACTOR) for word in file.launch.positional)
        return Evidence.CERTAIN if has_actor else Evidence.NONE
    if "actor_rollout_ref" in file.keys:
        return Evidence.CERTAIN
    sections = {"data", "model", "trainer", "optim"} <= file.keys
    return Evidence.LIKELY if sections and "partial_pretrain" in file.text else Evidence.NONE


VERL = LaunchFormat("verl", "verl", ".sh", recognise, read, interpret, None, {**OWN_VERDICTS, **MEGATRON_VERDICTS})

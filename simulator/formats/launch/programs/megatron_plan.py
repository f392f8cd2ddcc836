"""Parallelism, number formats and overlap in the words of Megatron-Core, which NeMo and Megatron-Bridge share.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core/model_parallel_config.py, distributed_data_parallel_config.py and
megatron/training/arguments.py, with their defaults.
"""

from __future__ import annotations

import re
from typing import Any

from meshcast.simulator.formats.launch.programs.megatron_samples import read_samples
from meshcast.simulator.formats.launch.programs.megatron_verdicts import FAST, LARGE, SLOW, SMALL
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    ON,
    Keys,
    SettingRow,
    SomeKeys,
    Stated,
    is_null,
    read_number,
    read_switch,
    read_words,
    write_rows,
)

DEGREES = (
    SettingRow("micro_batch_size", "batch.micro", silent=1, demanded=True),
    SettingRow("global_batch_size", "batch.global"),
    SettingRow("seq_length", "batch.sequence"),
    SettingRow("encoder_seq_length", "batch.sequence"),
    SettingRow("tensor_model_parallel_size", "plan.tp", silent=1),
    SettingRow("pipeline_model_parallel_size", "plan.pp", silent=1),
    SettingRow("model_parallel_size", "plan.tp"),  # of releases until 2020, as the next
    SettingRow("batch_size", "batch.micro"),
    SettingRow("context_parallel_size", "plan.cp", silent=1),
    SettingRow("expert_model_parallel_size", "plan.ep", silent=1),
    SettingRow(
        "sequence_parallel", "plan.tensor", "switch", {True: "megatron-sp", False: "megatron"}, silent="megatron"
    ),
    SettingRow("use_tp_pp_dp_mapping", "plan.order", "switch", {True: "dp-pp-cp-tp"}, silent="pp-dp-cp-tp"),
    SettingRow("num_distributed_optimizer_instances", "plan.replicate", silent=1),
    SettingRow("train_iters", "run.steps"),
)

TRAITS = (
    SettingRow("overlap_grad_reduce", "framework.set.overlap.dp", "switch", ON, silent=False),
    SettingRow("overlap_param_gather", "framework.set.overlap.updated_weights", "switch", ON, silent=False),
    SettingRow("tp_comm_overlap", "framework.set.overlap.tp", "switch", ON, silent=False),
    SettingRow("overlap_dispatch_backward_with_experts_wgrad", "framework.set.overlap.ep", "switch", ON, silent=False),
    SettingRow("make_vocab_size_divisible_by", "framework.set.vocab_multiple", silent=128),
    SettingRow("no_rope_fusion", "framework.set.eager.rope.fused", "switch", {True: False, False: True}, silent=True),
    SettingRow("moe_router_fusion", "framework.set.eager.router.fused", "switch", ON, silent=False),
)
"""Traits of the framework that these programs switch on and off."""

DISPATCHERS = {"allgather": "all-gather-dispatch", "alltoall": "all-to-all", "alltoall_seq": "all-to-all"}
BACKENDS = {"deepep": "deepep", "hybridep": "hybrid-ep"}
"""Expert schemes by the token dispatcher, and by the backend of the dispatcher ``flex``."""

BESIDE_SHARED = ("all-to-all", *BACKENDS.values())
"""Expert schemes whose exchanges shared experts may run beside."""

DEEPEP = {"plan.expert.dispatch": "bf16", "plan.expert.most": 1_000}
"""DeepEP as Megatron-Core calls it: tokens in bf16, experts of a token on any number of nodes."""

RECIPES = {"delayed": "fp8-delayed", "tensorwise": "fp8-tensorwise", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}

SHARDING = {"no_shard": "ddp", "optim": "zero-1", "optim_grads": "zero-2", "optim_grads_params": "fsdp"}
"""Data schemes by ``data_parallel_sharding_strategy`` of Megatron FSDP."""

MESSAGES = {"all-gather": "all_gather", "ulysses": "a2a"}
"""``cp_comm_type`` that is nearest to a sequence scheme of other programs."""

SHARDED, TWO_BARRIERS, INTERLACED = "enable_vocab_parallel", "disable_backward_fusion", "use_interlaced_schedule"
"""Settings of sail-sg/VocabularyParallelism that shard the vocabulary among stages, with two collectives in place of
one, and with passes in which all stages wait."""

GROUPS = ("microbatch_group_size_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage")
"""Micro-batches of a group of the interleaved schedule, on the command line and in the configuration."""

OFFLOADED_MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"),
)
"""Words of ``offload_modules`` that `memory/offload` knows."""

MODULES = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")
"""Modules of ``recompute_modules`` that meshcast has by the same name."""

FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
"""Layers of the stages at the ends, on the command line and in the configuration."""

OFFLOADED = ("fine_grained_activation_offloading", "cpu_offloading")
"""Settings that offload activations."""

REGISTERED = ("use_nccl_ub", "nccl_ub")
BUFFERED = ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer")
"""Settings that let Megatron FSDP keep two buffers for weights and gradients of layers."""

BY_LAYER = (
    *("cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering"),
    "cpu_offloading_retain_pinned_cpu_buffers",
)
"""Settings of offloading, which count with a setting of `OFFLOADED` alone."""

BY_MODULE = ("offload_modules", "activation_offload_fraction", "min_offloaded_tensor_size")
"""Settings of offloading module by module, which count with the first of `OFFLOADED` alone."""

HYBRID = "hybridadam"
"""Adam with states in host memory, half of them without another fraction (alibaba/Pai-Megatron-Patch @a098ca5a,
megatron_patch/arguments.py line 477)."""

ADAMS = ("adam", "adamw", HYBRID, "fused_adam", "distributed_fused_adam", "mcore_distributed_optim")
"""Words for Adam in these programs."""

WHOLE = ("checkpoint_activations", "activations_checkpoint_method")
"""Settings of releases until May 2022 that recompute whole layers (NVIDIA/Megatron-LM @bbab79f869 ends them); both
Megatron-DeepSpeeds keep the first."""


def read_plan(reading: Reading, silent_share: float = 1.0) -> None:
    """Reads what rows alone do not say: schedule, data, context and expert parallelism, recomputation, offloading.

    silent_share: of the states that are offloaded where the file does not say how many: all by the arguments of
        Megatron-LM, none by `OptimizerConfig`.
    """
    keys = reading.keys
    reading.set_key("framework.name", "megatron-core")
    if keys["plan.tp"] == 1:
        keys["plan.tensor"] = "megatron-sp"  # no tensor parallelism, no difference
    _read_pipeline(reading)
    _read_data(reading)
    read_samples(reading)
    if keys["plan.cp"] > 1:
        _read_context(reading)
    reading.take("cp_comm_type")
    reading.take("hierarchical_context_parallel_sizes")
    _read_experts(reading)
    _read_recompute(reading)
    _read_offload(reading, silent_share)
    read_optimizer_kind(reading, "optimizer")


KINDS = {"sgd": "lion", "lion": "lion", "soap": "soap", **dict.fromkeys(("muon", "dist_muon", "adaptive_muon"), "muon")}
"""Optimizers of the job by those of Megatron-LM."""

MATRICES = "framework.set.update.matrices"

MUON = (
    SettingRow("muon_num_ns_steps", f"{MATRICES}.steps", silent=5),
    SettingRow("muon_tp_mode", f"{MATRICES}.tensor", "text", silent="duplicated"),
    SettingRow("muon_use_syrk", f"{MATRICES}.symmetric", "switch", silent=False),
    SettingRow("muon_nesterov", f"{MATRICES}.nesterov", "switch", silent=False),
)
"""Settings of Muon (megatron/training/arguments.py)."""


def _read_offload(reading: Reading, silent_share: float) -> None:
    """Reads what lies in host memory: activations, and states of the optimizer or a share of them."""
    by_module, by_layer = (reading.take_switch(name) for name in OFFLOADED)
    activations = ("activations",) if by_module or by_layer else ()
    if by_module:
        _read_modules_offloaded(reading)
    for name in () if by_module else BY_MODULE:
        reading.ignore(reading.take(name), "no modules are offloaded")
    for name in () if activations else BY_LAYER:
        reading.ignore(reading.take(name), "no activations are offloaded")
    share = _read_state_share(reading, activations, silent_share)
    states = ("optimizer",) if share > 0 else ()
    if activations or states:
        names = (*OFFLOADED, "optimizer_cpu_offload", *(("optimizer",) if _is_hybrid(reading) else ()))
        reading.set_key("plan.offload", activations + states, *names)
    if 0 < share < 1:
        reading.set_key("plan.offload.fraction", share, "optimizer_offload_fraction")
    if states and reading.take_switch("overlap_cpu_optimizer_d2h_h2d"):
        reading.set_key("plan.offload.overlap", True, "overlap_cpu_optimizer_d2h_h2d")
    if layers := reading.take_count("cpu_offloading_num_layers"):
        reading.set_key("plan.offload.layers", layers, "cpu_offloading_num_layers")


def _read_modules_offloaded(reading: Reading) -> None:
    """Reads the modules whose saved tensors are offloaded, as `TransformerConfig` does."""
    stated, share = reading.take("offload_modules"), reading.take("activation_offload_fraction")
    words = read_words(stated) if stated is not None and not is_null(stated.value) else ()
    modules = tuple(word for word in words if word in OFFLOADED_MODULES)
    if modules:
        reading.set_key("plan.offload.modules", modules, "offload_modules")
    else:
        why = "it does not say which modules are offloaded, and the program refuses that"
        reading.ask(stated or reading.take(OFFLOADED[0]), why, "plan.offload.modules=[core_attn,attn_proj]")
    if others := sorted({*words} - {*modules}):
        reading.approximate(stated, f"what {', '.join(others)} saves stays on the GPU", LARGE)
    if share is not None and not is_null(share.value) and (copies := float(read_number(share))) != 1:
        reading.set_key("plan.offload.copies", copies, "activation_offload_fraction")
    if (least := reading.take_count("min_offloaded_tensor_size")) is not None:
        reading.set_key("plan.offload.least_elements", least, "min_offloaded_tensor_size")


def _is_hybrid(reading: Reading) -> bool:
    return reading.take_word("optimizer") == HYBRID


def _read_state_share(reading: Reading, activations: tuple[str, ...], silent_share: float) -> float:
    """Returns which share of the optimizer's states lies in host memory."""
    hybrid, fraction = _is_hybrid(reading), reading.take("optimizer_offload_fraction")
    policy, overlap = reading.take("optimizer_offload_policy"), reading.take("overlap_cpu_optimizer_d2h_h2d")
    if not (reading.take_switch("optimizer_cpu_offload") or hybrid):
        reading.ignore(overlap, "no states are offloaded")
        return 0.0
    if policy is not None and str(policy.value) == "auto":
        why = "all states of the optimizer are offloaded, not as many as the memory of the GPU demands"
        reading.approximate(policy, why, SLOW, {"plan.offload": activations})
        return 1.0
    if fraction is not None and not is_null(fraction.value):
        return float(read_number(fraction))
    if not silent_share:
        reading.ignore(reading.take("optimizer_cpu_offload"), "optimizer_offload_fraction is 0 unless it is stated")
    return 0.5 if hybrid else silent_share


def read_optimizer_kind(reading: Reading, name: str) -> None:
    """Reads the kind of the optimizer. SGD keeps a buffer of momentum as Lion does, Muon keeps it for matrices
    (megatron/core/optimizer/__init__.py and emerging_optimizers.py of Megatron-LM)."""
    word = reading.take_word(name)
    if word in ("", *ADAMS):
        return
    if word not in KINDS:
        why = f"Adam is forecast, which keeps two moments for every weight, not {word}"
        reading.approximate(reading.take(name), why, LARGE)
        return
    reading.set_key("optimizer", KINDS[word], name)
    if word == "adaptive_muon":
        why = "Muon is forecast, without the second moment and its passes"
        reading.approximate(reading.take(name), why, f"{FAST}, {SMALL}")
    if word == "soap":
        reading.approximate(reading.take(name), "factors are forecast without the correction of KL-Shampoo", FAST)
    if KINDS[word] == "muon":
        reading.read_rows(MUON)


def _read_pipeline(reading: Reading) -> None:
    """Reads chunks of a stage, layers of the stages, and the overlap of passes."""
    pp, layers = reading.keys["plan.pp"], reading.keys.get("model.layers")
    ends = [reading.take_switch(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")]
    chunks, names = _read_chunks(reading, ends)
    layout = reading.take("pipeline_model_parallel_layout")
    stated = layout is not None and not is_null(layout.value) and pp > 1
    if layout is not None and stated:
        chunks, names = len(_read_layout_setting(reading, layout, pp)) // pp, ("pipeline_model_parallel_layout",)
    _read_end_stages(reading, chunks, divided=stated)
    if all(ends):
        reading.set_key("plan.partition", "ends-as-layers", *ENDS)
    elif any(ends) and layers and pp > 1:
        _set_end_as_layer(reading, layers, pp * chunks, *ends)
    if chunks > 1 and pp > 1:
        reading.set_key("plan.pipeline", "interleaved-1f1b", *names)
        reading.set_key("plan.pipeline.chunks", chunks, *names)
        if group := reading.take_count(*GROUPS):
            reading.set_key("plan.pipeline.group", group, *GROUPS)
        _read_short_groups(reading, pp)
    elif chunks == 1:
        reading.take(*GROUPS)
        _read_shards_of_vocabulary(reading, pp)
    _assume_partition(reading, pp * chunks)
    if reading.take_switch("deterministic_mode"):
        reading.set_key("framework.set.deterministic", True, "deterministic_mode")
    _read_order_of_passes(reading)


def _read_short_groups(reading: Reading, pp: int) -> None:
    """Reads the interleaved schedule of sail-sg/zero-bubble, whose groups have fewer micro-batches than devices."""
    if group := reading.take_count("interleave_group_size"):
        reading.set_key("plan.pipeline", "grouped-interleaved", "interleave_group_size")
        reading.set_key("plan.pipeline.group", min(group, pp), "interleave_group_size")
        if reading.take_switch("cpu_offload") and (count := reading.take_count("offload_chunk_num")):
            reading.set_key("plan.pipeline.offloaded", count, "cpu_offload", "offload_chunk_num")


def _read_shards_of_vocabulary(reading: Reading, pp: int) -> None:
    """Reads vocabulary parallelism, and the layers of a last stage with a large output layer, of
    sail-sg/VocabularyParallelism (@6191c3bf, megatron/training/arguments.py, get_num_layers_to_build)."""
    name, last, layers = "enable_layer_redistribution", "final_stage_num_layers", reading.keys.get("model.layers")
    if layers and pp > 1 and reading.take_switch(name) and (count := reading.take_count(last)) is not None:
        each, more = divmod(layers - count, pp - 1)
        split = [each] * (pp - 1 - more) + [each + 1] * more
        reading.set_key("plan.partition", (*split, count), name, last)
    if pp > 1 and reading.take_switch(SHARDED):
        reading.set_key("plan.pipeline", "vocabulary-1f1b", SHARDED)
        if reading.take_switch(TWO_BARRIERS):
            reading.set_key("plan.pipeline.barriers", 2, TWO_BARRIERS)
        if reading.take_switch(INTERLACED):
            why = "passes of the vocabulary in which all stages wait for each other are not known"
            reading.ask(reading.take(INTERLACED), why, "plan.schedule=vocabulary-1f1b")


def _read_order_of_passes(reading: Reading) -> None:
    """Reads the overlap of passes, and which weight gradients are put off."""
    overlap, pp = "overlap_moe_expert_parallel_comm", reading.keys["plan.pp"]
    deferred, limit = "defer_embedding_wgrad_compute", "wgrad_deferral_limit"
    overlaps = reading.take_switch(overlap)
    if overlaps:
        reading.set_key("plan.pipeline.overlap_passes", True, overlap)
        reading.set_key("framework.set.overlap.ep", True, overlap)
        if reading.take_switch("delay_wgrad_compute"):
            reading.set_key("plan.pipeline.delay_weight_gradients", True, "delay_wgrad_compute")
    elif pp > 1 and reading.take_switch(deferred):
        stated = reading.take(limit)
        count = 0 if stated is None or is_null(stated.value) else int(read_number(stated))
        reading.set_key("plan.pipeline.deferred_output_gradients", count, deferred, limit)


EAGER_LOSS = {"framework.set.loss.forward": 38, "framework.set.loss.backward": 14}
"""Bytes a logit of Megatron-Core's cross-entropy without fusion (megatron/core/tensor_parallel/cross_entropy.py)."""


def read_loss(reading: Reading, is_fused: bool) -> None:
    """Reads whether the loss is fused. is_fused: whether it is where the file does not say it."""
    name = "cross_entropy_loss_fusion"
    stated = reading.take(name)
    if stated is not None and not is_null(stated.value):
        is_fused = read_switch(stated)
    if not is_fused:
        for key, size in EAGER_LOSS.items():
            reading.set_key(key, size, name)


ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Settings that count an end of the model as a layer."""


def _set_end_as_layer(reading: Reading, layers: int, stages: int, embedding: bool, loss: bool) -> None:
    """Sets the layers of the stages where the embedding alone, or the loss alone, counts as a layer."""
    each, rest = divmod(layers + 1, stages)
    if rest:
        why = f"with it as a layer {layers} layers do not divide into {stages} stages"
        reading.ask(reading.take(*ENDS), why, "plan.partition=by-cost")
        return
    split = [each] * stages
    split[0 if embedding else -1] -= 1
    reading.set_key("plan.partition", tuple(split), *ENDS)


def _assume_partition(reading: Reading, stages: int) -> None:
    """Assumes layers of the stages where the model is not the file's, and they do not divide."""
    layers = reading.keys.get("model.layers")
    if not layers or "plan.partition" in reading.keys or "num_layers" in reading.stated:
        return
    if layers % stages:
        even = (layers + 2) % stages == 0
        why = f"the file does not say how {layers} layers go to {stages} stages"
        reading.assume("plan.partition", "ends-as-layers" if even else "by-cost", why)


def _read_chunks(reading: Reading, ends: list[bool]) -> tuple[int, tuple[str, ...]]:
    """Returns the chunks of a stage, and the settings that state them. ends: which ends of the model are layers."""
    pp, layers = reading.keys["plan.pp"], reading.keys.get("model.layers")
    each = reading.take_count("num_layers_per_virtual_pipeline_stage")
    names = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    if (stated := reading.take_count(*names)) is not None:
        return stated, names
    if not (each and layers and pp > 1):
        return 1, names
    name = "num_layers_per_virtual_pipeline_stage"
    chunks = max(1, (layers + sum(ends)) // pp // each)
    if chunks > 1 and layers % (pp * chunks) and not any(ends):
        reading.origins["plan.partition"] = reading.stated[name]  # the error about even stages is about this
    return chunks, (name,)


def _read_end_stages(reading: Reading, chunks: int, divided: bool) -> None:
    """Reads the layers of the first and last stage. divided: a layout says those of all stages."""
    pp, layers = reading.keys["plan.pp"], reading.keys.get("model.layers")
    first, last = reading.take_count(*FIRST), reading.take_count(*LAST)
    if not (first or last) or pp == 1 or divided or not layers:
        return
    stages = _uneven_layers(layers, pp, first, last)
    if stages is not None and all(count % chunks == 0 for count in stages):
        reading.set_key("plan.partition", tuple(count // chunks for count in stages) * chunks, *FIRST, *LAST)
        return
    why = "the layers do not divide over the stages and their chunks"
    for names in (FIRST, LAST):
        reading.ask(reading.take(*names), why, "plan.partition=by-cost")


def _read_layout_setting(reading: Reading, layout: Stated, pp: int) -> tuple[int, ...]:
    """Reads the layers of the stages of a layout; where no list of `plan.partition` can say them, the nearest that a
    list can. Raises PlanError for what is no layout of pp stages."""
    text = _spell_layout(layout.value)
    split = read_layout(text)
    if split is None:
        raise layout.refuse(
            "a layout has the letters E, t, m and L with | between stages", "Write it like Et*3|(tt|)*29m|L"
        )
    if len(split) % pp:
        near = -(-len(split) // pp) * pp
        rule = f"it has {len(split)} stages, and a pipeline of {pp} needs a multiple of {pp}"
        raise layout.refuse(rule, f"Write {near} stages")
    reading.set_key("plan.partition", split, "pipeline_model_parallel_layout")
    whys = ["MTP is moved to the last stage"] if "m" in text and "m" not in text.rpartition("|")[2] else []
    if (filled := fill_inner_stages(split)) != split:
        empty = ", ".join(str(stage) for stage, count in enumerate(split) if 0 < stage < len(split) - 1 and not count)
        whys.append(f"stage {empty}, which is left without a layer, takes one of an earlier stage")
    if whys:
        reading.assume("plan.partition", filled, f"as {layout.value}, but {', and '.join(whys)}")
    return filled


def _spell_layout(value: Any) -> str:
    """Returns a layout in letters; configurations may list the names of layers of every stage."""
    if not isinstance(value, list):
        return str(value)
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    stages = [stage if isinstance(stage, list) else [stage] for stage in value]
    return "|".join("".join(letters.get(str(layer), "?") for layer in stage) for stage in stages)


def fill_inner_stages(stages: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stages with a layer at least in each but the first and the last: an empty stage takes it of the
    nearest stage before it that has more, or else behind it. Stages stay as they are where layers are too few."""
    layers = list(stages)
    for stage in range(1, len(layers) - 1):
        if layers[stage]:
            continue
        others = [*range(stage - 1, -1, -1), *range(stage + 1, len(layers))]
        giver = next((other for other in others if layers[other] > (0 < other < len(layers) - 1)), None)
        if giver is None:
            return stages
        layers[giver], layers[stage] = layers[giver] - 1, 1
    return tuple(layers)


def read_layout(text: str) -> tuple[int, ...] | None:
    """Reads the layers of the stages of a ``pipeline_model_parallel_layout`` such as ``Et*3|(tt|)*29,m|L``; None if it
    is none.

    t is a layer; m is a layer of multi-token prediction, which meshcast puts on the last stage; E is the embedding and
    L the loss.
    """
    text = re.sub(r"[\s,'\"]", "", text)
    for _ in range(20):
        grown = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda repeat: repeat[1] * int(repeat[2]), text)
        if grown == text or len(grown) > 10_000:
            break
        text = grown
    text = re.sub(r"([A-Za-z])\*(\d{1,3})", lambda repeat: repeat[1] * int(repeat[2]), text)
    if not re.fullmatch(r"[EtmL|]+", text):
        return None
    return tuple(stage.count("t") for stage in text.split("|"))


def _uneven_layers(layers: int, pp: int, first: int | None, last: int | None) -> tuple[int, ...] | None:
    """Returns the layers of the stages with those of the first or last stated; None if the rest does not divide."""
    rest, stages = layers - (first or 0) - (last or 0), pp - bool(first) - bool(last)
    if stages < 1 or rest % stages or rest <= 0:
        return None
    return (*((first,) if first else ()), *(rest // stages,) * stages, *((last,) if last else ()))


def _read_data(reading: Reading) -> None:
    """Reads the data scheme, and the formats in which gradients and states are kept."""
    strategy = reading.take_word("data_parallel_sharding_strategy") or "optim_grads_params"
    fsdp = reading.take_switch("use_megatron_fsdp", "use_custom_fsdp")
    if fsdp:
        reading.set_key(
            "plan.data", SHARDING.get(strategy, "fsdp"), "data_parallel_sharding_strategy", "use_megatron_fsdp"
        )
        _read_double_buffer(reading)
    elif reading.take_switch("use_torch_fsdp2"):
        reading.set_key("plan.data", "fsdp", "use_torch_fsdp2")
    elif reading.take_switch("use_distributed_optimizer"):
        reading.set_key("plan.data", "zero-1", "use_distributed_optimizer")
    elif reading.take_word("optimizer").startswith("dist_"):
        reading.set_key("plan.data", "zero-1", "optimizer")
    else:
        reading.set_key("plan.data", "ddp")
    reading.take("use_distributed_optimizer", "use_torch_fsdp2")
    if reading.keys["plan.data"] not in ("zero-1", "fsdp"):
        reading.keys.pop("plan.replicate", None)


def _read_double_buffer(reading: Reading) -> None:
    """Reads whether whole weights and gradients lie in buffers for good, as those that are registered with NCCL do."""
    registered = next((name for name in REGISTERED if reading.take_switch(name)), None)
    buffered = any([reading.take_switch(name) for name in BUFFERED])
    if (registered or buffered) and reading.keys["plan.data"] == "fsdp":
        reading.set_key("plan.data.double_buffer", True, *BUFFERED, *REGISTERED)
    if registered:
        why = "collectives take as many multiprocessors as without registered buffers"
        reading.approximate(reading.take(registered), why, SLOW)


def _read_context(reading: Reading) -> None:
    """Reads Transformer Engine's context parallelism, by messages around a ring unless the file says otherwise."""
    reading.set_key("plan.sequence", "megatron-cp", "cp_comm_type", "context_parallel_size")
    stated = reading.take("cp_comm_type")
    words = read_words(stated) if stated is not None and not is_null(stated.value) else ()
    if set(words) <= {"p2p", "all_gather", "a2a"} and len(set(words)) <= 1:
        reading.set_key("plan.sequence.comm", words[0] if words else "p2p", "cp_comm_type")
    else:
        why = "one kind of communication is forecast for all layers: p2p"
        reading.set_key("plan.sequence.comm", "p2p", "cp_comm_type")
        for setting in (stated, reading.take("hierarchical_context_parallel_sizes")):
            reading.approximate(setting, why, other={"plan.sequence.comm": "a2a"})


def _read_experts(reading: Reading) -> None:
    """Reads the expert scheme by its dispatcher, and expert tensor parallelism, by default that of the rest."""
    keys = reading.keys
    kind = reading.take_word("moe_token_dispatcher_type") or "allgather"
    backend = reading.take_word("moe_flex_dispatcher_backend") or "deepep"
    sms = reading.take_count(f"moe_{backend}_num_sms") or reading.take_count("moe_flex_dispatcher_num_sms")
    deep = reading.take_switch("moe_enable_deepep")
    etp = reading.take_count("expert_tensor_parallel_size")
    if "model.moe.experts" not in keys:
        keys.pop("plan.ep", None)
        return
    if etp or "num_layers" in reading.stated:  # otherwise the file only changes a recipe, whose experts are whole
        reading.set_key("plan.etp", etp or keys["plan.tp"], "expert_tensor_parallel_size")
    if keys["plan.ep"] == 1:
        return
    if kind == "flex" or deep:
        _set_backend(reading, backend, sms)
    elif kind == "allgather" and keys.get("plan.etp", 1) > 1:
        stated = reading.take("moe_token_dispatcher_type")
        reading.approximate(stated, "all-to-all is forecast, for all-gather is described for whole experts only", FAST)
        reading.set_key("plan.expert", "all-to-all")
    elif kind in DISPATCHERS:
        reading.set_key("plan.expert", DISPATCHERS[kind], *DISPATCHER_NAMES)
    else:
        stated = reading.take("moe_token_dispatcher_type")
        reading.ask(stated, f"{kind!r} is no dispatcher that meshcast knows", "plan.expert=all-to-all")
    _read_shared_overlap(reading)


def _read_shared_overlap(reading: Reading) -> None:
    """Reads whether shared experts run beside the exchange of tokens."""
    shared = reading.keys.get("plan.expert") in BESIDE_SHARED and reading.keys.get("model.moe.shared_experts")
    if shared and reading.take_switch("moe_shared_expert_overlap"):
        reading.set_key("plan.expert.overlap_shared", True, "moe_shared_expert_overlap")


DISPATCHER_NAMES = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep")


def _set_backend(reading: Reading, backend: str, sms: int | None) -> None:
    """Sets the scheme of a flexible dispatcher. sms: multiprocessors of its kernels, if stated."""
    if backend not in BACKENDS:
        stated = reading.take("moe_flex_dispatcher_backend")
        reading.approximate(stated, "DeepEP is forecast", other={"plan.expert": "all-to-all"})
        backend = "deepep"
    reading.set_key("plan.expert", BACKENDS[backend], *DISPATCHER_NAMES)
    if backend == "deepep":
        for key, value in DEEPEP.items():
            reading.set_key(key, value)
    names = "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_flex_dispatcher_num_sms"
    reading.set_key("plan.expert.sms", sms or {"deepep": 20}.get(backend, 16), *names)


def _read_recompute(reading: Reading) -> None:
    """Reads the recomputation of whole layers, or of modules."""
    names: tuple[str, ...] = ("recompute_granularity", "activations_checkpoint_granularity")
    kind = reading.take_word(*names)
    modules = reading.take("recompute_modules")
    number, method = _read_layers(reading), reading.take_word("recompute_method", "activations_checkpoint_method")
    selective, by_layer = reading.take_switch("recompute_activations"), reading.take_switch("moe_layer_recompute")
    if reading.take_switch(WHOLE[0]):
        kind, names, method = kind or "full", WHOLE, "uniform"
    elif not kind and _is_method_alone(reading):
        kind, names = "full", WHOLE
    if not kind and (selective or by_layer):
        kind, names = "selective", ("recompute_activations", "moe_layer_recompute")
    if kind == "full":
        reading.set_key("plan.recompute", "full", *names, "recompute_method", *WHOLE)
        if number and method == "block":
            reading.set_key("plan.recompute.layers", number, *LAYERS)
        elif number and number > 1:
            why = f"the inputs of all layers are kept, and each is recomputed alone, not {number} layers together"
            reading.approximate(reading.take(*LAYERS), why)
    elif kind == "selective":
        _read_modules(reading, modules, names, by_layer, not by_layer or selective)
    elif kind:
        reading.ask(reading.take(*names), f"{kind!r} is neither full nor selective", "plan.recompute=full")


LAYERS = ("recompute_num_layers", "activations_checkpoint_num_layers", "checkpoint_num_layers")
"""Settings of the layers that are recomputed, or recomputed together."""


def _read_layers(reading: Reading) -> int | None:
    """Reads the layers that are recomputed, if it says so; 0 says nothing."""
    stated = reading.take(*LAYERS)
    return None if stated is None or str(stated.value) == "0" else reading.take_count(*LAYERS)


def _is_method_alone(reading: Reading) -> bool:
    """Returns whether a release before the granularity had its setting states the method of full recomputation."""
    stated = reading.stated.get("activations_checkpoint_method")
    if stated is None or is_null(stated.value):
        return False
    return "activations_checkpoint_granularity" not in reading.stated


def _read_modules(
    reading: Reading, modules: Stated | None, names: tuple[str, ...], by_layer: bool, attention: bool
) -> None:
    """Reads the modules that are recomputed.

    names: the settings that say so.
    by_layer: whether layers of experts are,
    attention: whether the core of attention is, where no list says it.
    """
    usual = (*(("core_attn",) if attention else ()), *(("moe",) if by_layer else ()))
    words = read_words(modules) if modules is not None and not is_null(modules.value) else usual
    known = tuple(word for word in words if word in MODULES)
    if len(known) < len(words):
        others = ", ".join(word for word in words if word not in MODULES)
        reading.approximate(modules, f"{others} is kept, not recomputed", LARGE)
    reading.set_key("plan.recompute", "selective" if known else "none", *names, "recompute_modules")
    if known:
        reading.set_key("plan.recompute.modules", known, "recompute_modules", "moe_layer_recompute")


def write_plan(keys: SomeKeys) -> Keys:
    """Returns the settings of `read_plan`."""
    settings: Keys = {}
    data = keys.get("plan.data")
    if data == "zero-1":
        settings["use_distributed_optimizer"] = True
    elif data in SHARDING.values() and data != "ddp":
        settings["use_megatron_fsdp"] = True
        if keys.get("plan.data.double_buffer"):
            settings["fsdp_double_buffer"] = True
        settings["data_parallel_sharding_strategy"] = next(word for word, ours in SHARDING.items() if ours == data)
    stated = keys.get("plan.sequence.comm") if keys.get("plan.sequence") == "megatron-cp" else None
    if (comm := stated or MESSAGES.get(keys.get("plan.sequence", ""), "p2p")) != "p2p":
        settings["cp_comm_type"] = comm
    if "model.moe.experts" in keys:
        settings |= _write_experts(keys)
    if keys.get("optimizer") == "muon":
        settings |= {"optimizer": "muon", **write_rows(MUON, keys)}
    elif keys.get("optimizer") in ("lion", "soap"):
        settings["optimizer"] = keys["optimizer"]
    return settings | _write_recompute(keys) | _write_offload(keys) | _write_pipeline(keys)


def _write_recompute(keys: SomeKeys) -> Keys:
    if keys.get("plan.recompute") == "full":
        layers = keys.get("plan.recompute.layers")
        method = {"recompute_method": "block" if layers else "uniform", "recompute_num_layers": layers or 1}
        return {"recompute_granularity": "full", **method}
    if keys.get("plan.recompute") != "selective":
        return {}
    modules = [word for word in keys.get("plan.recompute.modules", ()) if word in MODULES]
    stated = {} if modules == ["core_attn"] else {"recompute_modules": modules}
    return {"recompute_granularity": "selective", **stated}


def _write_offload(keys: SomeKeys) -> Keys:
    settings: Keys = {}
    if "activations" in keys.get("plan.offload", ()):
        settings = _write_activations(keys)
    if "optimizer" in keys.get("plan.offload", ()):
        settings["optimizer_cpu_offload"] = True
        settings["optimizer_offload_fraction"] = keys.get("plan.offload.fraction", 1)
        if keys.get("plan.offload.overlap"):
            settings["overlap_cpu_optimizer_d2h_h2d"] = True
    return settings


def _write_activations(keys: SomeKeys) -> Keys:
    """Writes which activations are offloaded: of modules, or of layers; those of all layers it cannot say."""
    layers, modules = keys.get("plan.offload.layers"), keys.get("plan.offload.modules")
    if not modules:
        return {"cpu_offloading": True, "cpu_offloading_num_layers": layers} if layers else {}
    settings: Keys = {"fine_grained_activation_offloading": True, "offload_modules": [*modules]}
    for name, key, usual in (
        ("activation_offload_fraction", "copies", 1),
        ("min_offloaded_tensor_size", "least_elements", None),
    ):
        if (value := keys.get(f"plan.offload.{key}", usual)) != usual:
            settings[name] = value
    return settings


def _write_pipeline(keys: SomeKeys) -> Keys:
    settings: Keys = {}
    partition, pp = keys.get("plan.partition"), keys.get("plan.pp", 1)
    if keys.get("plan.pipeline") == "vocabulary-1f1b":
        two = {TWO_BARRIERS: True} if keys.get("plan.pipeline.barriers") == 2 else {}
        settings |= {SHARDED: True, **two}
    chunks = keys.get("plan.pipeline.chunks", 1) if keys.get("plan.pipeline") == "interleaved-1f1b" else 1
    if partition == "ends-as-layers":
        settings |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    elif isinstance(partition, tuple) and pp > 1:
        settings["pipeline_model_parallel_layout"] = write_layout(partition, keys.get("model.mtp", 0))
    if chunks > 1 and pp > 1 and not isinstance(partition, tuple):
        settings["virtual_pipeline_model_parallel_size"] = chunks
    if chunks > 1 and (group := keys.get("plan.pipeline.group")):
        settings[GROUPS[0]] = group
    if keys.get("plan.pipeline.overlap_passes"):
        settings["overlap_moe_expert_parallel_comm"] = True
    if keys.get("plan.pipeline.delay_weight_gradients"):
        settings["delay_wgrad_compute"] = True
    if (limit := keys.get("plan.pipeline.deferred_output_gradients")) is not None:
        settings |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": limit}
    return settings


def write_layout(partition: tuple[int, ...], mtp: int) -> str:
    """Writes the layers of the stages as a ``pipeline_model_parallel_layout``, with `mtp` layers of multi-token
    prediction."""
    return "E" + "|".join("t" * layers for layers in partition) + "m" * mtp + "L"


def _write_experts(keys: SomeKeys) -> Keys:
    """Writes the dispatcher, and expert tensor parallelism where it is not that of the rest."""
    settings: Keys = {}
    if keys.get("plan.etp", keys.get("plan.tp")) != keys.get("plan.tp", 1) or keys.get("plan.ep", 1) > 1:
        settings["expert_tensor_parallel_size"] = keys["plan.etp"]
    if keys.get("plan.ep", 1) == 1:
        return settings
    scheme = keys.get("plan.expert", "all-to-all")
    if keys.get("model.moe.routing") == "forced-balanced":
        settings["moe_router_force_load_balancing"] = True
    backend = next((word for word, ours in BACKENDS.items() if ours == scheme), None)
    if backend is not None:
        settings |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        settings[f"moe_{backend}_num_sms"] = keys["plan.expert.sms"]
    elif (word := next((word for word, ours in DISPATCHERS.items() if ours == scheme), "alltoall")) != "allgather":
        settings["moe_token_dispatcher_type"] = word
    if keys.get("plan.expert.overlap_shared"):
        settings["moe_shared_expert_overlap"] = True
    return settings


# ---------------------------------------------------------------------------------------- precision


def read_recipe(reading: Reading, base: str) -> None:
    """Reads the compute format: `base`, or a recipe below 16 bits."""
    fp8 = reading.take_word("fp8_format", "fp8")
    if reading.take_switch("fp8_hybrid", "fp8_e4m3"):  # of releases from December 2022 to August 2023
        fp8 = "hybrid"
    recipe = reading.take_word("fp8_recipe") or "delayed"
    fp4 = reading.take_word("fp4_format", "fp4")
    variant = reading.take_word("fp4_recipe")
    if fp4 not in ("", "false"):
        if variant not in ("", "nvfp4"):
            reading.approximate(reading.take("fp4_recipe"), f"the recipe nvfp4 is forecast, not {variant}")
        reading.set_key("precision.compute", "nvfp4", "fp4_format", "fp4", base)
        read_gathers(reading)
    elif fp8 not in ("", "false"):
        if recipe not in RECIPES:
            known = ", ".join(RECIPES)
            reading.ask(
                reading.take("fp8_recipe"), f"{recipe!r} is none of {known}", "precision.compute=fp8-tensorwise"
            )
        names = ("fp8_recipe", "fp8_format", "fp8", "fp8_hybrid", "fp8_e4m3", base)
        reading.set_key("precision.compute", RECIPES.get(recipe, "fp8-delayed"), *names)
        read_gathers(reading)
    else:
        reading.set_key("precision.compute", base, base)


GATHERS = ("fp8_param_gather", "fp8_param", "fp8_params", "fp4_param_gather", "fp4_param")


def read_gathers(reading: Reading) -> None:
    """Reads whether weights are gathered in the format of the recipe."""
    if reading.take_switch(*GATHERS):
        reading.set_key("framework.set.update.quantised_weights", True, *GATHERS)


def read_fp8_attention(reading: Reading) -> None:
    """Reads whether attention is computed in 8 bits."""
    if reading.take_switch("fp8_dot_product_attention"):
        reading.set_key("framework.set.attention_library", "cudnn-fp8", "fp8_dot_product_attention")


def write_recipe(keys: SomeKeys, format_name: str) -> tuple[str, Keys]:
    """Writes the 16- or 32-bit format of a compute format, and the settings of its recipe. format_name: a setting."""
    compute = keys.get("precision.compute", "bf16")
    if compute == "nvfp4":
        gathers = {"fp4_param_gather": True} if keys.get("framework.set.update.quantised_weights") else {}
        return "bf16", {format_name.replace("8", "4"): "e2m1", **gathers}
    recipe = next((word for word, ours in RECIPES.items() if ours == compute), None)
    if recipe is None:
        return (compute if compute in ("bf16", "fp16", "fp32") else "bf16"), {}
    gathers = {"fp8_param_gather": True} if keys.get("framework.set.update.quantised_weights") else {}
    return "bf16", {format_name: "hybrid", **({} if recipe == "delayed" else {"fp8_recipe": recipe}), **gathers}

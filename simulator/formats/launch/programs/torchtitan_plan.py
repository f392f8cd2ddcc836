"""What torchtitan's settings say of a job."""

from __future__ import annotations

import re
from itertools import pairwise

from meshcast.hardware.documents.input_file import is_file
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.keys import flatten_model
from meshcast.simulator.formats.launch.programs.evaluations import MICRO, EvaluationSettings, read_evaluation
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS
from meshcast.simulator.formats.launch.reading import Reading, date_release, set_gpus
from meshcast.simulator.formats.launch.table import OFF, ON, SettingRow, is_null, read_number, read_words
from meshcast.simulator.models.load import load_model

ROWS = (
    SettingRow("training.seq_len", "batch.sequence"),
    SettingRow("training.max_context_length", "batch.sequence"),
    SettingRow("training.steps", "run.steps"),
    SettingRow("parallelism.tensor_parallel_degree", "plan.tp", silent=1),
    SettingRow("parallelism.pipeline_parallel_degree", "plan.pp", silent=1),
    SettingRow("parallelism.context_parallel_degree", "plan.cp", silent=1),
    SettingRow("parallelism.expert_parallel_degree", "plan.ep", silent=1),
    SettingRow(
        "parallelism.enable_sequence_parallel",
        "plan.tensor",
        "switch",
        {True: "megatron-sp", False: "megatron"},
        silent="megatron-sp",
    ),
    SettingRow("parallelism.enable_async_tensor_parallel", "framework.set.overlap.tp", "switch", ON, silent=False),
    SettingRow("compile.enable_async_tensor_parallel", "framework.set.overlap.tp", "switch", ON),
    SettingRow("parallelism.disable_loss_parallel", "framework.set.loss.whole_vocabulary", "switch", ON, silent=False),
    SettingRow("parallelism.enable_loss_parallel", "framework.set.loss.whole_vocabulary", "switch", OFF),
    SettingRow("compile.enable", "framework.set.compile", "switch", ON, silent=False),
)

SCHEDULES = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b", "loopedbfs": "breadth-first"},
    **{"zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v", "interleavedzerobubble": "interleaved-zb"},
}
"""Schedules by torch's names in small letters, without "Schedule"."""

LOOPED = ("interleaved-1f1b", "interleaved-zb", "breadth-first")
"""Schedules of any number of chunks a device, by default two."""

EXPERTS = {"standard": "all-to-all", "deepep": "deepep", "hybridep": "hybrid-ep"}

FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}

PARTS = "parallelism.module_fqns_per_model_part"

ADAM = ("adam", "adamw")
MUON = ("muon", "distmuon")

COMPILED_LOSS = {"forward": 4, "backward": 4, "kept": 2, "peak": 4}
"""Bytes a logit of the loss as Inductor compiles it since PyTorch 2.7 (online softmax): logits and their gradient in
bf16; both passes read the logits, the backward pass writes the gradient."""

MICROBATCH_SIZES_SINCE = "2025-04"
"""Before, a pipeline has a number of micro-batches, by default that of the stages (@5e2033c75 of 2025-04-07)."""

MESSAGES_SAVED_SINCE = "2025-09"
"""Before, dispatch and combine of experts are repeated (@c4e229115 of 2025-09-06)."""

CHUNKS = 8
"""Chunks of the sequence in ``ChunkedLossWrapper`` and ``ChunkedCELoss``: their default."""

HAS_SETTINGS = "the last release that has settings of these names"

LAST_TOML = "2026-01"
"""The last release that reads TOML (@9810191bb of 2026-02-23 removed it)."""

RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{
        f"training.{name}": f"parallelism.{name}"
        for name in (
            "data_parallel_shard_degree",
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "disable_loss_parallel",
            "enable_loss_parallel",
        )
    },
    **{
        f"training.pipeline_parallel_{name}": f"parallelism.pipeline_parallel_{name}"
        for name in ("degree", "schedule", "split_points")
    },
    "training.compile": "compile.enable",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    **{
        f"experimental.pipeline_parallel_{name}": f"parallelism.pipeline_parallel_{name}"
        for name in ("degree", "schedule", "schedule_csv", "microbatch_size", "microbatches", "split_points")
    },
}
"""Settings of earlier releases, and what they are called since."""

RELEASES = (
    (r"(experimental|training)\..*_parallel.*", "2025-02"),  # [parallelism] since @785c34c99 of 2025-03-18
    (r"training\.batch_size", "2025-05"),  # local_batch_size since @8570415c3 of 2025-06-05
    (r".*\.pipeline_parallel_split_points", "2025-09"),  # gone with @6e06a49cd of 2025-10-13
)
"""Last months of settings of TOML files that have other names since."""

CONFIG_RELEASES = (
    (r"activation_checkpoint\.selective_ac_option", "2026-02"),  # gone with @114151ad4 of 2026-03-23
    (r"activation_checkpoint\.(mode|early_stop|per_op_\w+)", "2026-05"),  # policies since @c5d93d109 of 2026-06-15
    (r"training\.(local_batch_size|seq_len|global_batch_size)", "2026-07"),  # in tokens since @73aed7f6c of 2026-08-20
    (r"parallelism\.(pipeline_parallel_microbatch_size|enable_async_tensor_parallel)", "2026-07"),
    (r"parallelism\.context_parallel_rotate_method", "2026-05"),  # gone with @8e5554449 of 2026-06-14
    (r"parallelism\.expert_(parallel_comm_backend|tensor_parallel_degree)", "2026-03"),  # with @c4b409af2 of 2026-04-30
)
"""The same of configurations in Python."""

LAST_OF_LAYERS, LAST_OF_MODES, LAST_IN_SEQUENCES = "2026-02", "2026-05", "2026-07"
"""The last releases that recompute every n-th layer, whose recomputation has a mode, and whose batches are in
sequences."""


def interpret_settings(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows(ROWS)
    reading.set_key("framework.name", "torchtitan")
    _date_release(reading)
    _read_model(reading)
    _read_sequence(reading)
    _read_pipeline(reading)
    _read_data(reading)
    _read_batch(reading)
    _read_experts(reading)
    _read_checkpointing(reading)
    _read_precision(reading)
    _read_converters(reading)
    _read_loss(reading)
    _read_optimizer(reading)
    if reading.take_switch("training.enable_cpu_offload"):
        reading.set_key("plan.offload", ("optimizer",), "training.enable_cpu_offload")
        why = "of what FSDP offloads, only the optimizer states are forecast in host memory"
        errs = "the forecast is too fast, and its memory of the GPU too large"
        reading.approximate(reading.stated["training.enable_cpu_offload"], why, errs)
    if reading.take_switch("checkpoint.enable", "checkpoint.enable_checkpoint"):
        every = reading.take_count("checkpoint.interval") or 500
        mode = reading.take_word("checkpoint.async_mode")
        reading.set_checkpoints(every, mode.startswith("async"), "checkpoint.interval", "checkpoint.enable")
    _read_evaluation(reading)
    _read_graphs(reading)
    _read_gpus(reading)


EVALUATION = EvaluationSettings(("validation.local_batch_size",), 8, "validation.seq_len", 2048)
"""Of releases that read TOML (config/job_config.py, ``Validation``, since @acd5ba8ed of 2025-07-09); those of
configurations in Python validate on the batches of training (components/validate.py)."""


def _read_evaluation(reading: Reading) -> None:
    """Reads validation, whose batches a pipeline divides into as many micro-batches as those of training."""
    of_python = "config" in reading.stated
    switch = "validator.enable" if of_python else "validation.enable"
    settings = EvaluationSettings(()) if of_python else EVALUATION
    read_evaluation(reading, settings, reading.take_switch(switch), switch)
    if (local := reading.keys.get(MICRO)) is not None and "batch.drained" in reading.keys:
        pieces = reading.keys["batch.drained"] // reading.keys["batch.micro"]
        reading.set_key(MICRO, max(1, local // pieces), *EVALUATION.micro, switch)


def _date_release(reading: Reading) -> None:
    """Dates the release of a file by the names of its settings: the last that has them. Of TOML at least the last that
    reads it; of Python today's without any."""
    of_python = "config" in reading.stated
    names = [stated.shown.lstrip("-") for stated in reading.stated.values()]
    releases = CONFIG_RELEASES if of_python else RELEASES
    dated = [month for pattern, month in releases if any(re.fullmatch(pattern, name) for name in names)]
    why = HAS_SETTINGS if of_python else f"the last release that reads TOML, and {HAS_SETTINGS}"
    date_release(reading, min(dated, default=None if of_python else LAST_TOML), why)


def _read_gpus(reading: Reading) -> None:
    """Reads the number of GPUs, as torchrun or ``NGPU`` say it; 8 by default in ``run_train.sh``."""
    nodes = reading.take("nnodes", "sbatch_nodes", decisive=False)
    each = reading.take("nproc_per_node", "NGPU", decisive=False)
    launch, names = reading.file.launch, ("nproc_per_node", "NGPU", "nnodes", "sbatch_nodes")
    if each is not None and (gpus := read_digits(str(each.value))) is not None:
        count = read_digits(str(nodes.value)) if nodes is not None else None
        set_gpus(reading, count, gpus, *names)
    elif each is None and launch is not None and launch.entry == "run_train.sh":
        reading.set_key("cluster.gpus", 8)


def _read_model(reading: Reading) -> None:
    """Reads the model by its name and flavor."""
    name, flavor = reading.take_word("model.name"), reading.take_word("model.flavor")
    if name == "transformers_modeling_backend":
        reading.read_model("hf_transformers.model", "job.hf_transformers_model")
        return
    if "model.layers" in reading.keys:  # another model is stated
        for setting in ("model.name", "model.flavor"):
            reading.ignore(reading.take(setting), "the job states the model")
        return
    of_function = "config" in reading.stated
    if of_function and not flavor:  # which was asked for
        return
    plain = re.sub(r"_(flex|varlen|irope)(_attn)?$", "", flavor or "debugmodel")
    preset = FLAVORS.get((name or ("" if of_function else "llama3"), plain))
    if preset is None:
        stated = reading.take("model.flavor", "model.name")
        reading.ask(
            stated, f"meshcast has no preset of {name} {flavor}: give one, or its config.json", "model=llama3-8b"
        )
        return
    reading.set_key("model.preset", preset, "model.flavor", "model.name")
    reading.keys |= flatten_model(load_model(preset))


def _read_sequence(reading: Reading) -> None:
    """Reads context parallelism: all-gathers of keys and values, or a ring."""
    method = "parallelism.context_parallel_rotate_method"
    balancer = "parallelism.context_parallel_load_balancer"
    if reading.keys["plan.cp"] == 1:
        for name in (method, balancer):
            reading.ignore(reading.take(name), "there is no context parallelism")
        return
    rotate = reading.take_word(method) or "allgather"
    reading.set_key("plan.sequence", "ring" if rotate == "alltoall" else "all-gather", method)
    if rotate == "alltoall":
        reading.set_key("plan.sequence.merge", "eager")
    order = reading.take(balancer)
    if order is not None and str(order.value).lower() != "headtail":
        why = f"the order headtail is forecast, not {order.value}"
        reading.approximate(order, why, "ranks have equal work in the forecast")


# ---------------------------------------------------------------------------------------------- pipeline


def _read_pipeline(reading: Reading) -> None:
    """Reads schedule, chunks and the layers of stages, by the rules of ``generate_llm_fqn_per_model_part``."""
    keys, pp = reading.keys, reading.keys["plan.pp"]
    section = "parallelism.pipeline_parallel"
    names = ("schedule", "schedule_csv", "layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
    if pp == 1:
        for name in (*(f"{section}_{end}" for end in (*names, "split_points")), PARTS):
            reading.ignore(reading.take(name, decisive=False), "there is no pipeline")
        return
    schedule = _read_schedule(reading)
    less = [reading.take(f"{section}_{end}_stage_less_layers") for end in ("first", "last")]
    first, last = (1 if fewer is None or is_null(fewer.value) else int(read_number(fewer)) for fewer in less)
    each = reading.take_count(f"{section}_layers_per_stage")
    layers = keys.get("model.layers", 0)
    looped = schedule in LOOPED
    chunks = 2 if looped or schedule in ("zb-v", "dualpipe-v") else 1
    if counts := _read_parts(reading):
        chunks = max(1, len(counts) // pp)
        reading.set_key("plan.partition", counts, PARTS, f"{section}_split_points")
    elif layers:
        if each and looped:
            chunks = max(1, -(-(layers + first + last) // each) // pp)
        ends = [f"{section}_{end}_stage_less_layers" for end in ("first", "last")]
        reading.set_key("plan.partition", _divide_layers(layers, pp * chunks, first, last), *ends)
    csv = reading.take(f"{section}_schedule_csv")
    if csv is not None and not is_null(csv.value):
        reading.set_key("plan.pipeline", "from-file", f"{section}_schedule_csv")
        reading.set_key("plan.pipeline.path", str(csv.value), f"{section}_schedule_csv")
        if not is_file(reading.file.folder / str(csv.value)):
            why = "it names the order of the pipeline, a file that is not beside this one"
            reading.ask(csv, why, "plan.schedule=1f1b")
        return
    reading.set_key("plan.pipeline", schedule, f"{section}_schedule")
    reading.set_key("plan.pipeline.chunks", chunks, f"{section}_layers_per_stage", f"{section}_schedule")
    if schedule == "breadth-first":
        reading.set_key("plan.pipeline.backward_from", "last", f"{section}_schedule")


def _read_parts(reading: Reading) -> tuple[int, ...]:
    """Returns the layers of stages that the file states: by names of modules or, until 2025-09, by where they end."""
    parts, points = reading.take(PARTS), reading.take("parallelism.pipeline_parallel_split_points")
    if parts is not None and not is_null(parts.value):
        stages = parts.value if isinstance(parts.value, list) else [parts.value]
        names = [stage.split(",") if isinstance(stage, str) else stage for stage in stages]  # joined on command lines
        return tuple(sum(str(name).startswith("layers.") for name in stage) for stage in names)
    words = read_words(points) if points is not None and not is_null(points.value) else ()
    ends = [end for word in words if (end := read_digits(word.rpartition(".")[2])) is not None]
    edges = [0, *ends, reading.keys.get("model.layers", 0)] if ends else []
    return tuple(later - earlier for earlier, later in pairwise(edges))


def _read_schedule(reading: Reading) -> str:
    """Returns the schedule; asks for a schedule that meshcast does not have."""
    name = "parallelism.pipeline_parallel_schedule"
    word = (reading.take_word(name) or "1f1b").removeprefix("schedule")
    if word not in SCHEDULES:
        if is_null(getattr(reading.stated.get(f"{name}_csv"), "value", None)):
            reading.ask(reading.take(name), "meshcast has no such schedule", "plan.schedule=interleaved-1f1b")
        return "interleaved-1f1b"
    return SCHEDULES[word]


def _divide_layers(layers: int, stages: int, first: int, last: int) -> str | tuple[int, ...]:
    """Returns the layers of the stages: the first has `first` fewer, the last `last` fewer; a word where there is
    one."""
    if stages > layers + first + last:  # which is refused
        return "even"
    each, more = divmod(layers + first + last, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if len(set(counts)) == 1:
        return "even"
    return "ends-as-layers" if (first, last, more) == (1, 1, 0) else tuple(counts)


# -------------------------------------------------------------------------------------- replicas, batches


def _read_data(reading: Reading) -> None:
    """Reads FSDP, DDP, or both (hybrid sharding)."""
    keys = reading.keys
    replicated, sharded = (f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard"))
    replicate = reading.take_count(replicated) or 1
    stated = reading.take(sharded)
    shard = -1 if stated is None or is_null(stated.value) else int(read_number(stated))
    if reading.take_word("training.data_parallel_type") == "ddp":  # mid 2024
        replicate, shard = (shard if shard > 0 else replicate), 1
    if shard == 1 and keys["plan.cp"] == 1:
        reading.set_key("plan.data", "ddp", sharded, "training.data_parallel_type")
        reading.set_key("plan.dp", replicate, replicated)
    else:
        reading.set_key("plan.data", "fsdp", sharded, "training.data_parallel_type")
        reading.set_key("plan.replicate", replicate, replicated)
        if shard > 0:
            reading.set_key("plan.dp", replicate * shard, sharded)
    name = "parallelism.fsdp_reshard_after_forward"
    policy = reading.take_word(name) or "default"
    if keys["plan.data"] == "fsdp":
        reading.set_key("plan.data.reshard", policy == "always" or (policy == "default" and keys["plan.pp"] == 1), name)
    else:
        reading.ignore(reading.stated.get(name), "weights are not sharded")


IN_SEQUENCES, IN_TOKENS = "training.local_batch_size", "training.num_tokens_per_microbatch_per_dp_rank"

PIECES = {
    "size": "parallelism.pipeline_parallel_microbatch_size",
    "tokens": "parallelism.num_pp_microbatches",
    "number": "parallelism.pipeline_parallel_microbatches",
}
"""Settings of the micro-batches of a pipeline: their size, and until 2025-03 and since 2026-08 their number."""


def _read_batch(reading: Reading) -> None:
    """Batches in sequences; since 2026-08 they are stated in tokens, and those of a pipeline by their number."""
    keys, pp = reading.keys, reading.keys["plan.pp"]
    if "batch.sequence" not in keys:
        reading.set_key("batch.sequence", 2048)
    sequence = keys["batch.sequence"]
    local, size = _read_local_batch(reading, sequence)
    if pp == 1:
        for name in PIECES.values():
            reading.ignore(reading.stated.get(name), "there is no pipeline")
        reading.set_key("batch.micro", local, IN_SEQUENCES, IN_TOKENS)
        reading.set_key("batch.accumulated", 1, IN_SEQUENCES, IN_TOKENS)
    else:
        reading.set_key("batch.micro", size, PIECES["size"], PIECES["number"], IN_TOKENS)
        reading.set_key("batch.accumulated", max(1, local // size), IN_SEQUENCES, IN_TOKENS, PIECES["tokens"])
        keys["batch.drained"] = local
        _set_group(reading, max(1, local // size))
    for name, tokens_each in (("training.global_batch_size", 1), ("training.num_tokens_per_train_step", sequence)):
        total = reading.take(name)
        if total is not None and not is_null(total.value) and (number := int(read_number(total))) > 0:
            reading.set_key("batch.global", max(1, number // tokens_each), name)


def _set_group(reading: Reading, microbatches: int) -> None:
    """Sets the micro-batches that run through a chunk in a row where they are not as many as stages: torch divides all
    micro-batches by the number of whole rounds (schedules.py, ``microbatches_per_round``)."""
    pp = reading.keys["plan.pp"]
    rounds = max(1, microbatches // pp)
    interleaved = str(reading.keys["plan.pipeline"]).startswith("interleaved")
    if interleaved and microbatches % pp and microbatches % rounds == 0:
        reading.set_key("plan.pipeline.group", microbatches // rounds, IN_SEQUENCES, IN_TOKENS)


def _read_local_batch(reading: Reading, sequence: int) -> tuple[int, int]:
    """Returns the sequences of a replica between two updates, but for accumulation, and those of a micro-batch of a
    pipeline."""
    keys, pp = reading.keys, reading.keys["plan.pp"]
    local, tokens = reading.take_count(IN_SEQUENCES), reading.take_count(IN_TOKENS)
    size, pieces, number = (reading.take_count(name) for name in PIECES.values())
    if tokens and local is None:
        micro = max(1, tokens // sequence)
        return micro * (pieces or 1 if pp > 1 else 1), micro
    local = local or 8
    if number or keys.get("framework.release", LAST_TOML) < MICROBATCH_SIZES_SINCE:
        size = max(1, local // (number or pp * keys.get("plan.pipeline.chunks", 1)))
    return local, size or 1


def _read_experts(reading: Reading) -> None:
    """Reads expert parallelism, with whole experts unless the file shards them."""
    names = ("parallelism.expert_parallel_comm_backend", "parallelism.expert_tensor_parallel_degree")
    backend = reading.take_word(names[0]) or "standard"
    etp = reading.take_count(names[1])
    if "model.moe.experts" not in reading.keys:
        reading.keys.pop("plan.ep", None)
        for name in (*names, "parallelism.expert_parallel_degree"):
            reading.ignore(reading.stated.get(name), "the model has no experts")
        return
    if reading.keys["plan.ep"] == 1:
        for name in names:
            reading.ignore(reading.stated.get(name), "there is no expert parallelism")
        return
    if backend not in EXPERTS:
        why = f"it is none of {', '.join(EXPERTS)}; the all-to-all of NCCL is forecast"
        reading.approximate(reading.stated.get(names[0]), why, "the forecast is too slow")
    reading.set_key("plan.expert", EXPERTS.get(backend, "all-to-all"), names[0])
    reading.set_key("plan.etp", etp or 1, names[1])


# ----------------------------------------------------------------------------- memory, precision, kernels


def _read_checkpointing(reading: Reading) -> None:
    """Reads activation checkpointing: of whole layers, of every n-th layer, or by operator."""
    names = ("activation_checkpoint.mode", "training.activation_checkpoint_mode", "training.enable_selective_ac")
    option_names = ("activation_checkpoint.selective_ac_option", "training.selective_ac_option")
    stated, choice = reading.take(*names), reading.take(*option_names)
    mode = "selective" if stated is None else str(stated.value).lower()  # the word "none" is no null here
    release = reading.keys.get("framework.release", "")
    of_layers = bool(release) and release <= LAST_OF_LAYERS
    option = str(choice.value).lower() if choice is not None else "2" if of_layers else "op"
    if mode != "selective":
        reading.ignore(choice, f"the mode is {mode}")
    if mode in ("full", "none"):
        reading.set_key("plan.recompute", mode, *names)
    elif mode == "selective" and (every := read_digits(option)) is not None:
        stages = reading.keys["plan.pp"]
        layers = reading.keys.get("model.layers", 0) // stages // max(1, every)
        if layers:
            reading.set_key("plan.recompute", "full", *names)
            reading.set_key("plan.recompute.layers", layers, *option_names)
    elif mode == "selective":
        reading.set_key("plan.recompute", "operators", *names, *option_names)
        if of_layers and release < MESSAGES_SAVED_SINCE and "model.moe.experts" in reading.keys:
            reading.set_key("plan.recompute.save", ("attention", "alternate_linear", "reduce_scatter"))
    else:
        budget = reading.take("activation_checkpoint.memory_budget")
        why = "what the compiler recomputes within a budget of memory is not known"
        reading.ask(budget or stated, why, "plan.recompute=none", "plan.recompute=operators", "plan.recompute=full")


def _read_precision(reading: Reading) -> None:
    """Reads number formats. Without FSDP and with tensor or pipeline parallelism there is no mixed precision."""
    keys = reading.keys
    words = {
        "training.mixed_precision_param": "precision.compute",
        "training.mixed_precision_reduce": "precision.gradients",
    }
    for name, key in words.items():
        if (word := reading.take_word(name)) in FORMATS:
            reading.set_key(key, FORMATS[word], name)
    whole = reading.take_word("training.dtype") == "bfloat16"
    if whole:
        for key in ("precision.main_weights", "precision.moments"):
            reading.set_key(key, "bf16", "training.dtype")
    elif keys["plan.data"] == "ddp" and (keys["plan.tp"] > 1 or keys["plan.pp"] > 1):
        reading.set_key("precision.compute", "fp32")


KNOWN_CONVERTERS = re.compile(
    r"float8|mx|(quantize\.)?(linear|dense|grouped_mm|moe)\.(float8|mx)|(float8|mxfp8)\w*converter|loraconverter"
)

WHOLE_PRODUCTS = frozenset({"output", "lm_head", "router.gate", "moe.router.gate"})
"""Products that the forecast quantises in no recipe."""

NVFP4 = "NVFP4LinearConverter"

CONVERTERS = ("model.converters", "float8.enable_float8_linear", "training.enable_fp8_linear")
"""Settings that quantise; the last ones are of 2024."""


def _read_converters(reading: Reading) -> None:
    """Reads quantised linear layers, and adapters."""
    stated = reading.take("model.converters")
    words = [word.lower() for word in read_words(stated)] if stated is not None and not is_null(stated.value) else []
    if reading.take_switch(*CONVERTERS[1:]) or reading.take_word("training.fp8_linear"):
        words.append("float8")
    _check_converters(reading, words)
    _ignore_idle_quantisation(reading, bool(words))
    experts = [word for word in words if re.search(r"grouped|moe", word)]
    linear = [word for word in words if word not in experts and "lora" not in word]
    if experts and not linear:
        why = "only grouped products of experts are quantised; the forecast has none in 8 bits"
        reading.approximate(stated, why, "the forecast is too slow")
    _read_recipe(reading, linear)
    if any("lora" in word for word in words):
        rank = reading.take_count("converters.LoRAConverter.rank") or 8
        reading.set_key("train.mode", "lora", "model.converters")
        reading.set_key("train.rank", rank, "converters.LoRAConverter.rank")


def _check_converters(reading: Reading, converters: list[str]) -> None:
    """Asks what converters make of the model that meshcast does not know."""
    layers = reading.stated.get(f"converters.{NVFP4}.fqns")
    whole = layers is not None and read_words(layers) == ("layers",)
    for word in converters:
        if word == NVFP4.lower() and whole:
            reading.set_key("precision.compute", "nvfp4", "model.converters", f"converters.{NVFP4}.fqns")
        elif not KNOWN_CONVERTERS.fullmatch(word):
            why = f"meshcast does not know what the converter {word} makes of the model"
            stated = reading.stated["model.converters"]
            reading.ask(stated, why, "precision.compute=bf16", "precision.compute=nvfp4")


def _ignore_idle_quantisation(reading: Reading, quantises: bool) -> None:
    """Lists what quantisation says without a converter, and what it leaves out that is not quantised anyway."""
    for name, stated in reading.stated.items():
        if not name.startswith(("quantize.", "float8.", "mx.", "converters.")):
            continue
        if not quantises:
            reading.ignore(reading.take(name, decisive=False), "no converter quantises")
        elif name.endswith("filter_fqns") and {*read_words(stated)} <= WHOLE_PRODUCTS:
            reading.ignore(reading.take(name), "the forecast has these products in 16 bits, too")


def _read_recipe(reading: Reading, converters: list[str]) -> None:
    """Reads the format of linear layers that converters quantise."""
    if any("mx" in word for word in converters):
        reading.set_key("precision.compute", "mxfp8", *CONVERTERS)
    elif any("float8" in word for word in converters):
        sections = ("quantize.linear.float8", "quantize.dense.float8", "float8", "converters.Float8LinearConverter")
        names = [f"{section}.recipe_name" for section in sections]
        stated = reading.stated.get("model.converters")
        # The default of Float8LinearConverter since it is an argument of model_registry (@6348d93d1 of 2026-04-27).
        today = stated is not None and stated.shown == "converters" and "float8linearconverter" in converters
        usual = "rowwise" if today else "tensorwise"
        recipe = reading.take_word(*names) or usual
        kind = "fp8-rowwise" if recipe.startswith("rowwise") else "fp8-tensorwise"
        reading.set_key("precision.compute", kind, *CONVERTERS, *names)
        gathers = [f"{section}.enable_fsdp_float8_all_gather" for section in sections]
        if reading.take_switch(*gathers) and kind == "fp8-tensorwise":
            reading.set_key("framework.set.update.quantised_weights", True, *gathers)


def _read_loss(reading: Reading) -> None:
    """Reads the bytes of logits: of all of them, of chunks, or compiled."""
    name, components = reading.take("loss.name"), reading.take("compile.components")
    word = "" if name is None else str(name.value)
    parts = read_words(components) if components is not None and not is_null(components.value) else ("model", "loss")
    compiles = reading.take_switch("compile.enable") and "loss" in parts
    if reading.take_switch("compile.enable") and "model" not in parts:
        reading.set_key("framework.set.compile", False, "compile.components")
    if word.startswith("Chunked"):
        chunks = reading.take_count("loss.num_chunks") or CHUNKS
        reading.set_key("framework.set.loss.chunk_count", chunks, "loss.name", "loss.num_chunks")
    elif word not in ("", "CrossEntropyLoss"):
        why = f"{word} is forecast as the cross entropy of whole logits"
        reading.approximate(name, why, "the memory of the forecast is off by what it keeps")
    elif compiles and reading.keys.get("framework.release", LAST_TOML) > "2025-05":
        for part, nbytes in COMPILED_LOSS.items():
            reading.set_key(f"framework.set.loss.{part}", nbytes, "compile.components", "compile.enable")


def _read_optimizer(reading: Reading) -> None:
    """Reads the optimizer: Adam in fp32, Muon, or what is asked for."""
    name = reading.take("optimizer.name")
    if name is not None and str(name.value).lower() in MUON:
        reading.set_key("optimizer", "muon", "optimizer.name")
        if "model.mla.kv_lora_rank" in reading.keys:
            why = "queries, keys and values of all heads are forecast as a matrix each, not a matrix a head"
            reading.approximate(name, why, "the update is too slow")
    elif name is not None and not is_null(name.value) and str(name.value).lower() not in ADAM:
        why = f"the states and the update of {name.value} are not those of Adam, which are forecast"
        reading.ask(name, why, "--assume-defaults")
    if reading.take_switch("optimizer.early_step_in_backward"):
        why = "gradients of the whole model are forecast, and the update after the backward pass"
        reading.approximate(reading.stated["optimizer.early_step_in_backward"], why, "the memory is too large")


def _read_graphs(reading: Reading) -> None:
    """Reads CUDA graphs, which are the default since 2026-08-13 (@f84224af0), and deterministic kernels."""
    ordered = ("debug.deterministic", "training.deterministic")
    if reading.take_switch(*ordered):
        reading.set_key("framework.set.deterministic", True, *ordered)
    today = any(name.startswith("training.num_tokens_per") for name in reading.stated)
    off = reading.take_switch("training.disable_cuda_graphs")
    names = ("training.disable_cuda_graphs",)
    if (today or names[0] in reading.stated) and not off and reading.keys["plan.pp"] == 1:
        reading.set_key("framework.set.cuda_graphs", True, *names)
    elif names[0] in reading.stated:
        reading.set_key("framework.set.cuda_graphs", False, *names)

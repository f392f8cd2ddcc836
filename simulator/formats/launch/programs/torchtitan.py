"""torchtitan: its TOML files (until February 2026), which jobs are exported to, too, and the same settings as arguments
of its command line.

Source: pytorch/torchtitan @238fa9953e, torchtitan/config/job_config.py, and @b5bcd76c6, torchtitan/config/configs.py,
whose batches are in tokens. Models are flavors in Python code; a file names one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.arguments import merge_settings
from meshcast.simulator.formats.launch.keys import flatten_model
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import ON, Keys, SettingRow, Stated, is_null, read_words, write_rows
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts
from meshcast.simulator.models.load import load_model

FLAVORS: Mapping[tuple[str, str], Any] = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3-405b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "236b"): "deepseek-v2",
    ("deepseek_v3", "671b"): {"preset": "deepseek-v3", "mtp": 0},
    ("llama4", "17bx16e"): "llama4-scout",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
    ("llama3", "debugmodel"): {
        **{"layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048, "seq": 2048},
        **{"gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm"},
    },
}
"""Models by torchtitan's name and flavor, which may have a suffix for the kind of attention (``8B_flex``)."""

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
    SettingRow("compile.enable_async_tensor_parallel", "framework.set.overlap.tp", "switch", {True: True}),
    SettingRow("compile.enable", "framework.set.compile", "switch", ON, silent=False),
)

SCHEDULES = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b", "loopedbfs": "breadth-first"},
    **{"zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v"},
}
"""Schedules by torch's names in small letters, without "Schedule"."""

TORCH_NAMES = {
    **{"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "breadth-first": "LoopedBFS"},
    **{"zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"},
}

EXPERTS = {"standard": "all-to-all", "deepep": "deepep", "hybridep": "hybrid-ep"}

FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}

RESIDENT = ("zero-1", "zero-2", "zero-offload")
"""Data schemes that shard states but keep weights whole, of which FSDP without resharding is the nearest."""

RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{
        f"training.{one}": f"parallelism.{one}"
        for one in ("data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree")
    },
    "training.compile": "compile.enable",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    **{
        f"experimental.pipeline_parallel_{one}": f"parallelism.pipeline_parallel_{one}"
        for one in ("degree", "schedule", "schedule_csv", "microbatch_size")
    },
}
"""Settings of earlier releases, and what they are called since."""

WITHOUT_INFLUENCE = (
    r"(job|profiling|profiler|metrics|optimizer|lr_scheduler|checkpoint|comm|fault_tolerance|validation|debug|memory_estimation|dataloader)\..*"
    r"|training\.(dataset.*|max_norm|gc_.*|deterministic|seed|warmup_steps|dataloader.*|data_.*|debug.*)"
    r"|model\.(hf_assets_path|tokenizer.*|print_after.*|norm_type)|compile\.backend|activation_checkpoint\.(early_stop|preserve_.*|determinism.*|debug|visualize.*)"
    r"|activation_checkpoint\.per_op.*|quantize\..*|float8\..*|mx\..*|parallelism\.(disable_loss_parallel|spmd_backend|pipeline_parallel_expert_parallel_overlap)"
    r"|master_.*|nnodes|nproc_per_node|rdzv.*|local_ranks_filter|role|tee|module|config|lr|job_config_file"
)

REASONS = {
    r"training\.enable_cpu_offload": "of what FSDP offloads, only the optimizer states are forecast in host memory",
    r".*\.enable_fsdp_float8_all_gather": "weights are gathered in 16 bits",
    r"quantize\.grouped_mm\..*": "experts are computed in the format of the other layers",
    r"parallelism\.disable_loss_parallel": "logits stay sharded over tp for the loss",
    r"(debug|training)\.deterministic": "deterministic kernels are forecast as the usual ones",
    r"parallelism\.enable_fsdp_symm_mem": "collectives of FSDP run as NCCL's",
}


VERDICTS: Verdicts = {
    **{pattern: Approximation(why) for pattern, why in REASONS.items()},
    WITHOUT_INFLUENCE: NoInfluence("it changes neither time nor memory"),
}


def read(file: LaunchFile) -> dict[str, Stated]:
    """The settings of a TOML file, or of a command line, by section and name."""
    if file.launch is not None:
        return {RENAMED.get(name, name): stated for name, stated in merge_settings(file.launch).items()}
    data, text, where = file.data, file.text, file.where
    found = {}
    lines = text.splitlines()

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
            return
        section, _, key = prefix.rpartition(".")
        line = _find_line(lines, section, key)
        found[RENAMED.get(prefix, prefix)] = Stated(value, prefix, f"{where}:{line}" if line else where)

    walk("", data)
    return found


def _find_line(lines: list[str], section: str, key: str) -> int:
    """The line of a key in its section; 0 if it is written in another way."""
    inside = not section
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("["):
            inside = line.split("#")[0].strip() == f"[{section}]"
        elif inside and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 0


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows(ROWS)
    reading.set_key("framework.name", "torchtitan")
    _read_model(reading)
    keys = reading.keys
    if keys["plan.cp"] == 1:
        reading.take("parallelism.context_parallel_load_balancer", "parallelism.context_parallel_rotate_method")
    else:
        method = "parallelism.context_parallel_rotate_method"
        rotate = reading.take_word(method) or "allgather"
        reading.set_key("plan.sequence", "ring" if rotate == "alltoall" else "all-gather", method)
        if rotate == "alltoall":
            reading.set_key("plan.sequence.merge", "eager")
        if (order := reading.take_word("parallelism.context_parallel_load_balancer")) not in ("", "headtail"):
            why = f"the order headtail is forecast, not {order}"
            reading.approximate(reading.take("parallelism.context_parallel_load_balancer"), why)
    _read_pipeline(reading)
    _read_data(reading)
    _read_batch(reading)
    _read_experts(reading)
    _read_checkpoints(reading)
    _read_precision(reading)
    components = reading.take("compile.components")
    if components is not None and "model" not in read_words(components) and reading.take_switch("compile.enable"):
        reading.set_key("framework.set.compile", False, "compile.components")
        reading.approximate(components, "layers are not compiled, and neither is the loss in the forecast")
    if reading.take_switch("training.enable_cpu_offload"):
        reading.set_key("plan.offload", ("optimizer",), "training.enable_cpu_offload")
        reading.approximate(reading.stated["training.enable_cpu_offload"], REASONS[r"training\.enable_cpu_offload"])
    if reading.take_switch("checkpoint.enable", "checkpoint.enable_checkpoint"):
        every = reading.take_count("checkpoint.interval") or 500
        mode = reading.take_word("checkpoint.async_mode")
        reading.set_checkpoints(every, mode.startswith("async"), "checkpoint.interval", "checkpoint.enable")
    nodes, each = reading.take("nnodes"), reading.take("nproc_per_node")
    if each is not None and str(each.value).isdigit():
        count = int(str(nodes.value)) if nodes is not None and str(nodes.value).isdigit() else 1
        reading.set_key("cluster.gpus", count * int(str(each.value)), "nproc_per_node")


def _read_model(reading: Reading) -> None:
    """The model by its name and flavor, or by the name of a function in a config registry (``llama3_8b``)."""
    name = reading.take_word("model.name") or reading.take_word("module")
    flavor = reading.take_word("model.flavor") or reading.take_word("config").removeprefix(f"{name}_")
    plain = re.sub(r"_(flex|varlen|irope)(_attn)?$", "", flavor)
    preset = FLAVORS.get((name, plain))
    if preset is None:
        stated = reading.take("model.flavor", "model.name", "config")
        reading.approximate(stated, f"no preset is known for {name} {flavor}")
        return
    if "model.layers" not in reading.keys:  # no other model is given
        reading.set_key("model.preset", preset, "model.flavor", "config")
        reading.keys |= flatten_model(load_model(preset))


def _read_pipeline(reading: Reading) -> None:
    """Schedule, chunks and the layers of stages, by the rules of ``generate_llm_fqn_per_model_part``."""
    keys, pp = reading.keys, reading.keys["plan.pp"]
    word = reading.take_word("parallelism.pipeline_parallel_schedule") or "1f1b"
    csv = reading.take("parallelism.pipeline_parallel_schedule_csv")
    less = [reading.take(f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")]
    first, last = (1 if one is None else int(one.value) for one in less)
    each = reading.take_count("parallelism.pipeline_parallel_layers_per_stage")
    parts = reading.take("parallelism.module_fqns_per_model_part")
    if pp == 1:
        reading.take("parallelism.pipeline_parallel_microbatch_size", "parallelism.num_pp_microbatches")
        return
    schedule = SCHEDULES.get(word)
    if schedule is None:
        schedule, why = "interleaved-1f1b", "there is no schedule of this kind; Interleaved1F1B is taken"
        reading.approximate(reading.take("parallelism.pipeline_parallel_schedule"), why)
    layers = keys.get("model.layers", 0)
    looped = schedule in ("interleaved-1f1b", "breadth-first")
    chunks = 2 if looped or schedule in ("zb-v", "dualpipe-v") else 1
    if parts is not None and not is_null(parts.value):
        counts = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts.value)
        chunks = max(1, len(counts) // pp)
        reading.set_key("plan.partition", counts, "parallelism.module_fqns_per_model_part")
    elif layers:
        if each and looped:
            chunks = max(1, -(-(layers + first + last) // each) // pp)
        reading.set_key("plan.partition", _divide_layers(layers, pp * chunks, first, last))
    if csv is not None and not is_null(csv.value):
        reading.set_key("plan.pipeline", "from-file", "parallelism.pipeline_parallel_schedule_csv")
        reading.set_key("plan.pipeline.path", str(csv.value), "parallelism.pipeline_parallel_schedule_csv")
        return
    reading.set_key("plan.pipeline", schedule, "parallelism.pipeline_parallel_schedule")
    names = ("parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_schedule")
    reading.set_key("plan.pipeline.chunks", chunks, *names)


def _divide_layers(layers: int, stages: int, first: int, last: int) -> Any:
    """Layers of the stages: the first has `first` fewer, the last `last` fewer; a word where there is one."""
    each, more = divmod(layers + first + last, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if len(set(counts)) == 1:
        return "even"
    return "ends-as-layers" if (first, last, more) == (1, 1, 0) else tuple(counts)


def _read_data(reading: Reading) -> None:
    """FSDP, DDP, or both (hybrid sharding)."""
    keys = reading.keys
    replicate = reading.take_count("parallelism.data_parallel_replicate_degree") or 1
    stated = reading.take("parallelism.data_parallel_shard_degree")
    shard = -1 if stated is None else int(stated.value)
    names = ("parallelism.data_parallel_shard_degree",)
    if shard == 1 and keys["plan.cp"] == 1:
        reading.set_key("plan.data", "ddp", *names)
        reading.set_key("plan.dp", replicate, "parallelism.data_parallel_replicate_degree")
    else:
        reading.set_key("plan.data", "fsdp", *names)
        reading.set_key("plan.replicate", replicate, "parallelism.data_parallel_replicate_degree")
        if shard > 0:
            reading.set_key("plan.dp", replicate * shard, *names)
    policy = reading.take_word("parallelism.fsdp_reshard_after_forward") or "default"
    if keys["plan.data"] == "fsdp":
        reshard = policy == "always" or (policy == "default" and keys["plan.pp"] == 1)
        reading.set_key("plan.data.reshard", reshard, "parallelism.fsdp_reshard_after_forward")


def _read_batch(reading: Reading) -> None:
    """Batches in sequences; newer releases state them in tokens."""
    keys, pp = reading.keys, reading.keys["plan.pp"]
    sequence = keys.setdefault("batch.sequence", 2048)
    reading.origins.setdefault("batch.sequence", f"default of {reading.program}")
    names = ("training.local_batch_size", "training.num_tokens_per_microbatch_per_dp_rank")
    local = reading.take_count("training.local_batch_size")
    tokens = reading.take_count("training.num_tokens_per_microbatch_per_dp_rank")
    pieces = reading.take_count("parallelism.num_pp_microbatches") or 1
    if tokens:
        local = max(1, tokens // sequence)
    local = local or 8
    size = reading.take_count("parallelism.pipeline_parallel_microbatch_size") or 1
    if pp > 1 and "parallelism.num_pp_microbatches" in reading.stated:
        size = max(1, local // pieces)
    named = "parallelism.pipeline_parallel_microbatch_size" if pp > 1 else names[0]
    reading.set_key("batch.micro", size if pp > 1 else local, named, names[1])
    reading.set_key("batch.accumulated", max(1, local // size) if pp > 1 else 1, *names)
    if pp > 1:
        keys["batch.drained"] = local
    total = reading.take("training.global_batch_size")
    in_tokens = reading.take("training.num_tokens_per_train_step")
    if total is not None and int(total.value) > 0:
        reading.set_key("batch.global", int(total.value), "training.global_batch_size")
    elif in_tokens is not None and int(in_tokens.value) > 0:
        reading.set_key("batch.global", max(1, int(in_tokens.value) // sequence), "training.num_tokens_per_train_step")


def _read_experts(reading: Reading) -> None:
    """Expert parallelism, with whole experts unless the file shards them."""
    backend = reading.take_word("parallelism.expert_parallel_comm_backend") or "standard"
    etp = reading.take_count("parallelism.expert_tensor_parallel_degree")
    if "model.moe.experts" not in reading.keys:
        reading.keys.pop("plan.ep", None)
        return
    if reading.keys["plan.ep"] == 1:
        return
    if backend not in EXPERTS:
        reading.approximate(
            reading.take("parallelism.expert_parallel_comm_backend"), f"understood are {', '.join(EXPERTS)}"
        )
    reading.set_key("plan.expert", EXPERTS.get(backend, "all-to-all"), "parallelism.expert_parallel_comm_backend")
    reading.set_key("plan.etp", etp or 1, "parallelism.expert_tensor_parallel_degree")


def _read_checkpoints(reading: Reading) -> None:
    """Activation checkpointing: full, of every n-th layer, or of every second product."""
    names = ("activation_checkpoint.mode", "training.activation_checkpoint_mode")
    stated = reading.take(*names)
    mode = "selective" if stated is None else str(stated.value).lower()  # the word "none" is no null here
    option = reading.take_word("activation_checkpoint.selective_ac_option") or "2"
    budget = reading.take("activation_checkpoint.memory_budget")
    if mode == "full":
        reading.set_key("plan.recompute", "full", *names)
    elif mode == "selective" and option.isdigit():
        stages = reading.keys["plan.pp"]
        layers = reading.keys.get("model.layers", 0) // stages // max(1, int(option))
        if layers:
            reading.set_key("plan.recompute", "full", *names)
            reading.set_key("plan.recompute.layers", layers, "activation_checkpoint.selective_ac_option")
    elif mode == "selective":
        reading.set_key("plan.recompute", "selective", *names)
        reading.approximate(
            reading.stated.get("activation_checkpoint.selective_ac_option"),
            "attention is recomputed, not every second product",
        )
    elif mode == "memory_budget":
        reading.approximate(budget or reading.take(*names), "what a compiler would recompute is not known; nothing is")


def _read_precision(reading: Reading) -> None:
    """Number formats, and the recipes of converters."""
    words = {
        "training.mixed_precision_param": "precision.compute",
        "training.mixed_precision_reduce": "precision.gradients",
    }
    for name, key in words.items():
        if (word := reading.take_word(name)) in FORMATS:
            reading.set_key(key, FORMATS[word], name)
    if reading.take_word("training.dtype") == "bfloat16":
        for key in ("precision.main_weights", "precision.moments"):
            reading.set_key(key, "bf16", "training.dtype")
    stated = reading.take("model.converters")
    converters = read_words(stated) if stated is not None else ()
    recipe = (
        reading.take_word("quantize.linear.float8.recipe_name")
        or reading.take_word("float8.recipe_name")
        or "tensorwise"
    )
    if "quantize.linear.mx" in converters or "mx" in converters:
        reading.set_key("precision.compute", "mxfp8", "model.converters")
    elif any("float8" in one for one in converters):
        reading.set_key(
            "precision.compute", "fp8-rowwise" if recipe.startswith("rowwise") else "fp8-tensorwise", "model.converters"
        )


def recognise(file: LaunchFile) -> Evidence:
    """TOML, or arguments in sections of torchtitan's configuration."""
    if file.launch is not None:
        sections = ("training.", "parallelism.", "activation_checkpoint.", "job.")
        named = any(name.startswith(sections) for name in file.launch.arguments)
        return Evidence.LIKELY if named else Evidence.NONE
    return Evidence.LIKELY if file.suffix == ".toml" else Evidence.NONE


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job by section and name."""
    rows = [row for row in ROWS if not (row.key == "plan.tensor" and keys.get("plan.tp", 1) == 1)]
    settings = write_rows(rows, keys)
    pp, dp, copies = keys.get("plan.pp", 1), keys.get("plan.dp", 1), keys.get("plan.replicate", 1)
    local = keys["batch.global"] // dp if pp > 1 else keys["batch.micro"]
    settings |= {"training.local_batch_size": local, "training.global_batch_size": keys["batch.global"]}
    if (data := keys.get("plan.data", "ddp")) != "ddp":
        settings |= {
            "parallelism.data_parallel_replicate_degree": copies,
            "parallelism.data_parallel_shard_degree": dp // copies if copies > 1 else -1,
        }
        settings["parallelism.fsdp_reshard_after_forward"] = (
            "always" if data not in RESIDENT and keys.get("plan.data.reshard", True) else "never"
        )
    else:
        settings |= {"parallelism.data_parallel_replicate_degree": dp, "parallelism.data_parallel_shard_degree": 1}
    if keys.get("plan.cp", 1) > 1 and keys.get("plan.sequence") == "ring":
        settings["parallelism.context_parallel_rotate_method"] = "alltoall"
    if pp > 1:
        settings |= _write_pipeline(keys)
    if keys.get("plan.ep", 1) > 1:
        backend = next((word for word, ours in EXPERTS.items() if ours == keys.get("plan.expert")), "standard")
        settings |= {
            "parallelism.expert_parallel_comm_backend": backend,
            "parallelism.expert_tensor_parallel_degree": keys.get("plan.etp", 1),
        }
    settings |= _write_checkpoints(keys) | _write_precision(keys)
    if keys.get("plan.offload") == ("optimizer",):
        settings["training.enable_cpu_offload"] = True
    return settings


def _write_precision(keys: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    formats = {ours: theirs for theirs, ours in FORMATS.items()}
    compute = keys.get("precision.compute", "bf16")
    if compute == "mxfp8" or str(compute).startswith("fp8"):
        settings["model.converters"] = ["quantize.linear.mx" if compute == "mxfp8" else "quantize.linear.float8"]
        if compute == "fp8-rowwise":
            settings["quantize.linear.float8.recipe_name"] = "rowwise"
    elif compute in ("bf16", "fp32"):
        settings["training.mixed_precision_param"] = formats[compute]
    settings["training.mixed_precision_reduce"] = formats.get(keys.get("precision.gradients", "fp32"), "float32")
    if keys.get("precision.main_weights") == "bf16" == keys.get("precision.moments"):
        settings["training.dtype"] = "bfloat16"
    return settings


def _write_pipeline(keys: Mapping[str, Any]) -> dict[str, Any]:
    section = "parallelism.pipeline_parallel"
    schedule, chunks = keys.get("plan.pipeline", "1f1b"), keys.get("plan.pipeline.chunks", 1)
    found: dict[str, Any] = {
        f"{section}_schedule": TORCH_NAMES.get(schedule, "1F1B"),
        f"{section}_microbatch_size": keys["batch.micro"],
    }
    if schedule == "from-file":
        found[f"{section}_schedule_csv"] = keys.get("plan.pipeline.path")
    partition, layers, stages = keys.get("plan.partition"), keys["model.layers"], keys["plan.pp"] * chunks
    ends = 1 if partition == "ends-as-layers" else 0
    if isinstance(partition, tuple):
        starts = [sum(partition[:stage]) for stage in range(len(partition))]
        parts = [[f"layers.{start + i}" for i in range(count)] for start, count in zip(starts, partition, strict=True)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
        found["parallelism.module_fqns_per_model_part"] = parts
        return found
    found |= {f"{section}_{end}_stage_less_layers": ends for end in ("first", "last")}
    if chunks > 1:
        found[f"{section}_layers_per_stage"] = -(-(layers + 2 * ends) // stages)
    return found


def _write_checkpoints(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Activation checkpointing."""
    mode = str(keys.get("plan.recompute", "none"))
    found: dict[str, Any] = {"activation_checkpoint.mode": mode}
    layers, each = keys.get("plan.recompute.layers"), keys["model.layers"] // keys.get("plan.pp", 1)
    if mode == "full" and layers and layers < each:
        every = next((n for n in range(1, each + 1) if each // n == layers), None)
        if every:
            found = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": str(every)}
    elif mode == "selective":
        found["activation_checkpoint.selective_ac_option"] = "op"
    return found


def write(keys: Keys, header: list[str]) -> str:
    """A TOML file. A flavor is named where torchtitan has one of this shape."""
    settings = write_settings(keys)
    lines = [f"# {line}".rstrip() for line in header]
    lines += ["", "[model]", *_write_flavor(keys)]
    if "model.converters" in settings:
        lines.append(f"converters = {_to_toml(settings.pop('model.converters'))}")
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {_to_toml(value)}")
    for section, rows in sections.items():
        lines += ["", f"[{section}]", *rows]
    return "\n".join(lines) + "\n"


def _write_flavor(keys: Mapping[str, Any]) -> list[str]:
    for (name, flavor), preset in FLAVORS.items():
        shape = load_model(preset)
        if (shape.layers, shape.hidden, shape.vocab) == tuple(
            keys.get(f"model.{key}") for key in ("layers", "hidden", "vocab")
        ):
            spelled = flavor.upper() if flavor[0].isdigit() and name != "gpt_oss" and "x" not in flavor else flavor
            return [f'name = "{name}"', f'flavor = "{spelled}"']
    return [
        "# no flavor of torchtitan has this shape: register one, and name it here",
        'name = "llama3"',
        'flavor = "custom"',
    ]


def _to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"[{', '.join(map(_to_toml, value))}]" if isinstance(value, list | tuple) else str(value)


TORCHTITAN = LaunchFormat("torchtitan", "torchtitan", ".toml", recognise, read, interpret, write, VERDICTS)

"""Jobs as configurations of torchtitan: a Python function as today's registries have it, or TOML for older releases."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshcast.simulator.formats.launch.programs.evaluations import MICRO, SEQUENCE
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS, REMOVED, STOCK_CONFIGS
from meshcast.simulator.formats.launch.programs.torchtitan_plan import (
    CONFIG_RELEASES,
    EXPERTS,
    FORMATS,
    LAST_IN_SEQUENCES,
    LAST_OF_MODES,
    LAST_TOML,
    MICROBATCH_SIZES_SINCE,
    PIECES,
    RELEASES,
    RENAMED,
    ROWS,
)
from meshcast.simulator.formats.launch.quoting import quote_python, quote_toml
from meshcast.simulator.formats.launch.table import Keys, SomeKeys, write_rows
from meshcast.simulator.models.load import load_model

TORCH_NAMES = {
    **{"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "breadth-first": "LoopedBFS"},
    **{"zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV", "interleaved-zb": "InterleavedZeroBubble"},
}

RESIDENT = ("zero-1", "zero-2", "zero-offload")
"""Data schemes that shard states but keep weights whole, of which FSDP without resharding is the nearest."""

COMPONENTS_SINCE = "2025-08"
"""The first release that compiles layers and loss apart (@08b8b244f)."""

VALIDATES_SINCE = "2025-07"
"""The first release that validates (@acd5ba8ed)."""

FUNCTION = "meshcast_job"
"""The function of a Python file that is written, for ``--config``."""

NO_FLAVOR = "no flavor of torchtitan has this shape: register one, and name it here"


def reads_toml(keys: SomeKeys) -> bool:
    """Returns whether the release of a job reads TOML."""
    return _is_until(keys, LAST_TOML)


def _is_until(keys: SomeKeys, month: str) -> bool:
    """Returns whether the release of a job is of a month or earlier; without a release it is today's."""
    return "framework.release" in keys and str(keys["framework.release"]) <= month


def write_job(keys: Keys, header: list[str]) -> str:
    """Returns the file of a job in the form that its release reads."""
    return _write_toml(keys, header) if reads_toml(keys) else _write_python(keys, header)


def _write_settings(keys: SomeKeys) -> Keys:
    """Writes the settings of a job by section and name that both forms have."""
    rows = [row for row in ROWS if not (row.key == "plan.tensor" and keys.get("plan.tp", 1) == 1)]
    settings = write_rows(rows, keys)
    dp, copies = keys.get("plan.dp", 1), keys.get("plan.replicate", 1)
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
    if keys.get("plan.pp", 1) > 1:
        settings |= _write_pipeline(keys)
    if keys.get("plan.offload") == ("optimizer",):
        settings["training.enable_cpu_offload"] = True
    formats = {ours: theirs for theirs, ours in FORMATS.items()}
    if (compute := keys.get("precision.compute", "bf16")) in ("bf16", "fp32"):
        settings["training.mixed_precision_param"] = formats[compute]
    if keys.get("precision.main_weights") == "bf16" == keys.get("precision.moments"):
        settings["training.dtype"] = "bfloat16"
    return settings


def _write_pipeline(keys: SomeKeys) -> Keys:
    section = "parallelism.pipeline_parallel"
    schedule, chunks = keys.get("plan.pipeline", "1f1b"), keys.get("plan.pipeline.chunks", 1)
    settings: Keys = {f"{section}_schedule": TORCH_NAMES.get(schedule, "1F1B")}
    if schedule == "from-file":
        settings[f"{section}_schedule_csv"] = keys.get("plan.pipeline.path")
    partition, layers, stages = keys.get("plan.partition"), keys["model.layers"], keys["plan.pp"] * chunks
    ends = 1 if partition == "ends-as-layers" else 0
    if isinstance(partition, tuple):
        starts = [sum(partition[:stage]) for stage in range(len(partition))]
        parts = [[f"layers.{start + i}" for i in range(count)] for start, count in zip(starts, partition, strict=True)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output" if reads_toml(keys) else "lm_head"]
        settings["parallelism.module_fqns_per_model_part"] = parts
        return settings
    settings |= {f"{section}_{end}_stage_less_layers": ends for end in ("first", "last")}
    if chunks > 1:
        settings[f"{section}_layers_per_stage"] = -(-(layers + 2 * ends) // stages)
    return settings


def _find_flavor(keys: SomeKeys) -> tuple[str, str] | None:
    """Returns the model and the flavor of torchtitan that have the shape of a job, as it spells them."""
    wanted = tuple(keys.get(f"model.{key}") for key in ("layers", "hidden", "vocab"))
    for (name, flavor), preset in FLAVORS.items():
        shape = load_model(preset)
        if (shape.layers, shape.hidden, shape.vocab) == wanted and (name not in REMOVED or reads_toml(keys)):
            return name, flavor.upper() if flavor[0].isdigit() and name != "gpt_oss" and "x" not in flavor else flavor
    return None


# ------------------------------------------------------------------------------------------------- Python


def _write_python(keys: Keys, header: Iterable[str]) -> str:
    """Writes a function that changes a configuration of torchtitan's."""
    name, flavor = _find_flavor(keys) or ("llama3", "custom")
    stock = _find_stock(name, flavor)
    settings, (module, kind, policy) = _write_sections(keys), _write_policy(keys)
    converters = _make_converters(keys)
    arguments = [quote_python(flavor)]
    if keys.get("plan.ep", 1) > 1 and _is_gone("parallelism.expert_parallel_comm_backend", keys):
        backend = next((word for word, ours in EXPERTS.items() if ours == keys.get("plan.expert")), "standard")
        arguments.append(f'moe_comm_backend="{backend}"')
    if converters:
        arguments.append(f"converters=[{', '.join(converters.values())}]")
    imports = [
        *(f"from torchtitan.components.{_module_of(kind)} import {kind}" for kind in converters),
        *([] if _has_chunks(keys) else ["from torchtitan.components.loss import CrossEntropyLoss"]),
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        *([f"from torchtitan.{module} import {kind}"] if kind else []),
        f"from torchtitan.models.{name} import model_registry",
        f"from torchtitan.models.{name}.config_registry import {stock}",
        "from torchtitan.trainer import Trainer",
    ]
    body = [f"config = {stock}()", f"config.model_spec = model_registry({', '.join(arguments)})"]
    if flavor == "custom":
        body.insert(1, f"# {NO_FLAVOR}")
    if not _has_chunks(keys):
        body.append(f"config.loss = CrossEntropyLoss.Config(global_vocab_size={keys['model.vocab']})")
    for section, kind in (
        ("training", "TrainingConfig"),
        ("parallelism", "ParallelismConfig"),
        ("compile", "CompileConfig"),
    ):
        fields = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
        body += [
            f"config.{section} = {kind}(",
            *(f"    {key}={quote_python(value)}," for key, value in fields.items()),
            ")",
        ]
    body.append(f"config.activation_checkpoint = {policy}")
    lines = [f"# {line}".rstrip() for line in header]
    lines += ["#" if lines else "", f"# torchrun ... -m torchtitan.train --module <this file> --config {FUNCTION}", ""]
    lines += [*imports, "", ""]
    lines += [f"def {FUNCTION}() -> Trainer.Config:", *(f"    {line}" for line in [*body, "return config"])]
    return "\n".join(lines).lstrip("\n") + "\n"


def _find_stock(name: str, flavor: str) -> str:
    """Returns the function of torchtitan that is nearest to a flavor: the first of the flavor, or model."""
    of_model = {config: stock for config, stock in STOCK_CONFIGS.items() if stock["model_spec.name"] == name}
    same = [config for config, stock in of_model.items() if stock["model_spec.flavor"].lower() == flavor.lower()]
    return next(iter([*same, *of_model]), "llama3_8b")


def _write_sections(keys: SomeKeys) -> Keys:
    """Writes the settings of a configuration, those that its release has."""
    in_sequences = _is_until(keys, LAST_IN_SEQUENCES)
    settings = _write_settings(keys) | (_write_sequences(keys) if in_sequences else _write_tokens(keys))
    if keys.get("framework.set.deterministic"):
        settings["debug.deterministic"] = True
    if keys.get("plan.ep", 1) > 1 and keys.get("model.moe.routing") == "forced-balanced":
        settings["debug.moe_force_load_balance"] = True
    if not in_sequences:
        settings["training.disable_cuda_graphs"] = not keys.get("framework.set.cuda_graphs", False)
        if settings.get("parallelism.enable_async_tensor_parallel") and keys.get("framework.set.compile", False):
            settings["compile.enable_async_tensor_parallel"] = True  # refused without
    return {name: value for name, value in (settings | _write_loss(keys)).items() if not _is_gone(name, keys)}


def _is_gone(name: str, keys: SomeKeys) -> bool:
    """Returns whether the release of a job has no setting of this name any more."""
    return any(re.fullmatch(pattern, name) and not _is_until(keys, month) for pattern, month in CONFIG_RELEASES)


def _write_tokens(keys: SomeKeys) -> Keys:
    """Batches in tokens."""
    sequence, micro = keys.get("batch.sequence", keys.get("model.seq", 2048)), keys.get("batch.micro", 1)
    settings = {
        "training.max_context_length": sequence,
        "training.num_tokens_per_microbatch_per_dp_rank": micro * sequence,
        "training.num_tokens_per_train_step": keys["batch.global"] * sequence,
    }
    if keys.get("plan.pp", 1) > 1:
        settings["parallelism.num_pp_microbatches"] = keys["batch.global"] // (keys.get("plan.dp", 1) * micro)
    return settings


def _has_chunks(keys: SomeKeys) -> bool:
    """Returns whether the loss is computed in chunks of the sequence, as in torchtitan's configurations."""
    return bool(keys.get("framework.set.loss.chunk_count", 1) > 1)


def _write_loss(keys: SomeKeys) -> Keys:
    """Writes what is compiled: layers, the loss, or both."""
    layers, loss = keys.get("framework.set.compile", False), keys.get("framework.set.loss.peak") == 4
    parts = ["model"] * bool(layers) + ["loss"] * bool(loss or (layers and _has_chunks(keys)))
    return {"compile.enable": bool(parts), **({"compile.components": parts} if len(parts) == 1 else {})}


def _write_policy(keys: SomeKeys) -> tuple[str, str, str]:
    """Writes the activation checkpointing of a configuration: a module and a class to import, and an expression."""
    if _is_until(keys, LAST_OF_MODES):
        modes = {name: value for name, value in _write_mode(keys).items() if not _is_gone(name, keys)}
        arguments = ", ".join(f"{name.rpartition('.')[2]}={quote_python(value)}" for name, value in modes.items())
        return "config", "ActivationCheckpointConfig", f"ActivationCheckpointConfig({arguments})"
    recompute = keys.get("plan.recompute", "none")
    kind = {"none": "", "full": "FullAC"}.get(recompute, "SelectiveAC")
    return "distributed.activation_checkpoint", kind, f"{kind}.Config()" if kind else "None"


def _make_converters(keys: SomeKeys) -> dict[str, str]:
    """Returns the converters of the model, by their classes."""
    compute, compiled = str(keys.get("precision.compute", "bf16")), bool(keys.get("framework.set.compile", False))
    converters = {}
    if compute.startswith("fp8"):
        converters["Float8LinearConverter"] = (
            f'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled={compiled})'
        )
    elif compute == "mxfp8":
        converters["MXFP8LinearConverter"] = f"MXFP8LinearConverter.Config(model_compile_enabled={compiled})"
    if keys.get("train.mode") in ("lora", "qlora"):
        converters["LoRAConverter"] = f"LoRAConverter.Config(rank={keys.get('train.rank', 8)})"
    return converters


def _module_of(converter: str) -> str:
    return "lora" if converter == "LoRAConverter" else "quantization"


# --------------------------------------------------------------------------------------------------- TOML


def _name_as_release(settings: Keys, release: str) -> Keys:
    """Returns the settings by the names that they have in a release: a file of later names would mean a later
    release."""
    dated = {
        today: former
        for former, today in RENAMED.items()
        if any(re.fullmatch(pattern, former) and release <= month for pattern, month in RELEASES)
    }
    return {dated.get(name, name): value for name, value in settings.items()}


def _write_toml(keys: Keys, header: Iterable[str]) -> str:
    """Writes a TOML file. It names a flavor where torchtitan has a flavor of this shape."""
    settings = _write_settings(keys) | _write_sequences(keys) | _write_mode(keys)
    settings.pop("training.max_context_length", None)
    converters = _write_converters(keys)
    lines = [f"# {line}".rstrip() for line in header]
    named = _find_flavor(keys)
    name, flavor = named or ("llama3", "custom")
    lines += ["", "[model]", *([] if named else [f"# {NO_FLAVOR}"]), f'name = "{name}"', f'flavor = "{flavor}"']
    if "model.converters" in converters:
        lines.append(f"converters = {quote_toml(converters.pop('model.converters'))}")
    sections: dict[str, list[str]] = {}
    for setting, value in _name_as_release(settings | converters, str(keys["framework.release"])).items():
        section, _, key = setting.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {quote_toml(value)}")
    for section, rows in sections.items():
        lines += ["", f"[{section}]", *rows]
    return "\n".join(lines) + "\n"


def _write_sequences(keys: SomeKeys) -> Keys:
    """Batches in sequences, and degrees that only older releases have."""
    pp, dp = keys.get("plan.pp", 1), keys.get("plan.dp", 1)
    settings = {
        "training.local_batch_size": keys["batch.global"] // dp if pp > 1 else keys["batch.micro"],
        "training.global_batch_size": keys["batch.global"],
        "training.mixed_precision_reduce": {ours: theirs for theirs, ours in FORMATS.items()}.get(
            keys.get("precision.gradients", "fp32"), "float32"
        ),
    }
    if (micro := keys.get(MICRO)) is not None and keys["framework.release"] >= VALIDATES_SINCE:
        pieces = settings["training.local_batch_size"] // keys["batch.micro"] if pp > 1 else 1
        settings |= {"validation.enable": True, "validation.local_batch_size": micro * pieces}
        settings["validation.seq_len"] = keys.get(SEQUENCE, keys["batch.sequence"])
    if pp > 1 and keys["framework.release"] < MICROBATCH_SIZES_SINCE:
        settings[PIECES["number"]] = settings["training.local_batch_size"] // keys["batch.micro"]
    elif pp > 1:
        settings[PIECES["size"]] = keys["batch.micro"]
    if keys.get("plan.cp", 1) > 1 and keys.get("plan.sequence") == "ring":
        settings["parallelism.context_parallel_rotate_method"] = "alltoall"
    if keys.get("plan.ep", 1) > 1:
        backend = next((word for word, ours in EXPERTS.items() if ours == keys.get("plan.expert")), "standard")
        settings["parallelism.expert_parallel_comm_backend"] = backend
        settings["parallelism.expert_tensor_parallel_degree"] = keys.get("plan.etp", 1)
    if (parts := _write_loss(keys)).get("compile.components") and keys["framework.release"] >= COMPONENTS_SINCE:
        settings |= parts
    return settings


def _write_converters(keys: SomeKeys) -> Keys:
    compute = str(keys.get("precision.compute", "bf16"))
    if compute == "mxfp8":
        return {"model.converters": ["quantize.linear.mx"]}
    if not compute.startswith("fp8"):
        return {}
    section = "quantize.linear.float8"
    more: Keys = {f"{section}.recipe_name": "rowwise"} if compute == "fp8-rowwise" else {}
    if keys.get("framework.set.update.quantised_weights") and compute == "fp8-tensorwise":
        more = {f"{section}.enable_fsdp_float8_all_gather": True}
    return {"model.converters": [section], **more}


def _write_mode(keys: SomeKeys) -> Keys:
    """Writes activation checkpointing."""
    mode, name = str(keys.get("plan.recompute", "none")), "activation_checkpoint.mode"
    layers, each = keys.get("plan.recompute.layers"), keys["model.layers"] // keys.get("plan.pp", 1)
    if mode == "full" and layers and layers < each:
        every = next((n for n in range(1, each + 1) if each // n == layers), None)
        if every:
            return {name: "selective", "activation_checkpoint.selective_ac_option": str(every)}
    if mode in ("operators", "selective"):
        return {name: "selective", "activation_checkpoint.selective_ac_option": "op"}
    return {name: mode}

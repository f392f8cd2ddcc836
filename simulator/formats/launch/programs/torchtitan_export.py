"""A job as a TOML file of torchtitan; the other way is `simulator.formats.launch.programs.torchtitan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.programs.torchtitan_names import EXPERTS, FLAVORS, FORMATS, ROWS, TORCH_NAMES
from meshcast.simulator.formats.launch.table import Keys, write_rows
from meshcast.simulator.models.load import load_model

RESIDENT = ("zero-1", "zero-2", "zero-offload")
"""Data schemes that shard states but keep weights whole, of which FSDP without resharding is the nearest."""


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
    """Schedule, micro-batches and the layers of stages."""
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
    """Name and flavor of the model with these keys."""
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
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"[{', '.join(map(_to_toml, value))}]" if isinstance(value, list | tuple) else str(value)

"""Release 1 of xtuner: a Python file with a ``TrainerConfig``, read as text, for ``xtuner.v1.train.cli.sft --config``.

Source: InternLM/xtuner @b934f46209 (August 2026), xtuner/v1/train/trainer.py (``TrainerConfig``), v1/config/fsdp.py,
v1/config/optim.py, v1/datasets/config.py, v1/loss/ce_loss.py and v1/model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.programs.recipes import read_python_settings
from meshcast.simulator.formats.launch.programs.trainer import LIGER_LOSS, set_chunked_loss, take_on
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    LENGTH,
    LOADING,
    NAMES,
    OPTIMISATION,
    SAVING,
    list_verdicts,
)
from meshcast.simulator.formats.launch.python_text import Built, OpenValue, PythonText
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import ON, SettingRow, Stated, is_null, read_number
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence

TRAINER = "TrainerConfig"
"""Name of the class, and of the setting that says that a file builds it."""

GETENV = ast.parse("def getenv(name, default=None):\n    return __environment__.get(name, default)").body[0]


def follow_file(file: LaunchFile) -> PythonText:
    """Returns what a Python file builds. Variables of the environment are those that the user gives, or their
    defaults."""
    environment = dict(file.options.environment)
    names = {"os": Built("os", 0, fields={"environ": environment, "getenv": GETENV}), "__environment__": environment}
    text = PythonText(file.text, file.where, names)
    text.follow()
    return text


def find_trainer(text: PythonText) -> Built | None:
    """Returns the configuration of a trainer that a file builds."""
    return next((call for call in reversed(text.calls) if call.last_name == TRAINER), None)


def read_trainer(text: PythonText, where: str) -> dict[str, Stated]:
    """Reads the settings of the trainer by their dotted names, and the classes of its parts."""
    trainer = find_trainer(text)
    assert trainer is not None
    settings = read_python_settings(trainer, where)
    settings[TRAINER] = Stated(trainer.name, TRAINER, f"{where}:{trainer.line}")
    for name in ("model_cfg", "optim_cfg", "fsdp_cfg"):
        part = trainer.fields.get(name)
        if isinstance(part, Built) and part.name:
            first = part.arguments[0] if part.arguments else part.last_name
            word, unknown = (first.text, (first.text,)) if isinstance(first, OpenValue) else (str(first), ())
            settings[name] = Stated(word, name, f"{where}:{part.line}", unknown)
    return {name: _name_variables(stated) for name, stated in settings.items()}


def _name_variables(stated: Stated) -> Stated:
    """Returns the setting with the variables of the environment that its value needs as what is unknown of it."""
    names = [name for text in stated.unknown for name in re.findall(r"environ\[['\"](\w+)['\"]\]", text)]
    return replace(stated, unknown=tuple(names)) if names else stated


ROWS = (
    SettingRow("fsdp_cfg.tp_size", "plan.tp", silent=1),
    SettingRow("fsdp_cfg.reshard_after_forward", "plan.data.reshard", "switch", ON, silent=True),
    SettingRow("fsdp_cfg.torch_compile", "framework.set.compile", "switch", ON, silent=True),
    SettingRow("intra_layer_micro_batch", "batch.micro", silent=1),
    SettingRow("dataloader_cfg.pack_max_length", "batch.sequence"),
    SettingRow("global_batch_size", "batch.global"),
    SettingRow("total_step", "run.steps"),
)

MODELS: Mapping[str, str] = {
    **{"Qwen3Dense0P6BConfig": "Qwen/Qwen3-0.6B", "Qwen3Dense4BConfig": "Qwen/Qwen3-4B"},
    **{"Qwen3Dense8BConfig": "Qwen/Qwen3-8B", "Qwen3MoE30BA3Config": "Qwen/Qwen3-30B-A3B"},
    **{"Qwen3MoE235BA22Config": "Qwen/Qwen3-235B-A22B", "DeepSeekV3Config": "deepseek-ai/DeepSeek-V3"},
}
"""Names on the hub by the classes of models (v1/model)."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.take(TRAINER)
    _read_model(reading)
    reading.set_key("framework.name", "xtuner")
    reading.set_key("plan.data", "fsdp", "fsdp_cfg")
    reading.take("fsdp_cfg")
    reading.read_rows(ROWS)
    for name in ("dataloader_cfg.pack_max_length", "global_batch_size"):
        if name not in reading.stated:
            row = next(row for row in ROWS if row.name == name)
            reading.ask_key(row.key, UNSTATED_VALUES[name], f"the file does not state {name}")
    if size := reading.take_count("sp_size"):
        reading.set_key("plan.cp", size, "sp_size")
        if size > 1:
            reading.set_key("plan.sequence", "ulysses", "sp_size")
    _read_experts(reading)
    _read_states(reading)
    _read_recomputation(reading)
    reading.set_key("train.mode", "full")
    mode = reading.take_word("loss_cfg.mode", "model_cfg.lm_loss_cfg.mode")
    if mode in ("chunk", "liger"):
        size = reading.take_count("loss_cfg.chunk_size", "model_cfg.lm_loss_cfg.chunk_size") or 1024
        traits = LIGER_LOSS if mode == "liger" else {"chunk_tokens": size}
        set_chunked_loss(reading, traits, "loss_cfg.mode", "model_cfg.lm_loss_cfg.mode")


UNSTATED_VALUES: Mapping[str, int] = {"dataloader_cfg.pack_max_length": 32768, "global_batch_size": 8}
"""What is taken with --assume-defaults: that of v1/datasets/config.py, and a sequence for each GPU of a node."""

SHAPE = re.compile(r"model_cfg\.(num_|hidden_size|intermediate|vocab|moe_inter|n_)")
"""Fields of a model's configuration that change its shape."""


def _read_model(reading: Reading) -> None:
    stated = reading.stated.get("model_cfg")
    changed = next((entry for name, entry in reading.stated.items() if SHAPE.match(name)), None)
    if changed is not None:
        reading.take("model_cfg")
        why = "it changes the shape of the model, which meshcast does not read from here"
        reading.ask(changed, why, "model=llama3-8b", "model=config.json")
    elif stated is not None and (known := MODELS.get(str(stated.value))) is not None:
        reading.stated["model_cfg"] = Stated(known, stated.shown, stated.place)
        reading.read_model("model_cfg")
    else:
        reading.read_model("model_cfg", "load_from")
    reading.take("load_from", decisive=False)


def _read_experts(reading: Reading) -> None:
    """Reads the ranks that experts are spread over: of the model's configuration or of FSDP, which agree."""
    names = "fsdp_cfg.ep_size", "model_cfg.ep_size"
    size = reading.take_count(*names)
    if size and "model.moe.experts" in reading.keys:
        reading.set_key("plan.ep", size, *names)
    dispatcher = reading.take_word("model_cfg.dispatcher")
    if dispatcher == "deepep" and reading.keys.get("plan.ep", 1) > 1:
        reading.set_key("plan.expert", "deepep", "model_cfg.dispatcher")


def _read_states(reading: Reading) -> None:
    """Reads formats, and where the states of the optimizer lie."""
    dtype = reading.take_word("fsdp_cfg.param_dtype").removeprefix("torch.") or "bfloat16"
    compute = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}.get(dtype, "fp32")
    reading.set_key("precision.compute", compute, "fsdp_cfg.param_dtype")
    float8 = [name for name in reading.stated if name.startswith("model_cfg.float8_cfg")]
    if any(not is_null(reading.stated[name].value) for name in float8):
        reading.set_key("precision.compute", "fp8-blockwise", *float8)
        for name in float8:
            reading.take(name)
    if size := reading.take_count("fsdp_cfg.hsdp_sharding_size"):
        reading.set_key("plan.mics", size, "fsdp_cfg.hsdp_sharding_size")
    if (offload := take_on(reading, "fsdp_cfg.cpu_offload")) is not None:
        reading.set_key("plan.offload", ("optimizer",), "fsdp_cfg.cpu_offload")
        why = "of what FSDP offloads the states of the optimizer alone are forecast in host memory"
        reading.approximate(offload, why, "the forecast needs more memory, and its step is shorter")
    elif take_on(reading, "optim_cfg.swap_optimizer") is not None:
        reading.set_key("plan.offload", ("optimizer",), "optim_cfg.swap_optimizer")
    stated = reading.take("optim_cfg")
    if stated is not None and str(stated.value) not in ("AdamWConfig", "adamw"):
        why = f"meshcast updates with Adam, not as {stated.value} says"
        reading.ask(stated, why, "precision.moments=fp32", "precision.moments=bf16")


def _read_recomputation(reading: Reading) -> None:
    """Reads the share of layers that are recomputed."""
    stated = reading.take("fsdp_cfg.recompute_ratio")
    ratio = 1 if stated is None or is_null(stated.value) else float(read_number(stated))
    reading.set_key("plan.recompute", "full" if ratio else "none", "fsdp_cfg.recompute_ratio")
    layers: Any = reading.keys.get("model.layers")
    if 0 < ratio < 1 and layers:
        reading.set_key("plan.recompute.layers", max(1, int(layers * ratio)), "fsdp_cfg.recompute_ratio")


TRAINER_CONFIG_VERDICTS = list_verdicts(
    ("work_dir log_dir profile_* debug* exp_tracker prober_list hooks_config* internal_metrics*", NAMES),
    ("tokenizer_path dataset_cfg* dataloader_cfg*", DATA),
    ("lr_cfg* optim_cfg.* do_clip grad_norm_dtype model_cfg.balancing* model_cfg.z_loss*", OPTIMISATION),
    ("checkpoint_interval checkpoint_max* hf_interval hf_max* snapshot* auto_resume resume_cfg* async_*", SAVING),
    ("load_checkpoint_cfg* strict_load skip_checkpoint* patch_for* check_health* dist_backend", LOADING),
    ("total_epoch", LENGTH),
    ("loss_cfg.* model_cfg.lm_loss_cfg.*", NoInfluence("the logits of a loss over chunks are left out, of any size")),
    ("loss_cfg model_cfg.lm_loss_cfg", NAMES),
    ("fsdp_cfg.*", Approximation("FSDP 2 with the defaults of meshcast is forecast", EITHER)),
    ("model_cfg.freeze* model_cfg.language*", Decision("it says which weights are trained", ("train.mode=full",))),
    ("model_cfg.*", Approximation("the usual kernels of the model are forecast", EITHER)),
)
"""On settings of release 1."""

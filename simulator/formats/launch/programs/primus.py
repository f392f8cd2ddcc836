"""Primus of AMD: experiments in YAML that name a module, a model and what they override, for Megatron-LM or torchtitan.

Source: AMD-AGI/Primus @fd1eeabb, primus/configs (modules and models with what they extend), primus/core/config,
examples/run_pretrain.sh, runner/primus-cli.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.flat_settings import flatten_settings
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs import megatron, megatron_bridge, torchtitan
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS, judge
from meshcast.simulator.formats.launch.programs.nemo import interpret_configuration, read_adapters
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import (
    ON,
    SettingRow,
    Stated,
    is_null,
    read_switch,
    read_words,
)
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdicts

BACKENDS = ("megatron", "megatron_bridge", "torchtitan")
"""Frameworks of modules that are read."""

TITAN = {
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.steps": 10000,
    "activation_checkpoint.mode": "none",
    "compile.enable": True,
    "parallelism.pipeline_parallel_schedule": "1F1B",
}
"""Settings of primus/configs/modules/torchtitan/pre_trainer.yaml that an experiment leaves out."""

ENTRIES = re.compile(
    r"(^|/)run_(slurm_|local_)?pretrain\.sh$|(^|/)primus-cli\b|(^|/)primus/(cli/)?(train|main)\.py$|^primus\."
)
"""Its scripts and commands."""


# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of an experiment: those that it overrides, of its model, and of its module."""
    if file.data is None:
        return _read_command(file)
    modules = file.data.get("modules") if isinstance(file.data, Mapping) else None
    if not isinstance(modules, Mapping):
        raise PlanError(file.where, "an experiment of Primus has modules", "Start with modules:")
    name, module = next(
        ((name, inner) for name, inner in modules.items() if isinstance(inner, Mapping) and "framework" in inner),
        ("", None),
    )
    if module is None:
        raise PlanError(file.where, "no module of it names a framework", "Write framework: megatron")
    framework = str(module["framework"])
    if framework not in BACKENDS:
        rule = f"modules.{name}.framework is {framework}, and meshcast reads {' and '.join(BACKENDS)} in Primus"
        raise PlanError(file.where, rule, "Write the job in a few lines of YAML: see meshcast init")
    prefix = f"modules.{name}.overrides."
    flat = flatten_settings(file.data, file.text, file.where)
    overrides = {
        path.removeprefix(prefix): replace(fill_variables(stated, file), shown=path.removeprefix(prefix))
        for path, stated in flat.items()
        if path.startswith(prefix)
    }
    model = fill_variables(Stated(module.get("model", ""), "model", file.where), file)
    stem = re.sub(r"\.ya?ml$", "", str(model.value).rpartition("/")[2])
    config = re.sub(r"\.ya?ml$", "", str(module.get("config", "pre_trainer")).rpartition("/")[2])
    if framework == "torchtitan":
        below = _read_titan(stem, model)
    elif framework == "megatron_bridge":
        below = _read_bridge(config, stem, model, overrides)
    else:
        below = _read_module(config, stem, model)
    return {**below, "framework": Stated(framework, "framework", file.where), **overrides}


def _read_module(config: str, stem: str, model: Stated) -> dict[str, Stated]:
    """Reads the settings of a module and of a model for Megatron-LM; of a model that is not known its name."""
    data = load_recipes("primus")
    module = data.trainers.get(config, data.trainers["pre_trainer"])
    settings = {key: Stated(value, key, f"{config}.yaml of Primus") for key, value in {**data.usual, **module}.items()}
    shape = data.models.get(stem)
    if shape is None:
        return {**settings, "model": replace(model, value=stem)}
    return {**settings, **{key: Stated(value, key, f"{stem}.yaml of Primus") for key, value in shape.items()}}


def _read_bridge(config: str, stem: str, model: Stated, overrides: dict[str, Stated]) -> dict[str, Stated]:
    """Reads the settings of the recipe of Megatron-Bridge that a module and a model choose; `overrides` get its
    names."""
    for name, theirs in BRIDGE.items():
        if name in overrides:
            overrides[theirs] = overrides.pop(name)
    adapters = overrides.get("peft")
    is_whole = adapters is None or is_null(adapters.value) or str(adapters.value) == "none"
    kind = "pretrain" if config.startswith("pretrain") else "sft" if is_whole else "peft"
    return megatron_bridge.read_recipe(f"{stem}_{kind}_config", model)


BRIDGE = {"precision_config": "mixed_precision", "comm_overlap_config": "comm_overlap"}
"""Settings of Megatron-Bridge by those of Primus (primus/backends/megatron_bridge)."""


def _read_titan(stem: str, model: Stated) -> dict[str, Stated]:
    """Reads the settings of a module and of a model for torchtitan."""
    settings = {key: Stated(value, key, "pre_trainer.yaml of Primus") for key, value in TITAN.items()}
    name, size = re.fullmatch(r"([a-z_]+\d(?:\.\d+)?)?_?(.*?)(?:-fp8)?", stem).groups()  # type: ignore[union-attr]
    family = re.sub(r"\.\d$", "", name or stem)
    settings |= {"model.name": replace(model, value=family), "model.flavor": replace(model, value=size)}
    if stem.endswith("-fp8"):
        settings["model.converters"] = replace(model, value=["quantize.linear.float8"])
    return settings


def fill_variables(stated: Stated, file: LaunchFile) -> Stated:
    """Returns the value with its variables of the environment filled: ``${PRIMUS_TP:1}`` is 1 unless --env sets it."""
    if not isinstance(stated.value, str) or "${" not in stated.value:
        return stated
    unknown: list[str] = []

    def fill(match: re.Match[str]) -> str:
        value = file.options.environment.get(match[1], match[2])
        if value is None:
            unknown.append(match[1])
        return value if value is not None else match[0]

    text = re.sub(r"\$\{(\w+)(?::([^}]*))?\}", fill, stated.value)
    return replace(stated, value=None if text == "null" else text, unknown=tuple(unknown))


def _read_command(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the experiment that a script starts, with the arguments behind it."""
    if file.launch is None:
        return {}
    launch = file.launch
    config = launch.arguments.get("config") or launch.arguments.get("exp")
    named = config.value if config is not None else getattr(launch.environment.get("EXP"), "text", None)
    place = config.place if config is not None else launch.place
    arguments = {name: stated for name, stated in launch.arguments.items() if name not in ("config", "exp")}
    companion = file.find_companion(str(named)) if named else None
    if companion is None:
        return {**arguments, "config": Stated(str(named or ""), "EXP", place)}
    return {**read(companion), **arguments}


# -------------------------------------------------------------------------------------- interpreting

ROWS = (SettingRow("gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", ON),)
"""Settings that Megatron-LM has as switches that turn them off."""

SCHEDULES = {
    **{
        "1f1b": "1f1b",
        "1f1b-interleaved": "interleaved-1f1b",
        "zero-bubble": "zb-h1",
        "zero-bubble-heuristic": "zb-h1",
    },
    **{"zbv-formatted": "zb-v", "v-half": "v-half", "v-min": "v-min"},
}
"""Schedules by ``pp_algorithm``."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    if (stated := reading.take("config")) is not None:
        why = "it names the experiment, which says model and plan and is not beside the script"
        reading.ask(stated, why, "--env EXP=experiment.yaml", "model=llama3-8b")
    if reading.take_word("framework") == "torchtitan":
        torchtitan.interpret(reading)
        return
    if reading.take_word("framework") == "megatron_bridge":
        interpret_configuration(reading)
        return
    if (stated := reading.take("model")) is not None and not is_null(stated.value):
        reading.read_model("model")
    _add_adapters(reading)
    _set_turbo_dispatcher(reading)
    reading.read_rows(ROWS)
    megatron.interpret(reading)
    reading.set_key("framework.name", "primus", "framework")
    reading.set_key("framework.set.attention", "flash", "use_flash_attn")
    read_adapters(reading)
    _read_schedule(reading)
    if (split := reading.take("decoder_pipeline_manual_split_list")) is not None and not is_null(split.value):
        layers = tuple(read_digits(word) for word in read_words(split))
        if None in layers:
            raise split.refuse("it takes the layers of the stages", "Write [8, 8, 8, 8]")
        reading.set_key("plan.partition", layers, "decoder_pipeline_manual_split_list")
    if (layers_stated := reading.take("recompute_layer_ids")) is not None and not is_null(layers_stated.value):
        reading.ask(layers_stated, "single layers that are recomputed are not described", "plan.recompute=full")


def _add_adapters(reading: Reading) -> None:
    """Adds the section of adapters, if it is on, by the names of Megatron-Bridge."""
    switch = reading.take("lora.enabled")
    if switch is None or not read_switch(switch):
        return
    names = {"dim": "lora.dim", "target_modules": "lora.target_modules"}
    section = {name: stated for name, theirs in names.items() if (stated := reading.take(theirs)) is not None}
    reading.add_stated({"peft": replace(switch, value="lora"), **section})


def _set_turbo_dispatcher(reading: Reading) -> None:
    """Dispatches tokens by DeepEP where Primus-Turbo does."""
    turbo, deep = reading.take("enable_primus_turbo"), reading.take("use_turbo_deepep")
    if turbo is None or deep is None or not (read_switch(turbo) and read_switch(deep)):
        return
    reading.stated |= {"moe_token_dispatcher_type": replace(deep, value="flex"), "moe_enable_deepep": deep}
    if (units := reading.take("turbo_deepep_num_cu")) is not None:
        reading.stated |= {"moe_deepep_num_sms": units}


def _read_schedule(reading: Reading) -> None:
    """Reads the schedules of the pipeline that Primus has beside those of Megatron-LM."""
    if reading.keys["plan.pp"] == 1:
        reading.take("patch_zero_bubble")
        reading.take("patch_primus_pipeline")
        return
    if reading.take_switch("patch_primus_pipeline"):
        word = reading.take_word("pp_algorithm") or "1f1b-interleaved"
        if word in SCHEDULES:
            reading.set_key("plan.pipeline", SCHEDULES[word], "pp_algorithm", "patch_primus_pipeline")
        else:
            reading.ask(
                reading.take("pp_algorithm"), f"{word!r} is no schedule that meshcast has", "plan.schedule=zb-h1"
            )
    elif reading.take_switch("patch_zero_bubble"):
        is_v = reading.take_switch("zero_bubble_v_schedule")
        reading.set_key("plan.pipeline", "zb-v" if is_v else "zb-h1", "patch_zero_bubble", "zero_bubble_v_schedule")


OWN_VERDICTS: Verdicts = {
    **judge(
        Approximation(
            "kernels of Primus-Turbo are forecast as those of Transformer Engine", "the forecast is too slow"
        ),
        "enable_primus_turbo|use_turbo_(?!deepep).*|turbo_.*|use_sink_attention|sink_.*|moe_use_fused_router.*|mxfp4_.*",
        r"primus_turbo\..*|enable_turbo_attention.*|no_fp8_weight_transpose.*|patch_moe_overlap|mega_moe.*|fused_ce.*",
    ),
    r"weight_deosc.*|lora\.(?!enabled).*": NoInfluence("it is a number of the update, which costs the same"),
    "data_parallel_replicate_degree": Decision("states are copied as often", ("plan.replicate=1",)),
    **judge(
        NoInfluence("it is about logging, failures or the start of a run"),
        "log_avg.*|stderr_sink.*|disable_.*|use_rocm_mem.*|mlflow.*|generate_tracelens.*|stage|work_group|user_name|exp_name",
        "workspace|platform|dump_pp_data|pp_warmup|bert_.*|add_position_embedding|mock_dataset.*|model_type|compile_.*",
        "zero_bubble_.*|enable_zb_runtime|pre_communication.*|enable_optimizer_post.*|enable_exactly.*|debug_scheduler.*",
    ),
}
"""Verdicts on settings that the frameworks do not have."""


def recognise(file: LaunchFile) -> Evidence:
    """Recognises an experiment with a module of a framework, or a start of its scripts."""
    if file.launch is not None:
        return Evidence.CERTAIN if ENTRIES.search(file.launch.entry) else Evidence.NONE
    modules = file.data.get("modules") if isinstance(file.data, Mapping) else None
    inner = modules.values() if isinstance(modules, Mapping) else ()
    is_ours = any(isinstance(module, Mapping) and {"framework", "config"} <= module.keys() for module in inner)
    return Evidence.CERTAIN if is_ours else Evidence.NONE


PRIMUS = LaunchFormat(
    "primus",
    "Primus",
    ".yaml",
    recognise,
    read,
    interpret,
    None,
    {**OWN_VERDICTS, **VERDICTS, **torchtitan.VERDICTS},
)

"""Megatron-Bridge: recipes by name with overrides, in YAML files, Python files or commands; and the overrides of a job.

Source: NVIDIA-NeMo/Megatron-Bridge @067f987df, src/megatron/bridge/recipes, src/megatron/bridge/training/config.py and
mixed_precision.py, scripts/training/run_recipe.py, scripts/performance/argument_parser.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.bridge_workloads import WORKLOAD, find_workload, read_workload
from meshcast.simulator.formats.launch.programs.evaluations import MICRO
from meshcast.simulator.formats.launch.programs.megatron import read_gpus
from meshcast.simulator.formats.launch.programs.megatron_plan import read_loss
from meshcast.simulator.formats.launch.programs.nemo import (
    ARGUMENTS,
    CORE_MODULES,
    RECIPES,
    VERDICTS,
    ask_for_recipe,
    divide_overrides,
    interpret_configuration,
    name_plainly,
    read_overrides,
    read_sections,
    silent_overlaps,
    write_adapters,
    write_settings,
)
from meshcast.simulator.formats.launch.programs.recipes import (
    ask_about_changes,
    ask_for_function,
    find_function,
    follow_python,
    list_changes,
    list_functions,
    load_recipes,
    name_functions,
    read_options,
    read_python_settings,
)
from meshcast.simulator.formats.launch.python_text import Built, OpenValue, PythonText, Value
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, Stated, is_null

PLACES = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size", "train_iters"), "train"),
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"), "ddp"),
    **dict.fromkeys(("use_megatron_fsdp", "data_parallel_sharding_strategy"), "ddp"),
    **dict.fromkeys(("use_distributed_optimizer", "num_distributed_optimizer_instances"), "ddp"),
    **dict.fromkeys(("use_precision_aware_optimizer", "optimizer_cpu_offload"), "optimizer"),
    **dict.fromkeys(("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"), "optimizer"),
    **dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "optimizer"),
    **{"tp_comm_overlap": "comm_overlap", "use_tp_pp_dp_mapping": "dist"},
}
"""Sections of Megatron-Bridge other than ``model``."""


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a recipe, and of the file that changes it."""
    if file.suffix == ".py":
        return read_python(file)
    if file.data is None:
        return read_command(file)
    if not isinstance(file.data, Mapping):
        raise PlanError(file.where, "such a file is a mapping of keys to values", "Start with model:")
    settings = read_sections(file)
    options = read_options(file.options.arguments)
    named = options.get("recipe") or file.data.get("recipe")
    where = "--args" if "recipe" in options else file.where
    if isinstance(named, str):
        return {**read_recipe(named, Stated(named, "recipe", where)), **settings}
    return {**_find_named_recipe(file), **settings}


RESEMBLED = "resembled"
"""Name of the setting for a recipe that the name of a file resembles."""


def _find_named_recipe(file: LaunchFile) -> dict[str, Stated]:
    """Returns the settings of the recipe that the name of a file holds, such as
    ``llama3_8b_pretrain_override_example``."""
    stem, recipes = Path(file.where).stem, load_recipes(BRIDGE_DATA)
    names = [*recipes.aliases, *recipes.recipes]
    held = [name for name in names if re.search(rf"(^|_){re.escape(name.removesuffix('_config'))}(_|$)", stem)]
    name = max(held, key=len, default="")
    settings = recipes.find(name)
    return {**settings, RESEMBLED: Stated(name, Path(file.where).name, file.where)} if settings is not None else {}


BRIDGE_DATA = "megatron_bridge"
"""Name of the file of its recipes."""


def read_recipe(name: str, stated: Stated) -> dict[str, Stated]:
    """Returns the settings of a recipe; of an unknown recipe its name."""
    settings = load_recipes(BRIDGE_DATA).find(name.strip("'\""))
    return settings if settings is not None else {"recipe": replace(stated, value=name)}


OPTIONS = {
    **{"max_steps": "train_iters", "ms": "train_iters", "gb": "global_batch_size", "mb": "micro_batch_size"},
    **{"sl": "seq_length", "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"},
    **{"cp": "context_parallel_size", "vp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size"},
    **{"etp": "expert_tensor_parallel_size", "num_gpus": "gpus"},
}
"""Options of the scripts that run recipes, and the settings that they change."""

CHOSEN = ("recipe", "model", "mode", "model_recipe_name", "task", "gpu", "compute_dtype", "config_file")
"""Options that choose the recipe."""


CHOOSING = ("recipe", "model_recipe_name", "model")
"""Options that name a recipe, or what it is of."""

CHOSEN_RECIPE = "chosen"
"""Name of the setting for the option that names a recipe that is known."""


def read_command(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a start of ``run_recipe.py`` or of another script, with overrides behind it."""
    if file.launch is None:
        return {}
    if (script := _find_script(file)) is not None:
        around = {name: stated for launcher in file.launch.launchers for name, stated in launcher.settings.items()}
        return {**around, **read_python(script)}
    launch = divide_overrides(file.launch)
    file = replace(file, launch=launch)
    around = {name: stated for launcher in launch.launchers for name, stated in launcher.settings.items()}
    arguments = {OPTIONS.get(name, name): stated for name, stated in launch.arguments.items() if name not in CHOSEN}
    overrides = name_plainly(read_overrides(launch.positional))
    companion = None
    if (config := launch.arguments.get("config_file")) is not None:
        companion = file.find_companion(str(config.value))
        overrides = {**(read_sections(companion) if companion is not None else {"config_file": config}), **overrides}
    recipe = _read_chosen_recipe(file)
    named = next((launch.arguments[name] for name in CHOOSING if name in launch.arguments), None)
    if named is not None and "recipe" not in recipe:
        recipe = {CHOSEN_RECIPE: named, **recipe}
    return {**around, **recipe, **arguments, **overrides}


IMPORT = re.compile(r"^[ \t]*from megatron\.bridge\.recipes", re.MULTILINE)
"""Imports of recipes in a Python file."""


def _find_script(file: LaunchFile) -> LaunchFile | None:
    """Returns the Python file that a script starts, with the arguments of its command line, if it is there and has a
    recipe."""
    launch = file.launch
    if launch is None or not launch.entry.endswith(".py"):
        return None
    script = file.find_companion(launch.entry)
    if script is None or not IMPORT.search(script.text):
        return None
    words = [f"--{name}={stated.value}" for name, stated in launch.arguments.items()]
    arguments = (*words, *(str(word.value) for word in launch.positional))
    return replace(script, options=replace(script.options, arguments=arguments))


def _read_chosen_recipe(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the recipe that the options of a command choose."""
    arguments = file.launch.arguments if file.launch is not None else {}
    words = {name: str(stated.value).strip("'\"") for name, stated in arguments.items()}
    if "recipe" in words:
        return read_recipe(words["recipe"], arguments["recipe"])
    if "model_recipe_name" in words:
        task, kind = words.get("task", "pretrain"), words.get("compute_dtype", "bf16").replace("_", "")
        gpus = f"{words.get('num_gpus', '8')}gpu_{words.get('gpu', 'h100').lower()}"
        name = f"{words['model_recipe_name']}_{task}_{gpus}_{kind}_config"
        return read_recipe(name, arguments["model_recipe_name"])
    if "model" in words:
        mode = {"lora": "peft", "dora": "peft"}.get(words.get("mode", "pretrain"), words.get("mode", "pretrain"))
        return read_recipe(f"{words['model']}_{mode}_config", arguments["model"])
    name = re.sub(r"\.py$", "", file.launch.entry.rpartition("/")[2]) if file.launch is not None else ""
    kind, _, model = name.partition("_")
    return load_recipes(BRIDGE_DATA).find(f"{model}_{'pretrain' if kind == 'pretrain' else 'sft'}_config") or {}


def read_python(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the last configuration that a Python file builds."""
    text = follow_python(file)
    options = read_options(file.options.arguments)
    overrides = {name: Stated(value, name, "--args") for name, value in options.items() if "." in name}
    name = options.get("recipe")
    if (workload := find_workload(name, text.names.get(str(name)))) is not None:
        settings = read_workload(workload, file.where) or {"recipe": Stated(name, "recipe", "--args")}
        return {**settings, **name_plainly(overrides)}
    if (function := find_function(text, name)) is not None:
        return {**_read_function(text, function, file.where), **name_plainly(overrides)}
    built = _find_built(text.calls)
    if built is None:
        if len(rivals := list_functions(text, FUNCTION)) > 1:
            return name_functions("--recipe", rivals, file.where)
        text.call_functions()
        built = _find_built(text.calls)
    if built is None:
        return {}
    settings = _read_built(built, file.where)
    arguments = {ARGUMENTS.get(name, name): value for name, value in settings.items()}
    plain = {
        **name_plainly(arguments),
        **_read_config_file(text, file),
        **name_plainly(overrides),
        **list_changes(text, built, file.where),
    }
    if built.last_name == "ConfigContainer":
        return {**silent_overlaps(file), **plain}
    return {
        **read_recipe(built.last_name, Stated(built.last_name, built.last_name, f"{file.where}:{built.line}")),
        **plain,
    }


FUNCTION = re.compile(r"_(pretrain|sft|peft|finetune)(_\w+)?_config$")
"""Functions that make recipes."""

GRAPHS = "set_cuda_graph_modules"
"""Function of the library that takes a model, and the modules that are graphs."""


def _read_function(text: PythonText, function: ast.FunctionDef, where: str) -> dict[str, Stated]:
    """Reads the settings of a recipe that a function of the file makes.

    What functions of other modules do to a recipe of the library is in the library's recipe of this name.
    """
    built = text.call(function)
    if not isinstance(built, Built):
        return {}
    settings = name_plainly(_read_built(built, where))
    known = load_recipes(BRIDGE_DATA).find(function.name)
    graphs = next((call for call in text.calls if call.last_name == GRAPHS and len(call.arguments) == 2), None)
    if graphs is not None:
        settings["cuda_graph_scope"] = Stated(graphs.arguments[1], GRAPHS, f"{where}:{graphs.line}")
    if known is None:
        base = read_recipe(built.last_name, Stated(built.last_name, built.last_name, f"{where}:{built.line}"))
        return {**base, **settings, **list_changes(text, built, where)}
    results = {path.rpartition(".")[2] for path, value, _ in built.walk() if isinstance(value, Built | OpenValue)}
    results |= {
        name for name, value in built.fields.items() if isinstance(value, Built) and not value.last_name[:1].isupper()
    }
    return {**known, **{name: stated for name, stated in settings.items() if name not in results}}


HYBRID_DEFAULTS: Mapping[str, object] = {
    **{"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": False, "hidden_dropout": 0.0},
    **{"position_embedding_type": "none", "share_embeddings_and_output_weights": False, "seq_length": 8192},
}
PROVIDERS: Mapping[str, Mapping[str, object]] = dict.fromkeys(
    ("HybridModelProvider", "MambaModelProvider"), HYBRID_DEFAULTS
)
"""Fields of classes of models that are not those of ``GPTModelProvider`` without a word
(src/megatron/bridge/models/hybrid/hybrid_provider.py @067f987d, models/mamba/mamba_provider.py of releases before)."""


def _read_built(built: Built, where: str) -> dict[str, Stated]:
    """Reads the settings of a configuration, and what the class of its model has without a word."""
    model = built.fields.get("model")
    usual = PROVIDERS.get(model.last_name, {}) if isinstance(model, Built) else {}
    line = model.line if isinstance(model, Built) else built.line
    silent = {f"model.{name}": Stated(value, f"model.{name}", f"{where}:{line}") for name, value in usual.items()}
    settings = {**silent, **read_python_settings(built, where)}
    data = settings.get("dataset.seq_length")
    return settings if data is None else {**settings, DATA_SEQUENCE: data}


DATA_SEQUENCE = "sequence_of_data"
"""Name of the setting for the length of the samples of the data."""


def _ask_for_sequence(reading: Reading) -> None:
    """Asks for the length of sequences where model and data have different ones, with which the program stops
    (``validate`` of src/megatron/bridge/training/config.py @067f987d)."""
    data, model = reading.take(DATA_SEQUENCE), reading.stated.get("seq_length")
    if data is None or model is None or is_null(data.value) or str(data.value) == str(model.value):
        reading.ignore(data, "the job is the same without it")
        return
    why = (
        f"the model has sequences of {model.value} tokens, and the data of {data.value}: the program stops at its start"
    )
    reading.ask(data, why, f"batch.sequence={data.value}", f"batch.sequence={model.value}")


def _read_config_file(text: PythonText, file: LaunchFile) -> dict[str, Stated]:
    """Reads the overrides of the YAML file that a script merges unless its arguments name another
    (``--config-file``)."""
    if not any(call.last_name == "add_argument" and "--config-file" in call.arguments for call in text.calls):
        return {}
    path = read_options(file.options.arguments).get("config_file")
    names = [str(path)] if path else [value for value in text.names.values() if str(value).endswith((".yaml", ".yml"))]
    if not names:
        return {}
    companion = file.find_companion(f"conf/{names[0]}") or file.find_companion(names[0])
    if companion is None:
        return {"config_file": Stated(names[0], "--config-file", file.where)}
    return read_sections(companion)


def _find_built(calls: list[Built]) -> Built | None:
    """Returns the last call of a recipe, or the last configuration."""
    recipes = load_recipes(BRIDGE_DATA)
    known = {*recipes.recipes, *recipes.aliases, *recipes.bases}
    for call in reversed(calls):
        if call.last_name in known or call.last_name == "ConfigContainer":
            return call
    likely = [call for call in calls if FUNCTION.search(call.last_name)]
    return likely[-1] if likely else None


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    ask_about_changes(reading)
    ask_for_function(reading)
    if (stated := reading.take("recipe") or reading.take("config_file")) is not None:
        source = load_recipes(BRIDGE_DATA).source.partition(",")[0]
        why = f"meshcast has no recipe or file {stated.value!r} ({source})"
        reading.ask(stated, why, "--args '--recipe llama3_8b_pretrain_config'", "model=llama3-8b")
    elif (stated := reading.take(RESEMBLED)) is not None:
        why = f"the file does not say which recipe it changes; by its name it is {stated.value}"
        reading.ask(stated, why, f"--args '--recipe {stated.value}'", "model=llama3-8b")
    else:
        ask_for_recipe(reading)
    gpus = reading.take_count("gpus", decisive=False)
    read_gpus(reading, "nnodes", "nproc_per_node")
    if gpus and "cluster.gpus" not in reading.keys:
        reading.set_key("cluster.gpus", gpus, "gpus")
    interpret_configuration(reading)
    _ask_for_sequence(reading)
    reading.set_key("framework.name", "megatron-bridge")
    if reading.take(CHOSEN_RECIPE) is not None and "model.preset" in reading.keys:
        reading.set_key("model.preset", reading.keys["model.preset"], CHOSEN_RECIPE)
    read_loss(reading, is_fused=True)
    if reading.keys.get("plan.tp", 1) == 1:  # CommOverlapConfig.finalize switches it off
        reading.keys.pop("framework.set.overlap.tp", None)


def recognise(file: LaunchFile) -> Evidence:
    """Recognises YAML with the sections of its configuration, Python that imports it, or a start of its scripts."""
    if file.suffix == ".py":
        return Evidence.CERTAIN if "megatron.bridge" in file.text or WORKLOAD in file.text else Evidence.NONE
    if file.launch is not None:
        named = {"recipe", "model_recipe_name"} & file.launch.arguments.keys()
        is_ours = re.search(r"(^|/)(run_recipe|setup_experiment|launch_with_nemo_run)\.py$", file.launch.entry)
        is_run = is_ours and (named or "model" in file.launch.arguments)
        return Evidence.CERTAIN if is_run or _find_script(file) is not None else Evidence.NONE
    if not isinstance(file.data, Mapping) or {"cluster", "trainer"} & file.keys:
        return Evidence.NONE
    has_sections = bool({"train", "ddp", "dataset", "comm_overlap"} & file.keys)
    has_model = isinstance(file.data.get("model"), Mapping)
    is_dotted = any(str(key).startswith("model.") for key in file.keys)
    return Evidence.LIKELY if is_dotted or (has_model and has_sections) else Evidence.NONE


def write(keys: Keys, header: list[str]) -> str:
    """Writes a YAML file of overrides for a Megatron-Bridge recipe."""
    settings = write_settings(keys)
    sections: dict[str, dict[str, Value]] = {"model": {}, "train": {}, "dataset": {}, "ddp": {}}
    for name, value in settings.items():
        sections.setdefault(PLACES.get(name, "model"), {})[name] = list(value) if isinstance(value, tuple) else value
    sections["dataset"]["seq_length"] = settings["seq_length"]
    if (micro := keys.get(MICRO)) is not None:
        sections["validation"] = {"eval_micro_batch_size": micro}
    body: dict[str, Value] = {section: inner for section, inner in sections.items() if inner}
    compute = keys.get("precision.compute", "bf16")
    recipe = next((name for name, ours in RECIPES.items() if ours == compute), None)
    if recipe:
        body["mixed_precision"] = recipe
    elif compute == "fp32":
        body["model"] |= {"bf16": False, "fp16": False}
    if keys.get("train.mode") in ("lora", "qlora"):
        rank, modules = write_adapters(keys, CORE_MODULES)
        body["peft"] = {"peft_scheme": "lora", "dim": rank, "target_modules": modules}
    lines = [f"# {line}".rstrip() for line in header]
    return "\n".join([*lines, *([""] if lines else [])]) + to_yaml(body, default_flow_style=None, width=120)


BRIDGE = LaunchFormat("megatron-bridge", "Megatron-Bridge", ".yaml", recognise, read, interpret, write, VERDICTS)

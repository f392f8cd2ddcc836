"""torchtitan: TOML files of releases until January 2026, configurations in Python since, and both with arguments of a
command line. Jobs are exported in the form that their release reads.

Source: pytorch/torchtitan @238fa9953e, torchtitan/config/job_config.py; @b5bcd76c6, torchtitan/config/configs.py,
manager.py and run_train.sh, whose batches are in tokens. Models are flavors in Python code; a file names a flavor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.hardware.documents.input_file import Unreadable, parse_toml, split_lines
from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.arguments import merge_settings
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.torchtitan_configs import STOCK, find_model_name, find_stock_config
from meshcast.simulator.formats.launch.programs.torchtitan_flags import (
    CONFIG_FILE,
    override_setting,
    read_flags,
    read_options,
)
from meshcast.simulator.formats.launch.programs.torchtitan_plan import RENAMED, interpret_settings
from meshcast.simulator.formats.launch.programs.torchtitan_registry import (
    BASE,
    ConfigModule,
    flatten_config,
    make_section,
)
from meshcast.simulator.formats.launch.programs.torchtitan_write import reads_toml, write_job
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import SomeKeys, Stated
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdicts

SCRIPT = {"MODULE": "module", "CONFIG": "config", "CONFIG_FILE": "job.config_file", "NGPU": "NGPU"}
"""Variables that ``run_train.sh`` reads, and the settings that they are."""

SECTIONS = (
    "training.",
    "parallelism.",
    "activation_checkpoint.",
    "job.",
    "compile.",
    "checkpoint.",
    "metrics.",
    "comm.",
)

TOO_FAST, TOO_SLOW = "the forecast is too fast", "the forecast is too slow"

VERDICTS: Verdicts = {
    r"(job|profiling|profiler|metrics|memory_estimation)\..*|dump_folder|hf_assets_path": NoInfluence("it writes logs"),
    r"(checkpoint|validation|validator)\..*": NoInfluence("it is of a whole run, not of a step"),
    r"optimizer\.(lr|eps|beta.*|weight_decay|.*_kwargs.*)|lr_scheduler\..*|lr": NoInfluence(
        "it changes what is learned"
    ),
    r"training\.(max_norm|seed|warmup_steps)": NoInfluence("it changes what is learned"),
    r"optimizer\.implementation": Approximation("the update is forecast as one fused kernel", TOO_FAST),
    r"(dataloader|tokenizer|training\.dataloader)(\..*)?": NoInfluence("batches are forecast to be ready"),
    r"training\.(dataset.*|data_\w*path|gc_.*)": NoInfluence("batches are forecast to be ready"),
    r"model\.(hf_assets_path|tokenizer.*|print_after.*|norm_type)": NoInfluence("it changes no shape"),
    r"model\.(attn_backend|use_flex_attn)": Approximation("attention is forecast as FlashAttention"),
    r"model\.(tp_gemm_backend|non_blocking_.*)": Approximation("its kernels are forecast as the usual ones"),
    r"model\..*": Decision("it changes the model", ("model=llama3-8b",)),
    r"experimental\.custom_.*|job\.custom_.*": Approximation("code of its own is not read"),
    r"activation_checkpoint\.(early_stop|preserve_.*|determinism.*)": NoInfluence("hardly any time, and no memory"),
    r"activation_checkpoint\.(debug|visualize.*|memory_budget)": NoInfluence("it is of another mode, or for debugging"),
    r"activation_checkpoint\.(per_op.*|force_recompute.*)": Approximation(
        "products of routers alone are repeated always"
    ),
    r"activation_checkpoint\..*": Decision("it says what is recomputed", ("plan.recompute=full",)),
    r"(debug|training)\.deterministic_warn_only": NoInfluence("it is for debugging"),
    r"(debug|training\.debug).*|(comm|override)\..*|compile\.backend": NoInfluence("it is for debugging"),
    BASE: Decision("what it returns does not stand in a file here: put its file beside", ("--assume-defaults",)),
    r"call\.\w+(\.\w+)*": Approximation("what this call does to the configuration is not read"),
    r"call\..*": Decision("which way the function takes does not follow from its text", ("--assume-defaults",)),
    r"(quantize|float8|mx|converters)\..*fqns": Approximation("all products of the layers are quantised", TOO_FAST),
    r"quantize\.(grouped_mm|moe)\..*": Approximation("experts are computed in the format of the other layers"),
    r"(quantize|float8|mx|converters)\..*emulate": Decision("products are emulated", ("precision.compute=bf16",)),
    r"(quantize|float8|mx|converters)\..*": NoInfluence("scales and padding take hardly any time"),
    r"parallelism\.prefetch_.*": Approximation("FSDP gathers as many units ahead as by default"),
    r"optimizer\.follow_fsdp_groups": Approximation("the update is forecast as one fused kernel"),
    r".*(enable_fsdp_symm_mem|enable_compiled_autograd)": Approximation("collectives of FSDP run as NCCL's"),
    r"parallelism\.(spmd_backend|full_dtensor|context_parallel_ptrr.*)": NoInfluence(
        "it is the same work by other code"
    ),
    r"parallelism\.pipeline_parallel_expert_parallel_overlap": NoInfluence("DualPipe-V overlaps in the forecast, too"),
    r"fault_tolerance\.enable": Decision("the file does not say how many replicas torchft adds", ("plan.dp=8",)),
    r"fault_tolerance\..*": NoInfluence("it is of torchft"),
    r"loss\..*": NoInfluence("it changes no bytes"),
    r"master_.*|rdzv.*|m|local_ranks_filter|role|tee|module|config|sbatch_.*|standalone": NoInfluence(
        "of the launcher"
    ),
}


# ------------------------------------------------------------------------------------------------ reading


TABLES = ("training", "parallelism", "model")
"""Tables of TOML files, one of which every one has."""


def recognise(file: LaunchFile) -> Evidence:
    """Recognises TOML or Python of torchtitan, or a command that starts it."""
    launch = file.launch
    if launch is not None:
        named = launch.entry.endswith(("torchtitan.train", "torchtitan/train.py"))
        sections = sum(name.startswith(SECTIONS) for name in launch.arguments)
        by_name = {"module", "config"} <= launch.arguments.keys() or any(
            name in launch.arguments for name in CONFIG_FILE
        )
        if named or (
            launch.entry == "run_train.sh" and (sections or by_name or SCRIPT.keys() & launch.environment.keys())
        ):
            return Evidence.CERTAIN
        return (
            Evidence.LIKELY
            if sections and any(name.startswith(SECTIONS[:4]) for name in launch.arguments)
            else Evidence.NONE
        )
    if file.suffix == ".py":
        imports = re.search(r"^[ \t]*from torchtitan\b", file.text, re.MULTILINE) and "Trainer" in file.text
        return Evidence.CERTAIN if imports else Evidence.NONE
    return (
        Evidence.LIKELY
        if file.suffix == ".toml" and any(isinstance(file.data.get(name), Mapping) for name in TABLES)
        else Evidence.NONE
    )


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file or of a command line, by section and name; of what a command names only the name."""
    if file.launch is not None:
        return _read_command(file)
    if file.suffix == ".py":
        module = ConfigModule(file)
        if module.functions:
            return _read_module(file, module)
    data = file.data
    if data is None:
        try:
            data = parse_toml(file.text)
        except Unreadable as error:
            rule = f"no configuration of torchtitan in Python, and {error.rule}"
            raise PlanError(file.where, rule, "Correct this line of the file") from None
    return _read_toml(data, file)


def _read_toml(data: SomeKeys, file: LaunchFile) -> dict[str, Stated]:
    settings: dict[str, Stated] = {}
    lines = split_lines(file.text)

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
            return
        section, _, key = prefix.rpartition(".")
        line = _find_line(lines, section, key)
        settings[RENAMED.get(prefix, prefix)] = Stated(value, prefix, f"{file.where}:{line}" if line else file.where)

    walk("", data)
    return settings


def _find_line(lines: list[str], section: str, key: str) -> int:
    """Returns the line of a key in its section; 0 if it is written in another way."""
    inside = not section
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("["):
            inside = line.split("#")[0].strip() == f"[{section}]"
        elif inside and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 0


def _read_command(file: LaunchFile) -> dict[str, Stated]:
    """Reads the arguments of a command, with the variables that ``run_train.sh`` reads and the settings of torchrun."""
    launch = file.launch
    assert launch is not None
    settings = merge_settings(replace(launch, arguments={}))
    for variable, name in SCRIPT.items():
        if variable in launch.environment and launch.entry == "run_train.sh":
            word = launch.environment[variable]
            settings[name] = Stated(word.text, variable, launch.place, word.unknown)
    return settings | read_flags(launch.arguments, launch.positional)


def _read_module(file: LaunchFile, module: ConfigModule) -> dict[str, Stated]:
    """Reads the configuration of a Python file that ``--args "--config NAME"`` names, or that it has alone, with the
    settings of the arguments."""
    options = read_options(file)
    chosen = options.get("config") or Stated("", "", file.where)
    if not chosen.value and len(module.configs) == 1:
        chosen = Stated(module.configs[0], "config", f"{file.where}:{module.functions[module.configs[0]].lineno}")
    name = str(chosen.value)
    models = str(options["module"].value) if "module" in options else find_model_name(name)
    settings = module.settings_of(name, models) if name in module.functions else {}
    return {**settings, **options, "config": chosen}


# ------------------------------------------------------------------------------------------- companions


def interpret(reading: Reading) -> None:
    """Fills the keys of a job, from the file and from what it names: a TOML file, or a configuration in Python."""
    if (stated := reading.take(*CONFIG_FILE)) is not None:
        if (companion := reading.read_companion(stated)) is not None:
            reading.add_stated(read(companion))
    elif "config" in reading.stated:
        _add_config(reading)
    interpret_settings(reading)


def _add_config(reading: Reading) -> None:
    """Adds the settings of the configuration that a command names: of its registry beside the file, or of torchtitan.

    Asks for one that is in neither. In a Python file it is checked only (`_check_module`).
    """
    chosen, module = reading.take("config"), reading.take_word("module")
    if chosen is None:
        return
    name, file = str(chosen.value), reading.file
    if file.suffix == ".py":
        _check_module(reading, chosen)
    elif (registry := _find_registry(reading, module, name)) is not None:
        reading.add_stated(registry.settings_of(name, module or find_model_name(name)))
    elif (stock := find_stock_config(name, module)) is not None:
        reading.add_stated(dict(flatten_config(make_section(stock), f"{name} {STOCK}")))
    else:
        why = f"meshcast does not know the configuration {name}, and its registry is not beside this file"
        reading.ask(chosen, why, "model=llama3-8b")


def _check_module(reading: Reading, chosen: Stated) -> None:
    """Asks which configuration of a Python file is meant, and for a configuration that does not follow from its
    text."""
    name, file = str(chosen.value), reading.file
    registry = ConfigModule(file)
    if name not in registry.functions:
        listed = ", ".join(registry.configs)
        why = f"the file has no function {name}" if name else "the file has several configurations"
        answer = f'--args "--config {next(iter(registry.configs), "")}"'
        reading.ask(chosen if name else None, f"{why}: {listed}", answer)
    elif "model.flavor" not in reading.stated:
        reading.ask(chosen, f"what {name} returns does not follow from its text", "model=llama3-8b")


def _find_registry(reading: Reading, module: str, name: str) -> ConfigModule | None:
    """Returns the registry of a module beside the file, if it has a function."""
    path = module.replace(".", "/")
    for candidate in (f"{path}/config_registry.py", f"{path}.py", f"torchtitan/models/{path}/config_registry.py"):
        companion = reading.file.find_companion(candidate) if path else None
        if companion is not None:
            registry = ConfigModule(companion)
            if name in registry.functions:
                return registry
    return None


TORCHTITAN = LaunchFormat(
    "torchtitan",
    "torchtitan",
    ".py",
    recognise,
    read,
    interpret,
    write_job,
    VERDICTS,
    write_suffix=lambda keys: ".toml" if reads_toml(keys) else ".py",
    override=override_setting,
    routing="loss-free",  # expert_bias follows the loads (torchtitan/models/common/moe.py, load_balance_coeff)
)

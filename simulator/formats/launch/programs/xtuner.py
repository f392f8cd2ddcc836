"""xtuner: configurations of mmengine in Python for ``xtuner train`` (releases 0.1), and ``TrainerConfig`` of release 1.

Python files are read as text. The settings of a configuration are the fields of its dictionaries by their dotted names;
those that Hugging Face's Trainer has, too, get its names.

Source: InternLM/xtuner v0.1.23 (94a4fcb0f5), xtuner/tools/train.py, entry_point.py, model/sft.py, model/dpo.py,
configs/deepspeed/*.json, dataset/huggingface.py and engine/_strategy/deepspeed.py. Release 1: see `xtuner_v1`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.flat_settings import flatten_settings
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs import xtuner_v1
from meshcast.simulator.formats.launch.programs.evaluations import EvaluationSettings, read_evaluation
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.programs.trainer import (
    TrainerProgram,
    double_samples,
    read_environment,
    read_trainer_file,
    read_training,
    set_adapters,
    set_attention,
    set_classes,
    set_quantised_weights,
    set_reference,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EVALUATION,
    LENGTH,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    SAVING,
    START,
    VERDICTS,
    list_verdicts,
)
from meshcast.simulator.formats.launch.python_text import Built, Named, OpenValue, PythonText
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, is_null
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision

USUAL = 2048
"""Tokens of a sequence with --assume-defaults where a configuration does not say it: those of most that xtuner has."""

PROGRAM = TrainerProgram(
    micro=1,
    sequence=USUAL,
    sequence_names=("max_length",),
    loads="compute",
    checkpointing=True,
    reentrant=True,
    evaluation=None,
)
"""model/sft.py: ``use_activation_checkpointing``; weights have 16 bits where FlashAttention runs."""

RENAMED: Mapping[str, str] = {
    **{"train_dataloader.batch_size": "per_device_train_batch_size", "train_cfg.max_iters": "max_steps"},
    **{"optim_wrapper.accumulative_counts": "gradient_accumulation_steps", "optim_wrapper.optimizer.type": "optim"},
    **{"model.use_activation_checkpointing": "gradient_checkpointing", "save_steps": "save_every"},
    **{"default_hooks.checkpoint.interval": "save_steps", "model.lora": "lora", "model.llm": "llm"},
    **{"model.llm.attn_implementation": "attn_implementation"},
    **{"model.llm.pretrained_model_name_or_path": "model_name_or_path"},
}
"""Names of the Trainer by those of a configuration of mmengine."""

RENAMED_HUGGINGFACE: Mapping[str, str] = {
    "model.pretrained_model_name_or_path": "model_name_or_path",
    "model.attn_implementation": "attn_implementation",
}
"""The same with ``framework = 'huggingface'``, beside the arguments in ``training_args``."""


# ---------------------------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class _Assignment:
    """The last assignment to a name of the module.

    node: its value.
    line: of the statement.
    """

    node: ast.expr
    line: int


def read_configuration(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a configuration in Python."""
    text = xtuner_v1.follow_file(file)
    if xtuner_v1.find_trainer(text) is not None:
        return xtuner_v1.read_trainer(text, file.where)
    return name_fields(_Fields(text, file.where).read())


class _Fields:
    """The fields of the dictionaries of a module, with the variables and lines that their values are from."""

    def __init__(self, text: PythonText, where: str) -> None:
        self.names = {name: value for name, value in text.names.items() if not name.startswith("__")}
        self.where = where
        self.assigned: dict[str, _Assignment] = {}
        self.used: set[str] = set()
        for node in text.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assigned[name] = _Assignment(value, node.lineno)
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    self.assigned[name] = _Assignment(value, node.lineno)

    def read(self) -> dict[str, Stated]:
        """Returns the fields by their dotted names, and the variables that no field has."""
        settings: dict[str, Stated] = {}
        inner = {name: value for name, value in self.names.items() if isinstance(value, dict) and name in self.assigned}
        fields = {name: dict(self._walk(name, value, *self._locate(name))) for name, value in inner.items()}
        for name in self.assigned:
            if name in self.used:
                continue
            if name in fields:
                settings |= fields[name]
            elif not _is_object(value := self.names.get(name, OpenValue(name))):
                settings[name] = self._state(name, value, self.assigned[name].line)
        return settings

    def _locate(self, name: str) -> tuple[ast.expr, int]:
        return self.assigned[name].node, self.assigned[name].line

    def _walk(self, path: str, value: Any, node: ast.expr | None, line: int) -> Iterator[tuple[str, Stated]]:
        """Yields the fields below a value by their dotted names; marks the variables that they are read from as used.

        path: dotted name of the value.
        node: its expression; None where the file does not write the value out.
        line: of the expression.
        """
        shown = path
        if isinstance(node, ast.Name) and node.id in self.assigned:
            shown = node.id
            self.used.add(shown)
            node, line = self._locate(shown)
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                below = _find_field(node, str(key))
                yield from self._walk(f"{path}.{key}", inner, below, below.lineno if below is not None else line)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = node.elts if isinstance(node, ast.List) and len(node.elts) == len(value) else [None] * len(value)
            for index, (item, below) in enumerate(zip(value, items, strict=True)):
                yield from self._walk(f"{path}.{index}", item, below, below.lineno if below is not None else line)
        elif not isinstance(value, ast.AST):
            yield path, self._state(shown, value, line)

    def _state(self, shown: str, value: Any, line: int) -> Stated:
        undefined = isinstance(value, Named) and value.name.isidentifier() and value.name not in self.names
        unknown = (value.text,) if isinstance(value, OpenValue) else (value.name,) if undefined else ()
        return Stated(_plain(value), shown, f"{self.where}:{line}", unknown)


def _find_field(node: ast.expr | None, key: str) -> ast.expr | None:
    """Returns the expression of a field of ``dict(key=...)`` or of ``{'key': ...}``."""
    match node:
        case ast.Call(keywords=keywords):
            return next((word.value for word in keywords if word.arg == key), None)
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return next((value for name, value in pairs if isinstance(name, ast.Constant) and name.value == key), None)
    return None


def _is_object(value: Any) -> bool:
    return isinstance(value, Named | Built | ast.AST)


def _plain(value: Any) -> Any:
    match value:
        case Named(name=name) | Built(name=name):
            return name
        case OpenValue(text=text):
            return text
        case list():
            return [_plain(item) for item in value]
    return value


def name_fields(fields: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the fields with the names of the Trainer, and the longest sequences of the training data as
    ``max_length``."""
    is_huggingface = "framework" in fields and str(fields["framework"].value).lower() == "huggingface"
    settings = {}
    for name, stated in fields.items():
        plain = name.removeprefix("model.") if name.startswith(("model.lora.", "model.llm.")) else name
        if is_huggingface:
            argument = name.removeprefix("training_args.") if name != "training_args.type" else name
            plain = RENAMED_HUGGINGFACE.get(name, argument)
        settings[RENAMED.get(name, plain)] = stated
    lengths = [name for name in settings if re.match(r"train_data(loader|set)(\..*)?\.max_(packed_)?length$", name)]
    counts = {name: settings[name] for name in lengths if isinstance(settings[name].value, int)}
    longest = max(counts, key=lambda name: int(counts[name].value), default=next(iter(lengths), None))
    if longest is not None:
        settings["max_length"] = settings.pop(longest)
    return settings


# ------------------------------------------------------------------------------------------------ starts


VARIABLES: Mapping[str, str] = {"NPROC_PER_NODE": "launcher.nproc_per_node", "NNODES": "launcher.nnodes"}
"""Options of torchrun by the variables that xtuner gives to it."""


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a configuration, or of a command with the configuration that it names."""
    if file.launch is None:
        return read_configuration(file)
    settings = read_trainer_file(file)
    for stated in file.launch.positional[:1]:
        settings["configuration"] = stated
    if "config" in settings:
        settings["configuration"] = settings.pop("config")
    variables = read_environment(file.launch, *VARIABLES)
    settings = {**{VARIABLES[name]: stated for name, stated in variables.items()}, **settings}
    return settings


def _follow_command(reading: Reading) -> None:
    """Adds the settings of the configuration that a command names: a file, or a name that xtuner has itself."""
    stated = reading.take("configuration")
    if stated is None:
        return
    name = re.sub(r"^.*/|\.py$", "", str(stated.value))
    recipe = load_recipes("xtuner").find(name)
    file = None if stated.unknown else reading.file.find_companion(str(stated.value))
    overrides = _read_overrides(reading)
    if file is not None:
        reading.add_stated({**read_configuration(file), **overrides})
    elif recipe is not None:
        fields = {
            key: replace(entry, shown=f"{name}, {key}") for key, entry in recipe.items() if entry.value is not None
        }
        reading.add_stated({**name_fields(fields), **overrides})
    else:
        why = f"it names a configuration, {name}, which decides model and plan and is not beside {reading.file.where}"
        reading.ask(stated, why, "model=llama3-8b")


def _read_overrides(reading: Reading) -> dict[str, Stated]:
    """Reads the fields behind ``--cfg-options``, as ``a.b=c``."""
    stated = reading.take("cfg_options")
    words = stated.value if stated is not None and isinstance(stated.value, list) else [stated.value if stated else ""]
    pairs = [str(word).partition("=") for word in words if "=" in str(word)]
    return name_fields({name: replace(stated, value=value, shown=name) for name, _, value in pairs if stated})


# -------------------------------------------------------------------------------------------- the job

FILES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed_zero1": {"stage": 1},
    "deepspeed_zero2": {"stage": 2},
    "deepspeed_zero3": {"stage": 3},
    "deepspeed_zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "deepspeed_zero3_offload": {
        **{"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    },
}
"""Sections ``zero_optimization`` of configs/deepspeed, all with ``overlap_comm``."""


STAGES = ("plan.zero=2", "plan.zero=3", "plan.zero=0")
"""Answers to the question what DeepSpeed shards."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    _follow_command(reading)
    count_processes(reading)
    if xtuner_v1.TRAINER in reading.stated:
        xtuner_v1.interpret(reading)
        return
    is_huggingface = reading.take_word("framework") == "huggingface"
    bits = _find_bits(reading, "model." if is_huggingface else "llm.")
    has_adapters = any(name.startswith("lora.") for name in reading.stated)
    program = PROGRAM
    if is_huggingface:  # prepare_model_for_kbit_training alone recomputes
        recomputes = has_adapters and bits < 16
        program = replace(PROGRAM, micro=8, checkpointing=recomputes, evaluation=TrainerProgram.evaluation)
    is_sharded = _read_stage(reading)
    if not is_huggingface:
        _read_formats(reading, is_sharded)
        _name_optimizer(reading)
    _ask_missing(reading)
    read_training(reading, program)
    if size := reading.take_count("sequence_parallel_size"):
        reading.set_key("plan.cp", size, "sequence_parallel_size")
        if size > 1:  # tools/train.py takes no other kernels there
            reading.set_key("plan.sequence", "ulysses", "sequence_parallel_size")
            set_attention(reading, "flash_attention_2", "sequence_parallel_size")
    _read_weights(reading, bits, has_adapters)
    if not is_huggingface:
        loop = reading.take("val_cfg.type")  # of mmengine: ValLoop, with a separate data loader
        read_evaluation(
            reading, EvaluationSettings(("val_dataloader.batch_size",), 1), loop is not None, "val_cfg.type"
        )
    _read_kind(reading)


TASKS: tuple[tuple[str, ...], ...] = (
    ("launcher.nproc_per_node",),
    ("launcher.ntasks", "launcher.sbatch_ntasks"),
    ("launcher.ntasks_per_node", "launcher.sbatch_ntasks_per_node"),
)
"""Options of launchers for processes: of a node with torchrun, of all nodes and of a node with Slurm."""

NODES = ("launcher.nnodes", "launcher.nodes", "launcher.sbatch_nodes")


def count_processes(reading: Reading) -> None:
    """Reads how many processes of a GPU each are started: by xtuner, by torchrun, or by Slurm."""
    started, total, each = (reading.take_count(*names, decisive=False) for names in TASKS)
    nodes = reading.take_count(*NODES, decisive=False) or 1
    counts = (started and started * nodes, total, each and each * nodes)
    launch = reading.file.launch
    if (count := next((count for count in counts if count), None)) is not None:
        reading.set_key("cluster.gpus", count, *(name for names in TASKS for name in names), *NODES)
    elif launch is not None and launch.entry == "xtuner train" and "launcher" not in reading.stated:
        reading.assume("cluster.gpus", nodes, "without NPROC_PER_NODE xtuner starts one process on a node")


def _find_bits(reading: Reading, prefix: str) -> int:
    """Returns the bits of a frozen weight: 4 or 8 where it is quantised."""
    config = f"{prefix}quantization_config"
    if take_on(reading, f"{config}.load_in_4bit", f"{prefix}load_in_4bit") is not None:
        return 4
    if take_on(reading, f"{config}.load_in_8bit", f"{prefix}load_in_8bit") is not None:
        return 8
    return reading.take_count(f"{config}.bits") or 16


def _read_stage(reading: Reading) -> bool:
    """Reads what DeepSpeed shards. Returns whether it runs.

    Its option is of the command: of a configuration alone it is asked for.
    """
    stated = reading.take("deepspeed")
    size = reading.stated.get("sequence_parallel_size")
    has_ranks = size is not None and str(size.value) not in ("1", "None")
    if stated is not None and not is_null(stated.value):
        _add_stage(reading, stated, str(stated.value).removesuffix(".json"))
        return True
    if reading.file.launch is not None and not has_ranks:
        return False
    stage = reading.answers.get(STAGES[0].partition("=")[0]) or ("1" if has_ranks else "0")
    if has_ranks and reading.file.launch is not None:
        why = "xtuner stops with sequence parallelism and without --deepspeed"
        reading.ask(size, why, *STAGES[:2])
    else:
        why = "the option --deepspeed of xtuner train says what is sharded, and it is not in a configuration"
        reading.ask(None, why, *STAGES)
    if stage in ("1", "2", "3"):
        _add_stage(
            reading, Stated(f"deepspeed_zero{stage}", "--deepspeed", reading.file.where), f"deepspeed_zero{stage}"
        )
    return stage in ("1", "2", "3")


def _add_stage(reading: Reading, stated: Stated, name: str) -> None:
    """Adds the settings of a file of DeepSpeed that xtuner has itself; others are companions of the launch file."""
    if (section := FILES.get(name)) is None:
        return
    if "deepspeed" in reading.stated:
        reading.stated["deepspeed_name"] = reading.stated.pop("deepspeed")
        reading.take("deepspeed_name")
    settings = flatten_settings({"overlap_comm": True, **section}, "", "")
    reading.add_stated(
        {
            f"deepspeed.zero_optimization.{key}": Stated(entry.value, f"{stated.shown} {name}, {key}", stated.place)
            for key, entry in settings.items()
        }
    )


def _read_formats(reading: Reading, is_sharded: bool) -> None:
    """Sets the switch of mixed precision: that of the wrapper of the optimizer, and with DeepSpeed bf16, where the GPU
    has it (tools/utils.py, ``auto_dtype_of_deepspeed_config``)."""
    wrapper, stated = reading.take("optim_wrapper.type"), reading.take("optim_wrapper.dtype")
    word = reading.take_word("optim_wrapper.dtype") or "float16"
    if is_sharded:
        for setting in (wrapper, stated):
            reading.ignore(setting, "DeepSpeed's configuration says the format: bf16, where the GPU has it")
        reading.stated.setdefault("bf16", Stated(True, "bf16, auto", "DeepSpeed's configuration of xtuner"))
    elif wrapper is not None and str(wrapper.value).endswith("AmpOptimWrapper"):
        name = "bf16" if word == "bfloat16" else "fp16"
        reading.stated.setdefault(name, replace(stated or wrapper, value=True))


def _name_optimizer(reading: Reading) -> None:
    """Gives an optimizer of bitsandbytes the name of the Trainer: ``paged_adamw_32bit``."""
    stated = reading.stated.get("optim")
    word = str(stated.value).rpartition(".")[2] if stated is not None else ""
    if stated is not None and (match := re.fullmatch(r"(Paged)?(AdamW|Lion)(8|32)bit", word)):
        paged = "paged_" if match[1] else ""
        reading.stated["optim"] = replace(stated, value=f"{paged}{match[2].lower()}_{match[3]}bit")


def _ask_missing(reading: Reading) -> None:
    """Asks for what a configuration takes from another that is not read."""
    if "configuration" in reading.stated or reading.file.launch is None:
        if "per_device_train_batch_size" not in reading.stated:
            reading.ask_key("batch.micro", 1, "the configuration has no batch_size of a train_dataloader")
        if "max_length" not in reading.stated:
            reading.ask_key("batch.sequence", USUAL, "the data of the configuration say how many tokens a sequence has")


def _read_weights(reading: Reading, bits: int, has_adapters: bool) -> None:
    """Reads which weights are trained, and in which format frozen ones are."""
    if has_adapters:
        stated = reading.take("lora.type", "lora.r")
        set_adapters(reading, stated, 8, ("lora.r",), "lora.target_modules", everywhere=True)
        reading.set_key("train.mode", "lora", "lora.type", "model.type")
    else:
        reading.set_key("train.mode", "full", "model.type")
    if bits < 16:
        names = [
            f"{prefix}{name}load_in_{bits}bit" for prefix in ("llm.", "model.") for name in ("quantization_config.", "")
        ]
        quantised = reading.take(*names, "llm.quantization_config.bits")
        set_quantised_weights(reading, bits, quantised)


def _read_kind(reading: Reading) -> None:
    """Reads the kind of training by the class of the model. With packed pairs a pass holds a single sequence of
    them."""
    stated = reading.take("model.type")
    kind = str(stated.value).rpartition(".")[2] if stated is not None else ""
    packed = take_on(reading, "use_varlen_attn", "model.use_varlen_attn")
    if packed is not None:
        why = "attention is forecast over whole sequences, not within the samples of each: state batch.documents"
        reading.approximate(packed, why, LONG)
        set_attention(reading, "flash_attention_2", "use_varlen_attn", "model.use_varlen_attn")
    if kind in ("DPO", "ORPO", "RewardModel") and packed is None:
        double_samples(reading, stated)
    if kind == "RewardModel":  # a v_head in place of the output layer (xtuner/model/reward.py @ v0.2)
        set_classes(reading, 1, "model.type")
    if kind == "DPO":
        set_reference(reading, stated)
    elif kind in ("LLaVAModel", "InternVL_V1_5", "OpenAIModel"):
        why = "the language model alone is forecast, without the encoder of images"
        reading.approximate(stated, why, "the forecast is too fast, and needs less memory")


CONFIGURATION_VERDICTS = list_verdicts(
    ("tokenizer* custom_hooks* default_hooks* env_cfg* visualizer log_level log_processor* randomness*", NAMES),
    ("prompt_template* template* work_dir work_dirs logger* load_from resume* seed SYSTEM system* save_every", NAMES),
    ("evaluation_* eval_* val_* test_* prompt", EVALUATION),
    ("*dataset* *data* *_path *_map_fn shuffle* pack_to_max_length sampler* dataset_name* train_dataloader.*", DATA),
    ("pack_* concat_* max_dataset_length num_workers use_varlen_attn model.use_varlen_attn max_packed_length", DATA),
    (
        "lr betas weight_decay max_norm warm*_ratio param_scheduler* optim_wrapper* momentum",
        OPTIMISATION,
    ),
    (
        "model.loss_type model.beta model.label_smoothing *_loss_type *beta label_smoothing loss_* *penalty_type",
        OPTIMISATION,
    ),
    ("lora.lora_* lora.bias lora.task_type lora.use_rslora lora.modules_to_save lora.init_lora*", OPTIMISATION),
    ("max_epochs train_cfg* training_loop*", LENGTH),
    (
        "llm.* model.type model.trust* model.torch_dtype model.load_in* model.quantization* model.pretrained_pth",
        LOADING,
    ),
    ("model.tokenizer* model.max_position* model.device_map model.reward_token* reward_token*", LOADING),
    ("checkpoint_* save_total_limit", SAVING),
    (
        "launcher.* strategy.type strategy.exclude* trainer framework launcher runner_type training_args.type",
        START,
    ),
    (
        "model.freeze_* model.visual_encoder* model.pretrained_* model.llm_lora* model.visual*",
        Approximation("the language model alone is forecast", "the forecast is too fast"),
    ),
    ("strategy*", Decision("a strategy in the configuration shards", STAGES[:2])),
)
"""On fields of configurations."""

IMPORTS = re.compile(r"^[ \t]*(from|import) xtuner\b|framework = 'huggingface'", re.MULTILINE)


ENTRIES = re.compile(r"xtuner (dist_)?train$|xtuner\.v1\.train|xtuner[/.]tools[/.]train")
"""Commands and modules that start it."""


def recognise(file: LaunchFile) -> Evidence:
    """Its command, its module, or a Python file that imports it and says what to train."""
    if file.launch is not None:
        return Evidence.CERTAIN if ENTRIES.match(file.launch.entry) else Evidence.NONE
    is_ours = file.suffix == ".py" and IMPORTS.search(file.text) is not None
    return Evidence.CERTAIN if is_ours else Evidence.NONE


XTUNER = LaunchFormat(
    "xtuner",
    "xtuner",
    ".py",
    recognise,
    read,
    interpret,
    None,
    {**xtuner_v1.TRAINER_CONFIG_VERDICTS, **CONFIGURATION_VERDICTS, **VERDICTS},
)
"""``xtuner train`` and its configurations."""

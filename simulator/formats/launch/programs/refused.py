"""Programs whose files are known and not read: each is refused by its name, never forecast as another.

Sources of entries and keys: EleutherAI/gpt-neox @ea7aefd8 (deepy.py, configs), Lightning-AI/litgpt @26857050
(config_hub), allenai/OLMo-core @fa6c5014, allenai/OLMo @0095a3f2 (configs), hpcaitech/ColossalAI @4f9953be
(examples/language), OpenRLHF/OpenRLHF @3c3be623, THUDM/slime @624b824a (scripts), huggingface/picotron @59714b1b
(template), mosaicml/llm-foundry @6ea80d30 (scripts/train/yamls), AI-Hypercomputer/maxtext @232369cc (configs),
young-geng/EasyLM @8446e740 (examples), stanford-crfm/levanter @ebee8a0b (config), facebookresearch/fairseq @99b364a2
(examples), deepspeedai/DeepSpeedExamples @45b4b715 (applications/DeepSpeed-Chat/training/step3_rlhf_finetuning),
allenai/open-instruct @e6c3044a (scripts/train), alibaba/ROLL @8eb27cc2 (examples), PrimeIntellect-ai/prime-rl @559b4477
(examples, configs), sgl-project/SpecForge @a6b6b023 (examples/configs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.launch_file import LaunchFile

CONFIGURATIONS = ("config", "config_file", "config_path")
"""Arguments that name the configuration of a program."""


@dataclass(frozen=True)
class RefusedProgram:
    """A program that is not read.

    name: as messages call it.
    entries: pattern of the scripts, modules or commands that start it.
    launchers: pattern of the commands that it alone is started by.
    arguments: names of arguments, all of which are there.
    keys: dotted keys of its files, all of which are there.
    imports: pattern of what its Python files import.
    """

    name: str
    entries: str = ""
    launchers: str = ""
    arguments: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    imports: str = ""

    def is_program_of(self, file: LaunchFile) -> bool:
        """Returns whether a file is of this program."""
        if self._starts(file) or (self.keys and all(_has_key(file.data, key) for key in self.keys)):
            return True
        is_python = bool(self.imports) and file.suffix == ".py"
        return is_python and re.search(rf"^[ \t]*(from|import) ({self.imports})\b", file.text, re.MULTILINE) is not None

    def _starts(self, file: LaunchFile) -> bool:
        """Returns whether a script starts this program, be it behind its end."""
        launch = file.launch
        if launch is None:
            is_script = file.data is None and file.suffix != ".py" and bool(self.launchers)
            return is_script and re.search(rf"^[ \t]*({self.launchers})\s", file.text, re.MULTILINE) is not None
        if self.entries and re.search(self.entries, launch.entry):
            return True
        if self.launchers and any(re.fullmatch(self.launchers, launcher.name) for launcher in launch.launchers):
            return True
        return bool(self.arguments) and self.arguments <= launch.arguments.keys()


def _has_key(data: object, key: str) -> bool:
    """Returns whether nested mappings have a dotted key."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


PRIME_RL: tuple[tuple[str, ...], ...] = (
    ("orchestrator", "trainer"),
    ("orchestrator", "inference"),
    ("eval.client", "eval.source"),
    ("data.seq_len", "data.batch_size", "model.name"),
)
"""Keys of the files of prime-rl: of reinforcement learning, of evaluations, of supervised tuning."""

REFUSED: tuple[RefusedProgram, ...] = (
    RefusedProgram("GPT-NeoX", r"(^|/)deepy\.py$", keys=frozenset({"pipe_parallel_size"})),
    RefusedProgram("GPT-NeoX", keys=frozenset({"pipe-parallel-size"})),
    RefusedProgram("LitGPT", r"^litgpt\b", keys=frozenset({"train.micro_batch_size", "out_dir"}), imports="litgpt"),
    RefusedProgram("OLMo-core", r"^olmo_core\.|(^|/)olmo_core_\w+\.py$", imports="olmo_core"),
    RefusedProgram("OpenRLHF", r"^openrlhf\.", imports="openrlhf"),
    RefusedProgram("Open-Instruct's reinforcement learning", r"(^|/)grpo_fast\.py$"),
    RefusedProgram("ROLL", keys=frozenset({"rollout_batch_size", "actor_train"}), imports="roll"),
    RefusedProgram("prime-rl", r"^prime_rl\.", imports="prime_rl"),
    *(RefusedProgram("prime-rl", keys=frozenset(keys)) for keys in PRIME_RL),
    RefusedProgram("SpecForge", keys=frozenset({"model.draft_model_config"}), imports="specforge"),
    RefusedProgram("SpecForge", keys=frozenset({"model.target_model_path"})),
    *(RefusedProgram("MaxText", keys=frozenset({key})) for key in ("ici_fsdp_parallelism", "dcn_data_parallelism")),
    RefusedProgram("slime", arguments=frozenset({"rollout_batch_size", "actor_num_nodes"}), imports="slime"),
    RefusedProgram(
        "picotron", keys=frozenset({"distributed.tp_size", "training.micro_batch_size"}), imports="picotron"
    ),
    RefusedProgram("ColossalAI", launchers="colossalai run", imports="colossalai"),
    RefusedProgram(
        "LLM Foundry", launchers="composer", keys=frozenset({"train_loader", "max_duration"}), imports="llmfoundry"
    ),
    RefusedProgram("OLMo", keys=frozenset({"model.d_model", "max_duration"}), imports="olmo"),
    RefusedProgram("MaxText", r"(?i)^maxtext\.", keys=frozenset({"base_emb_dim"}), imports="MaxText|maxtext"),
    RefusedProgram("EasyLM", r"^EasyLM\.", imports="EasyLM"),
    RefusedProgram(
        "Levanter", r"^levanter\.", keys=frozenset({"trainer.num_train_steps", "model"}), imports="levanter"
    ),
    RefusedProgram(
        "fairseq",
        r"^fairseq(_cli)?\b",
        launchers=r"fairseq-(hydra-)?train",
        keys=frozenset({"task", "criterion", "optimization", "model"}),
        imports="fairseq",
    ),
    RefusedProgram(
        "DeepSpeed-Chat's reinforcement learning",
        arguments=frozenset({"actor_model_name_or_path", "critic_model_name_or_path"}),
    ),
    RefusedProgram("DeepSpeed-Chat", imports="deepspeed_chat|dschat"),
    RefusedProgram("Unsloth", imports="unsloth"),
    RefusedProgram("Lightning", imports="lightning|pytorch_lightning"),
)
"""Programs by what starts them, by the keys of their files, or by what their Python files import."""


def find_refused(file: LaunchFile) -> RefusedProgram | None:
    """Returns the program of a file that is known and not read; of a command, also by the configuration it names."""
    arguments = file.launch.arguments if file.launch is not None else {}
    named = (file.find_companion(str(arguments[name].value)) for name in CONFIGURATIONS if name in arguments)
    files = [file, *(companion for companion in named if companion is not None)]
    return next((program for program in REFUSED for file in files if program.is_program_of(file)), None)


IDLE = re.compile(
    r"^(generat(e|ion|or)|inference|infer|eval|evaluat(e|ion|or)|preprocess|convert(er|or)?|export|merge|quantiz(e|ation)|"
    r"quantis(e|ation)|prune|serve|server|deploy|rollout|mmlu|predict|score)$"
)
"""Words in the names of scripts that train nothing."""

TRAINING = re.compile(r"train|tun(e|ing)|sft|rl|po(_|$)")
"""In the name of a script that trains, whatever else it names: ``train_generative_reranker.py``."""

TASKS = re.compile(r"(^|/)tasks/(\w+/)?main\.py$")
"""Downstream tasks of Megatron-LM: evaluations, and heads of few classes that are tuned on them."""

IDLE_MODES = ("inference", "inference-static", "inference-dynamic")
"""``MODE`` of functional tests of Megatron-LM that train nothing (shell_test_utils/run_ci_test.sh @d98e8a64)."""


def find_idle_start(file: LaunchFile) -> str | None:
    """Returns the script that a file starts, or the mode of a file of Megatron's tests, if it trains nothing: it
    generates, evaluates or converts, with flags of a training."""
    if isinstance(file.data, Mapping) and "MODEL_ARGS" in file.data:
        mode = str(file.data.get("MODE", ""))
        return f"MODE {mode}" if mode in IDLE_MODES else None
    if file.launch is None:
        return None
    if task := next((word.text for word in file.launch.command.words if TASKS.search(word.text)), None):
        return task
    name = file.launch.entry.removesuffix(".py").rpartition(".")[2].rpartition("/")[2].lower()
    is_idle = any(IDLE.search(word) for word in re.split(r"[_\W]+", name))
    return file.launch.entry if is_idle and not TRAINING.search(name) else None

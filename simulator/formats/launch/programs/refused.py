"""Programs whose files are known and not read: each is refused by its name, never forecast as another one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshcast.simulator.formats.launch.launch_file import LaunchFile


@dataclass(frozen=True)
class RefusedProgram:
    """A program that is not read.

    name: as messages call it.
    entries: pattern of the scripts, modules or commands that start it.
    keys: top-level keys of its files, all of which are there.
    text: pattern of what its Python files import.
    """

    name: str
    entries: str = ""
    keys: frozenset[str] = frozenset()
    text: str = ""

    def is_program_of(self, file: LaunchFile) -> bool:
        """Whether a file is of this program."""
        if file.launch is not None and self.entries and re.search(self.entries, file.launch.entry):
            return True
        if self.keys and self.keys <= file.keys:
            return True
        return bool(self.text and file.suffix == ".py" and re.search(self.text, file.text, re.MULTILINE))


REFUSED: tuple[RefusedProgram, ...] = (
    RefusedProgram("GPT-NeoX", r"(^|/)deepy\.py$", frozenset({"pipe_parallel_size"})),
    RefusedProgram("GPT-NeoX", "", frozenset({"pipe-parallel-size"})),
    RefusedProgram("LitGPT", r"^litgpt ", frozenset({"model_name", "train", "eval"})),
    RefusedProgram("LitGPT", "", frozenset({"checkpoint_dir", "train", "eval"})),
    RefusedProgram("OLMo-core", "", text=r"^\s*(from|import) olmo_core\b"),
    RefusedProgram("OLMo", r"(^|/)scripts/train\.py$", frozenset({"run_name", "fsdp", "max_duration", "model"})),
    RefusedProgram("ColossalAI", r"^colossalai run", text=r"^\s*(from|import) colossalai\b"),
    RefusedProgram("OpenRLHF", r"^openrlhf\."),
    RefusedProgram("slime", "", text=r"^\s*(from|import) slime\b"),
    RefusedProgram("picotron", "", frozenset({"distributed", "model", "training", "dataset", "checkpoint", "logging"})),
    RefusedProgram("LLM Foundry", r"^composer ", frozenset({"max_seq_len", "model", "train_loader", "optimizer"})),
    RefusedProgram("MaxText", r"^(MaxText|maxtext)\.", frozenset({"base_emb_dim", "run_name"})),
    RefusedProgram("Levanter", r"^levanter\."),
    RefusedProgram("DeepSpeed-Chat", "", text=r"^\s*from (deepspeed_chat|dschat)\b"),
    RefusedProgram("Unsloth", "", text=r"^\s*(from|import) unsloth\b"),
    RefusedProgram("Lightning", "", text=r"^\s*(from|import) (lightning|pytorch_lightning)\b"),
)
"""Programs by what starts them, by the keys of their files, or by what their Python files import."""


def find_refused(file: LaunchFile) -> RefusedProgram | None:
    """Returns the program of a file that is known and not read."""
    return next((program for program in REFUSED if program.is_program_of(file)), None)

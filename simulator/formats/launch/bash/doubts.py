"""What of a script depends on a test that nobody knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshcast.simulator.formats.launch.bash.grammar import Source, field_of

if TYPE_CHECKING:
    from tree_sitter import Node

_LAUNCH = re.compile(
    r"\b(torchrun|torch\.distributed|accelerate\s+launch|deepspeed|pretrain\w*\.py|train\w*\.py|finetune\w*\.py"
    r"|sft\w*\.py|swift\s+(sft|pt|rlhf)|llamafactory-cli\s+train|axolotl\s+train)"
)

_FLAG = re.compile(r"(?:^|[\s\"'(=])--?([A-Za-z][\w.-]*)")

_WITHOUT_INFLUENCE = re.compile(
    r"(no-)?(load|save|ckpt|checkpoint-(dir|path)|resume|auto-resume|data|tokenizer|vocab|merge|wandb|tensorboard|log|output|cache|dir|path"
    r"|name|master|rdzv|host|port|node-rank|rank|finetune|seed|exit|eval|test|mock|container|export|account|partition|job|v$"
    r"|volume|mount|rm$|it$|name|user|entrypoint|pretrained|image|env|p$|o$|e$|x$|f$|d$).*",
    re.IGNORECASE,
)

_PLACES = re.compile(
    r".*(ADDR|PORT|DIR|PATH|FILE|HOST|RANK|CKPT|CHECKPOINT|LOG|DATA|TOKENIZER|IMAGE|CONTAINER|ROOT|HOME|IFNAME|NCCL"
    r"|CUDA_VISIBLE|NVLINK|NVLS|PYTHON|WANDB|URL|USER|TOKEN$|CACHE|TAG|TIME|DATE|NAME|JOB|VENV|CONDA|PROJECT|FOLDER|MOUNT|IP$).*",
    re.IGNORECASE,
)
"""Names of variables that say where things are, and not what is computed."""


_SAID = re.compile(
    r"^[ \t]*(?:(?:echo|printf)\b(?:[^|>\n]|>&2)*|#.*)$|\[\[?[ \t]+(?:![ \t]+)?-[a-z][ \t][^\]\n]*\]", re.MULTILINE
)
"""Lines that print on the screen, comments, and tests of a file."""


def hides_launch(text: str) -> bool:
    """Returns whether a part of a script may start a training program; what it only prints does not."""
    return _LAUNCH.search(_SAID.sub("", text)) is not None


def find_asked(source: Source, test: str) -> Iterator[str]:
    """Yields the variables of a test that a script takes from its environment: it gives them a default, or nothing."""
    text = source.text(source.root)
    for name in dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", test)):
        has_default = re.search(rf"\$\{{{name}:?[-=]", text) is not None
        if has_default or re.search(rf"^[ \t]*(export[ \t]+)?{name}=", text, re.MULTILINE) is None:
            yield name


def find_doubtful(source: Source, node: Node) -> Iterator[str]:
    """Yields the variables that a part of a script sets to something that may change what is forecast."""
    waiting, names = [node], set()
    while waiting:
        child = waiting.pop()
        if child.type == "variable_assignment":
            name, value = source.text(field_of(child, "name")), child.child_by_field_name("value")
            if name not in names and value is not None and _decides(name, source.text(value)):
                names.add(name)
                yield name
        elif child.type != "function_definition":
            waiting += child.children


def _decides(name: str, text: str) -> bool:
    """Returns whether an assignment may change what is forecast: flags, a number or a word, no place."""
    flags = [flag[1].replace("_", "-") for flag in _FLAG.finditer(text[:10_000])]
    if flags:
        return not all(_WITHOUT_INFLUENCE.fullmatch(flag) for flag in flags)
    plain = text.strip("\"'")
    return not _PLACES.fullmatch(name) and re.fullmatch(r"[\w.,+-]+", plain) is not None

"""Reads the entries of the corpus and checks them: every fact in the words of a vocabulary, no entry twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from meshcast.hardware.documents.document import read_yaml
from meshcast.hardware.documents.explain import Strict, validate_data
from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field, model_validator

CORPUS = Path(__file__).parent / "corpus"
"""Folder of the files, a file for each program."""

PROGRAMS = (
    "accelerate",
    "axolotl",
    "colossalai",
    "deepspeed",
    "gpt-neox",
    "hf-trainer",
    "litgpt",
    "llama-factory",
    "megatron",
    "megatron-bridge",
    "megatron-deepspeed",
    "ms-swift",
    "nanotron",
    "nemo",
    "nemo-rl",
    "olmo-core",
    "openrlhf",
    "own-trainer",
    "pai-megatron-patch",
    "picotron",
    "primus",
    "slime",
    "torchtitan",
    "torchtune",
    "trl",
    "verl",
    "xtuner",
)
"""Programs by the name that a user would say; `own-trainer` is a script of the repository itself."""

ASKS = frozenset({
    "accumulate", "cluster", "command", "companion", "cp", "ep", "global", "gpus", "lora_rank",
    "micro", "mode", "model", "offload", "optimizer", "packing", "pp", "precision",
    "recompute", "schedule", "sequence", "sharding", "tp",
})  # fmt: skip
"""Names of what a reader may have to ask for; `command` where several trainings stand in a file."""

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class ExpectedShape(Strict):
    """Sizes of a model that a file states itself, in numbers of the model's description.

    Attributes:
        layers: transformer layers, without those that only predict further tokens.
        hidden: width of the residual stream.
        heads, kv_heads: heads of queries, and of keys and values.
        ffn: width of the feed-forward network, of the dense layers where there are both.
        vocab: words as stated, before padding.
        experts, top_k: routed experts a layer, and those that a token goes to.
        expert_ffn: width of a routed expert.
    """

    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    ffn: Count | None = None
    vocab: Count | None = None
    experts: Count | None = None
    top_k: Count | None = None
    expert_ffn: Count | None = None


class Facts(Strict):
    """What a file determines, with the defaults of its program; None: undetermined.

    Attributes:
        mode: which weights are trained.
        lora_rank: rank of adapters.
        gpus: GPUs of the run, where the launcher or the scheduler's lines state them.
        tp, pp, cp, ep: tensor, pipeline, context (Ulysses too) and expert ranks.
        replicate: copies of a group that shards, of hybrid sharding.
        sharding: what data-parallel ranks share out; `fsdp-grad-op` keeps the weights after the forward pass.
        offload: what lies in host memory.
        schedule, chunks: the pipeline's schedule, and model chunks a rank.
        precision: of the matrix multiplications.
        recompute: which activations are computed again; `selective-op` saves a list of operators.
        recompute_method: how `full` recomputation picks layers: `uniform` all of them in groups of `recompute_layers`,
            `block` the first `recompute_layers` of a stage, `every` each of `recompute_layers`.
        recompute_layers: see `recompute_method`.
        recompute_modules: modules that are recomputed, in the program's words.
        sequence: tokens of a sequence.
        micro: sequences a data-parallel rank and micro-batch.
        accumulate: micro-batches a step.
        batch: sequences a step (`global` in the files).
        optimizer: its family.
        packing: whether sequences are filled with several samples.
        attention: kernels of attention, where the file or its program chooses them.
        model: a name as the file writes it, or the sizes that it states.
    """

    mode: Literal["full", "lora", "qlora", "freeze"] | None = None
    lora_rank: Count | None = None
    gpus: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    replicate: Count | None = None
    sharding: Literal["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "fsdp-grad-op"] | None = None
    offload: list[Literal["optimizer", "parameters", "activations"]] | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-v", "interleaved-zb", "dualpipe-v", "looped-bfs"] | None = (
        None
    )
    chunks: Count | None = None
    precision: (
        Literal[
            "bf16", "fp16", "fp32", "fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"
        ]
        | None
    ) = None
    recompute: Literal["none", "selective", "full", "selective-op"] | None = None
    recompute_method: Literal["uniform", "block", "every"] | None = None
    recompute_layers: Count | None = None
    recompute_modules: list[Text] | None = None
    sequence: Count | None = None
    micro: Count | None = None
    accumulate: Count | None = None
    batch: Count | None = Field(default=None, alias="global")
    optimizer: Text | None = None
    packing: bool | None = None
    attention: Literal["flash", "sdpa", "eager"] | None = None
    model: ExpectedShape | Text | None = None


class PublicFile(Strict):
    """A public file and what is expected of a reader; the fields are described in the package."""

    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    path: Text
    companions: list[Text] = []
    command: str = ""
    program: Literal[PROGRAMS]  # type: ignore[valid-type]
    given: dict[Text, Any] = {}
    expect: Facts = Facts()
    asks: list[Text] = []
    refuse: str = ""
    because: str = ""
    states: Text
    states_beside: dict[Text, Text] = {}

    @property
    def name(self) -> str:
        """The file and its arguments, unique in the corpus."""
        return " ".join(word for word in (self.repository, self.path, "@", self.commit, self.command) if word)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.expect.model_fields_set or self.asks or self.refuse):
            raise ValueError("it expects nothing. Write a fact, a question or a refusal")
        if unknown := sorted(set(self.asks) - ASKS):
            raise ValueError(f"asks for {', '.join(unknown)}. Write one of {', '.join(sorted(ASKS))}")
        if asked_and_known := sorted(set(self.asks) & self.stated):
            raise ValueError(f"both asked for and expected: {', '.join(asked_and_known)}. Keep one of the two")
        if re.search(r"^/|(^|/)\.\.(/|$)", "\n".join([self.path, *self.companions]), re.MULTILINE):
            raise ValueError("a path leaves its repository. Write it from the repository's root")
        return self

    @property
    def stated(self) -> set[str]:
        """Names of the facts that are expected, as the files write them."""
        return set(self.expect.model_dump(exclude_none=True, by_alias=True))


class CorpusFile(Strict):
    """The entries about a program."""

    entries: Annotated[list[PublicFile], Field(min_length=1)]


@cache
def load_corpus(folder: Path = CORPUS) -> tuple[PublicFile, ...]:
    """Returns the entries of all files of a folder, by file name.

    Raises:
        PlanError: an entry is not valid, or stands in the corpus twice.
    """
    entries: list[PublicFile] = []
    for path in sorted(folder.glob("*.yaml")):
        entries += _read_file(path)
    _refuse_twins(entries, folder)
    return tuple(entries)


def _read_file(path: Path) -> list[PublicFile]:
    document = read_yaml(path, error=PlanError)
    return validate_data(CorpusFile, {"entries": document.data}, str(path), PlanError, document.text).entries


def _refuse_twins(entries: Sequence[PublicFile], folder: Path) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise PlanError(str(folder), f"it stands in the corpus twice: {entry.name}", "Keep one of the two")
        seen.add(entry.name)


def find_folder(folder: Path, repository: str, commit: str, paths: Sequence[str]) -> Path | None:
    """Returns the copy of a repository that holds these files, None if the folder of public files has none."""
    name = repository.replace("/", "+")
    copies = (folder / f"{name}@{commit[:12]}", folder / "by-commit" / f"{name}@{commit[:12]}", folder / name)
    return next((copy for copy in copies if all((copy / path).is_file() for path in paths)), None)

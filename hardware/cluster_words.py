"""Clusters in the words of people: ``16xH100``, ``2x8xA100-80G``, ``p5.48xlarge:2``.

Counts in front of a GPU are of GPUs, those of a machine or node are of these. What a word leaves open (the memory of an
A100, GPUs or nodes behind a colon) is asked, never guessed.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from meshcast.hardware.gpu import GPU
from meshcast.hardware.load import catalog, load
from meshcast.hardware.machines import find_machine

TIMES = r"\s*(?:[x×*]|\s)\s*"
"""What stands between a count and what is counted."""

COUNTED = re.compile(
    rf"(?:(?P<outer>[0-9]{{1,9}}){TIMES})?(?:(?P<inner>[0-9]{{1,9}}){TIMES})?(?P<name>.+)", re.ASCII | re.DOTALL
)
COUNT_BEHIND = re.compile(rf"(?P<name>.+?)(?P<by>\s*:\s*|{TIMES})(?P<count>[0-9]{{1,9}})", re.ASCII | re.DOTALL)

NOISE = frozenset(
    """nvidia amd tesla geforce instinct generation blackwell hopper server workstation edition gpu gpus tensor core
    cores oam hbm2 hbm2e hbm3 hbm3e""".split()  # noqa: SIM905
)
"""Words of a GPU's name that tell it from no other of the catalog."""

FAMILIES = frozenset({"rtx", "gtx", "pro", "ada", "ti", "sxm", "pcie", "nvl"})
"""Words of a GPU's name that alone name none."""

FORMS = re.compile(r"(?<=\d)-?(sxm[0-9]?|pcie|nvl)(?=-|\d|$)")
MEMORY = re.compile(r"([0-9]{2,3})(?:g|gb|gib)?")
MEMORY_WITHIN = 0.08
"""Relative distance at which a size in GB or GiB names a memory: drivers see less than boxes say."""


class ClusterWords(NamedTuple):
    """What words about a cluster say.

    cluster: the description, as a job may hold it; None if the words are open.
    question: what they leave open, and what to write; empty if nothing.
    """

    cluster: dict[str, object] | None
    question: str = ""


def read_cluster_words(word: str) -> ClusterWords | None:
    """Returns what words such as ``16xH100`` say; None if they name no GPU, machine or node that is known."""
    plain = word.strip().lower()[:200]
    front = COUNTED.fullmatch(plain)
    assert front is not None or not plain
    if front is None:
        return None
    counts = [int(count) for count in (front["outer"], front["inner"]) if count is not None]
    if counts and (words := _read_counted(counts, front["name"])):
        return words
    behind = COUNT_BEHIND.fullmatch(plain)
    if behind is None:
        return None
    count, name = int(behind["count"]), behind["name"]
    if ":" in behind["by"] and find_gpus(name):
        return ClusterWords(None, _ask_what_is_counted(name, count))
    return _read_counted([count], name)


def _read_counted(counts: list[int], name: str) -> ClusterWords | None:
    """Returns what counts of a name say: a count of GPUs, machines or nodes, or counts of nodes and of GPUs in each."""
    if 0 in counts:
        return None
    if len(counts) == 1:
        if machine := find_machine(name):
            return ClusterWords(machine[1].make_cluster(counts[0]))
        if name in catalog("nodes"):
            return ClusterWords({"node": name, "nodes": counts[0]})
    names = find_gpus(name)
    if len(names) > 1:
        return ClusterWords(None, _ask_which(counts, names))
    return _count_gpus(counts, names[0]) if names else None


def _count_gpus(counts: list[int], gpu: str) -> ClusterWords:
    """Returns the cluster of so many GPUs, or of so many nodes of so many GPUs: the GPU's usual nodes if they fill
    them."""
    usual = load("gpus", gpu).usual_node
    each = int(load("nodes", usual).gpus) if usual else 0
    total = counts[0] if len(counts) == 1 else counts[0] * counts[1]
    per_node = counts[1] if len(counts) == 2 else each
    if usual and per_node == each and total % each == 0:
        return ClusterWords({"node": usual, "nodes": total // each})
    if len(counts) == 2:
        return ClusterWords({"gpu": gpu, "gpus": total, "gpus_per_node": per_node})
    if usual and total < each:
        return ClusterWords({"gpu": gpu, "gpus": total})
    if usual is None:
        return ClusterWords(None, f"GPUs in a node of {gpu} are not known: write NODESxGPUSx{gpu}, such as 2x8x{gpu}")
    rule = f"{total} {gpu} do not fill nodes of {each}, as {usual} has"
    written = _write_gpus(total, gpu)
    return ClusterWords(None, f"{rule}: for {total} GPUs write {written}, or nodes x GPUs, such as 2x{each}x{gpu}")


def _write_gpus(count: int, gpu: str) -> str:
    """Returns how a job writes so many GPUs."""
    usual = load("gpus", gpu).usual_node
    fill = usual and count % int(load("nodes", usual).gpus) == 0
    return f"{count}x{gpu}" if fill else f"{{gpu: {gpu}, gpus: {count}}}"


def _ask_which(counts: list[int], names: tuple[str, ...]) -> str:
    """Returns the question which of several GPUs is meant."""
    times = "x".join(map(str, counts))
    return f"It may be {' or '.join(names)}: write {' or '.join(f'{times}x{name}' for name in names)}"


def _ask_what_is_counted(name: str, count: int) -> str:
    """Returns the question whether a count behind the colon of a GPU is of GPUs or of nodes."""
    names = find_gpus(name)
    usual = [(gpu, node) for gpu in names if (node := load("gpus", gpu).usual_node)]
    gpus = " or ".join(_write_gpus(count, gpu) for gpu in names)
    nodes = " or ".join(dict.fromkeys(f"{node}:{count}" for _, node in usual))
    filled = [(gpu, node, each) for gpu, node in usual if count % (each := int(load("nodes", node).gpus)) == 0]
    as_nodes = " or ".join(f"{count} {gpu} are {node}:{count // each}" for gpu, node, each in filled)
    whole = f": {as_nodes}" if filled else ""
    written = f"for {count} GPUs write {gpus}" + (f", for {count} nodes {nodes}" if nodes else "")
    return f"Nodes are counted, not GPUs{whole}; {written}"


def find_gpus(word: str) -> tuple[str, ...]:
    """Returns the GPUs of the catalog that a word may name: none, one, or several if it leaves the memory or the kind
    open. Of several forms of a GPU that the word does not tell apart, that on a board of NVLink is meant."""
    if (plain := word.strip().lower()) in catalog("gpus"):
        return (plain,)
    parts, memory = _split_gpu(word)
    if not parts - FAMILIES:
        return ()
    names = [name for name in catalog("gpus") if parts <= _split_gpu(name)[0]]
    if memory:
        names = [name for name in names if _has_memory(load("gpus", name), memory)]
    if not parts & {"sxm", "pcie", "nvl"} and (boards := [name for name in names if "sxm" in _split_gpu(name)[0]]):
        names = boards
    shortest = min((name.count("-") for name in names), default=0)
    return tuple(name for name in names if name.count("-") == shortest)


@cache
def _split_gpu(name: str) -> tuple[frozenset[str], int]:
    """Returns the parts of a GPU's name without noise, and its memory in GB, 0 if it is not named."""
    plain = re.sub(r"[\s_/-]+", "-", name.strip().lower())
    plain = re.sub(r"(?<=\d)-(?=gi?b\b)", "", plain)
    plain = re.sub(r"\b(rtx|gtx)(?=a?\d)", r"\1-", plain)
    plain = re.sub(r"(?<=\d)(ti|ada)\b", r"-\1", FORMS.sub(r"-\1-", plain))
    parts = [re.sub("^sxm[0-9]$", "sxm", part) for part in plain.split("-") if part and part not in NOISE]
    sizes = [part for part in parts[1:] if MEMORY.fullmatch(part)]
    memory = int(MEMORY.fullmatch(sizes[0])[1]) if sizes else 0  # type: ignore[index]
    return frozenset(parts) - frozenset(sizes), memory


def _has_memory(gpu: GPU, size: int) -> bool:
    """Returns whether a GPU has a memory of about `size` GB or GiB."""
    return any(abs(float(gpu.memory) / unit / size - 1) < MEMORY_WITHIN for unit in (1e9, 2**30))

"""Descriptions of hardware: GPUs, links, nodes and clusters, with units and sources.

`load_cluster` understands every way of naming a cluster; the catalog lies in ``hardware/catalog``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshcast.hardware.documents.import_time  # before all others of meshcast  # noqa: F401

# isort: split
from meshcast.hardware.cluster import MAX_GPUS, Cluster, Tier
from meshcast.hardware.errors import CatalogError, nearest, shorten
from meshcast.hardware.gpu import GPU
from meshcast.hardware.inline import ByGPU
from meshcast.hardware.link import Link
from meshcast.hardware.load import (
    FILES,
    Document,
    Fact,
    Value,
    catalog,
    explain,
    line_of,
    list_statuses,
    load,
    read_yaml,
    validate_data,
)
from meshcast.hardware.mixed import ByGroups
from meshcast.hardware.node import Node
from meshcast.hardware.plugins import list_plugins, with_installed
from meshcast.hardware.reliability import CheckpointStore, Reliability
from meshcast.hardware.schemas import import_validation_error
from meshcast.hardware.shared import shared_instance
from meshcast.hardware.topology import Parts, Reach, reach

__all__ = [
    "GPU",
    "CatalogError",
    "Cluster",
    "Fact",
    "Link",
    "Node",
    "Parts",
    "Reach",
    "Reliability",
    "CheckpointStore",
    "Tier",
    "Value",
    "catalog",
    "clusters",
    "gpus",
    "links",
    "load",
    "load_cluster",
    "nodes",
    "reach",
]


def gpus() -> tuple[str, ...]:
    """Returns the names of the catalog's GPUs."""
    return catalog("gpus")


def links() -> tuple[str, ...]:
    """Returns the names of the catalog's links and network ports."""
    return catalog("links")


def nodes() -> tuple[str, ...]:
    """Returns the names of the catalog's nodes."""
    return catalog("nodes")


def clusters() -> tuple[str, ...]:
    """Returns the names of the catalog's clusters."""
    return catalog("clusters")


@with_installed
def load_cluster(spec: Any, where: str = "cluster", base: Path | str = ".") -> Cluster:
    """Returns the cluster that `spec` describes. Raises a CatalogError for any mistake in it.

    Equal descriptions give the same object, files included: they are read every time, for they may have changed.

    Args:
        spec: ``dgx-h100:64`` (node : number of nodes), ``16xH100`` (GPUs), ``p5.48xlarge:2`` (machines of a cloud), a
            name of the catalog, the path of a YAML file, or a mapping:
            ``{node: dgx-h100, nodes: 64}``, ``{gpu: h100-sxm, gpus: 128, gpus_per_node: 8, scale_up_domain: 8,
            inter: {kind: infiniband, gbps_per_gpu: 400}}`` or ``{groups: [{node: dgx-h100, nodes: 4}, ...]}``.
        where: what errors call `spec`.
        base: folder that a relative path starts from.
    """
    if isinstance(spec, Cluster):
        return spec
    if isinstance(spec, Mapping):
        return _cluster_of_mapping(Document(dict(spec), "", where))
    if isinstance(spec, Path):
        return _cluster_of_mapping(read_yaml(Path(base) / spec, str(spec)))
    if not isinstance(spec, str):
        rule = "a cluster is a name, a path or a mapping"
        raise CatalogError(where, rule, "Write it like dgx-h100:64 or {node: dgx-h100, nodes: 64}", spec)
    word = spec.strip()
    if word in clusters():
        cluster: Cluster = load("clusters", word)
        return cluster
    if word.endswith((".yaml", ".yml", ".json")) or "/" in word:
        if not os.path.exists(Path(base) / word):  # False, too, for what no file can be called
            rule = f"no such file, looked for from {Path(base).resolve()}"
            raise CatalogError(where, rule, "Give the path of a YAML file, or a name like dgx-h100:64", spec)
        return _cluster_of_mapping(read_yaml(Path(base) / word, word))
    node, _, count = word.partition(":")
    if node in nodes():
        return _cluster_of_nodes(node, count, where, spec)
    return _cluster_of_words(word, where, spec)


def _cluster_of_nodes(node: str, count: str, where: str, spec: str) -> Cluster:
    if not re.fullmatch("[0-9]+", count, re.ASCII) or not int(count[:20]):
        rule = "the number of nodes is a whole number above 0"
        raise CatalogError(where, rule, f"Write it like {node}:64", spec)
    if len(count) > 20 or int(count) * int(load("nodes", node).gpus) > MAX_GPUS:
        raise CatalogError(where, f"more than {MAX_GPUS:,} GPUs", "Write fewer nodes", spec)
    data = {"name": f"{node}:{int(count)}", "node": node, "nodes": int(count)}
    return shared_instance(_find_kind(data), data, lambda: validate_data(Cluster, data, where))


def _cluster_of_words(word: str, where: str, spec: str) -> Cluster:
    """Returns the cluster that words such as ``16xH100`` name, which lists under `assumed` what they were taken for.

    Raises CatalogError for words that leave something open, and for those that name nothing.
    """
    from meshcast.hardware.cluster_words import read_cluster_words  # few jobs name their cluster so

    words = read_cluster_words(word)
    if words is None:
        if ":" in word:
            node = word.partition(":")[0]
            raise CatalogError(where, f"no node {shorten(node)} in the catalog", nearest(node, nodes()), spec)
        raise CatalogError(where, "no such cluster", f"{_suggest_cluster(word)}, or give the path of a YAML file", spec)
    if words.cluster is None:
        raise CatalogError(where, "it does not say which cluster", words.question, spec)
    if "node" in words.cluster:
        return _note_words(word, load_cluster("{node}:{nodes}".format(**words.cluster), where))
    return _note_words(word, _cluster_of_mapping(Document(words.cluster, "", where)))


def _note_words(word: str, cluster: Cluster) -> Cluster:
    """Returns the cluster with what the words were taken for among what was filled in."""
    parts = f"{cluster.gpus:,} {cluster.gpu.name} in nodes of {cluster.gpus_per_node}"
    assumed = (f"cluster: {word!r} is read as {cluster.name}: {parts}", *cluster.assumed)
    return shared_instance((Cluster, cluster), assumed, lambda: cluster.model_copy(update={"assumed": assumed}))


def _suggest_cluster(word: str) -> str:
    """Returns what to write for a word that is no cluster: a count of the machine or GPU that it names, or near
    names."""
    from meshcast.hardware.cluster_words import find_gpus
    from meshcast.hardware.machines import find_machine

    if machine := find_machine(word):
        return f"It is a machine of a cloud, without a count: write {machine[0]}:1 for a single machine"
    if names := find_gpus(word):
        usual = [node for gpu in names if (node := load("gpus", gpu).usual_node)]
        kinds = f"{' or '.join(names)} is a GPU{f'; its usual node is {usual[0]}' if len(usual) == 1 else ''}"
        written = [f"write 16x{names[0]} for 16 GPUs", *(f"{node}:8 for 8 nodes" for node in usual[:1])]
        return f"{kinds}; {', '.join(written)}"
    close = difflib.get_close_matches(word.lower(), [*clusters(), *(f"{name}:8" for name in nodes())], 3, 0.5)
    meant = "Write nodes and their number, like dgx-a100:COUNT"
    if close:
        meant = f"Did you mean {close[0]!r}? Valid: {', '.join(close)}, ..."
    return f"{meant}; meshcast list clusters and meshcast list nodes show all"


def _cluster_of_mapping(document: Document) -> Cluster:
    """Returns the cluster of a mapping, in any of its forms."""
    return shared_instance(_find_kind(document.data), document.data, lambda: _read(document))


def _find_kind(data: Any) -> object:
    """Returns what kind of cluster is shared by equal descriptions: where files of the user are read, by these."""
    return (Cluster, list_statuses()) if list_plugins() or _names_files(data) else Cluster


def _names_files(data: Any) -> bool:
    """Returns whether a cluster takes a part of it from a file of the user, which may change."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return any(map(_names_files, inner)) or (isinstance(data, str) and data.endswith(FILES))


FORMS: tuple[tuple[set[str], type[ByGPU] | type[ByGroups], str], ...] = (
    ({"groups"}, ByGroups, "a cluster has either `groups` of nodes or one `node`"),
    ({"gpu", "gpus_per_node", "scale_up_domain", "inter"}, ByGPU, "a cluster has either a `node` or a `gpu`"),
)
"""Keys that identify a form of description, its model, and the rule that forbids other forms beside it."""


def _read(document: Document) -> Cluster:
    data, text, where = document
    keys = data.keys() if isinstance(data, dict) else set()
    form, rule = next(((model, rule) for form_keys, model, rule in FORMS if form_keys & keys), (None, ""))
    if form is None:
        return validate_data(Cluster, data, where, text=text)
    if both := {"node", "nodes"} & keys:
        place = f"{where}:{line_of(text, (min(both),))} {min(both)}" if text else f"{where}.{min(both)}"
        raise CatalogError(place, rule, "Keep {node, nodes}, {gpu, gpus} or {groups}")
    described = validate_data(form, data, where, text=text)
    try:
        return described.cluster()
    except CatalogError:
        raise
    except import_validation_error() as e:  # by a rule of Node or Cluster
        error = explain(e, f"{where} " if text else where)
        raise CatalogError(error.where.strip(), error.rule, error.remedy) from None
    except ValueError as e:
        rule, _, remedy = str(e).partition(". ")
        raise CatalogError(where, rule, remedy or "Correct the values") from None

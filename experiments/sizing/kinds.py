"""Kinds of nodes that a training may run on, each with its price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.experiments.sizing.options import SizeOptions
from meshcast.hardware import load_cluster
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.prices import NodePrice, PriceList, list_prices
from meshcast.hardware.records import dataclass


@dataclass(frozen=True)
class SizedNode:
    """A kind of node.

    name: as the user calls it.
    cluster: of a single node.
    written: cluster of the job of which this is the node; None: `name` is that of a node or a machine.
    price: None: unknown.
    """

    name: str
    cluster: Cluster
    written: Any
    price: NodePrice | None

    @property
    def gpus_per_node(self) -> int:
        return self.cluster.gpus

    def describe(self, nodes: int) -> Any:
        """Returns the cluster of so many nodes as a job states it."""
        if not isinstance(self.written, Mapping):
            return f"{self.name}:{nodes}"
        return _resize(self.written, nodes, self.gpus_per_node)


def _resize(written: Mapping[str, Any], nodes: int, gpus_per_node: int) -> dict[str, Any]:
    if "nodes" in written or "gpus" not in written:
        return {**written, "nodes": nodes}
    return {**written, "gpus": nodes * gpus_per_node}


def list_kinds(
    options: SizeOptions, cluster: Any, folder: Path, price: float | None, of_command: bool
) -> tuple[SizedNode, ...]:
    """Returns the kinds of nodes of a question: those of the options, else that of the cluster of the job.

    cluster: as the job states it; None: it does not. price: of a GPU and hour by the job. Raises PlanError for none,
    for two of the same name, and for prices of others.
    """
    flag = "--node" if of_command else "node"
    words = list(options.node)
    kinds: list[tuple[str, Cluster, Any]] = [(word, load_cluster(f"{word}:1", flag), None) for word in words]
    if not kinds:
        if cluster is None:
            raise PlanError(flag, "no kind of node is stated", f"Write {flag} hgx-h200 {flag} dgx-b200", None)
        kinds = [read_cluster(cluster, folder, flag)]
    for name in {word for word in words if words.count(word) > 1}:
        raise PlanError(flag, "it is stated twice", "Leave one out", name)
    stated = _read_prices(options, of_command)
    lists = _read_file(options.prices)
    unknown = [name for name in stated if name not in {name for name, _, _ in kinds}]
    if unknown:
        raise PlanError(
            "--price" if of_command else "price",
            "no such kind of node is asked for",
            f"Add {flag} {unknown[0]}",
            unknown[0],
        )
    priced = []
    for name, single, written in kinds:
        known = lists.get(name) or lists.get(single.node.name) or next(iter(list_prices(single.node.name)), None)
        if price is not None:
            known = NodePrice(price, "run.price_per_gpu_hour of the job")
        priced.append(SizedNode(name, single, written, stated.get(name, known)))
    return tuple(priced)


def read_cluster(written: Any, folder: Path, flag: str) -> tuple[str, Cluster, Any]:
    """Returns name, cluster of a single node, and words of the cluster of a job."""
    whole = load_cluster(written, base=folder)
    if whole.groups:
        rule = "a cluster of several kinds of nodes has no size"
        raise PlanError("cluster", rule, f"Name one kind of node with {flag}", None)
    if isinstance(written, Mapping):
        single = load_cluster(_resize(written, 1, whole.gpus_per_node), base=folder)
        return whole.node.name, single, dict(written)
    name, colon, _ = str(written).rpartition(":")
    if not colon:
        raise PlanError("cluster", "it states no number of nodes", f"Name a kind of node with {flag}", written)
    return name, load_cluster(f"{name}:1", base=folder), None


def _read_prices(options: SizeOptions, of_command: bool) -> dict[str, NodePrice]:
    """Returns the prices that options state, by kind of node."""
    prices = {}
    flag = "--price" if of_command else "price"
    for word in options.price:
        name, _, number = word.partition("=")
        prices[name.strip()] = NodePrice(_read_price(number, flag, word), "as stated")
    return prices


def _read_price(number: Any, where: str, word: Any) -> float:
    try:
        price = float(number)
    except (TypeError, ValueError):
        price = math.nan
    if not 0 < price < 1e9 or isinstance(number, bool):
        raise PlanError(where, "it is the price of a GPU and hour by kind of node", "Write hgx-h200=2.50", word)
    return price


def _read_file(path: Path | None) -> dict[str, NodePrice]:
    """Returns the lowest price of each kind of node in a file: ``NODE: PRICE``, or a list like those of the catalog."""
    if path is None:
        return {}
    data, text, where = read_yaml(path, str(path), PlanError)
    if isinstance(data, dict) and "offers" in data:
        seller = validate_data(PriceList, {"name": path.stem, "title": path.stem, **data}, where, PlanError, text=text)
        names = dict.fromkeys(offer.node for offer in seller.offers)
        return {name: list_prices(name, (seller,))[0] for name in names}
    if not isinstance(data, dict):
        raise PlanError(str(path), "prices are a mapping of kinds of nodes", "Write hgx-h200: 2.50", data)
    return {
        str(name): NodePrice(_read_price(price, f"{path} {name}", price), str(path)) for name, price in data.items()
    }

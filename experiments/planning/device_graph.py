"""Graphs for placement on accelerators and CPUs: colour classes, and what pieces cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph, find_contained


class DeviceGraph:
    """A graph whose nodes of equal colour share a device (Tarnawski et al. 2020, arXiv 2006.16423).

    nodes: the graph of all nodes, with figures ``accelerator``, ``cpu``, ``send`` [s], ``bytes`` and, optionally,
        ``colour``, ``is_backward`` and ``supported``.
    groups: the graph of colour classes, by the edges between their forward nodes; classes on a cycle are merged.
    members: which nodes every group has [groups, nodes].
    Raises ValueError for a colour with backward nodes only, which has no place in the forward order.
    """

    def __init__(self, nodes: LayerGraph) -> None:
        self.nodes = nodes
        count = len(nodes.names)
        backward = nodes.figures.get("is_backward", np.zeros(count)).astype(bool)
        colours = nodes.figures.get("colour", np.arange(count)).astype(int)
        if orphans := sorted(set(colours[backward]) - set(colours[~backward])):
            raise ValueError(f"colour {orphans[0]} has backward nodes only: give a forward node its colour")
        forward = [(a, b) for a, b in nodes.edges if not backward[a] and not backward[b]]
        group_of = _merge_cycles(colours, forward)
        names = sorted(set(group_of))
        place = {name: number for number, name in enumerate(names)}
        at = np.array([place[group] for group in group_of])
        self.members = at[None, :] == np.arange(len(names))[:, None]
        edges = {(int(at[a]), int(at[b])) for a, b in forward if at[a] != at[b]}
        self.groups = LayerGraph([f"group {name}" for name in names], edges, {})
        self.readers = np.zeros((count, count), np.float32)
        for source, target in nodes.edges:
            self.readers[source, target] = 1.0

    def loads(self, ideals: np.ndarray, memory: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of the piece between ideals a and b on an accelerator and on a CPU [ideals, ideals];
        infinite where a is no part of b, and on accelerators where it needs more memory or a node is not supported."""
        sets = (ideals.astype(np.int32) @ self.members.astype(np.int32)) > 0
        inside = find_contained(ideals)
        accelerator, cpu = np.full(inside.shape, np.inf), np.full(inside.shape, np.inf)
        figures = self.nodes.figures
        for after in range(len(ideals)):
            before = np.flatnonzero(inside[:, after])
            pieces = sets[after][None] & ~sets[before]
            cpu[before, after] = pieces @ figures["cpu"]
            accelerator[before, after] = self.accelerator_seconds(pieces, memory)
        return accelerator, cpu

    def accelerator_seconds(self, pieces: np.ndarray, memory: float) -> np.ndarray:
        """Returns the seconds of sets of nodes on an accelerator, transfers included [pieces, nodes] -> [pieces]: every
        output that crosses the border of the set is sent once, in or out."""
        figures = self.nodes.figures
        inside = pieces.astype(np.float32) @ self.readers.T
        all_readers = self.readers.sum(axis=1)
        crosses = np.where(pieces, inside < all_readers, inside > 0)
        seconds = pieces @ figures["accelerator"] + crosses @ figures["send"]
        supported = figures.get("supported", np.ones(len(self.nodes.names)))
        fits = (pieces @ figures["bytes"] <= memory) & ~(pieces & (supported == 0)).any(axis=1)
        return np.where(fits, seconds, np.inf)

    def write_pieces(self, groups: Iterable[np.ndarray | list[int]], accelerators: int) -> list[dict[str, Any]]:
        """Returns the nodes of every device that has some, accelerators first. groups: of every device."""
        nodes = [np.flatnonzero(self.members[held].any(axis=0)).tolist() for held in groups]
        kinds = ("accelerator" if device < accelerators else "cpu" for device in range(len(nodes)))
        return [{"device": kind, "nodes": held} for kind, held in zip(kinds, nodes, strict=True) if held]


def _merge_cycles(colours: np.ndarray, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the colour class of every node, where classes that reach each other are merged."""
    classes = sorted({int(colour) for colour in colours})
    reach = {colour: {colour} for colour in classes}
    pairs = {(int(colours[a]), int(colours[b])) for a, b in edges if colours[a] != colours[b]}
    grown = True
    while grown:
        grown = False
        for source, target in pairs:
            if not reach[target] <= reach[source]:
                reach[source] |= reach[target]
                grown = True
    return [min(other for other in reach[colour] if colour in reach[other]) for colour in map(int, colours)]

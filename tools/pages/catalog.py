"""The catalog as a page of documentation: every value with its unit, its kind and its source.

``python -m tools.pages.catalog docs/catalog.md`` writes it (``make docs-catalog``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshcast.experiments.render.markdown import escape_text, render_table
from meshcast.experiments.views.table import Table
from meshcast.hardware.cluster import Cluster, Level
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.load import Fact, Value, catalog, load
from meshcast.hardware.reliability import CheckpointStore, Reliability
from meshcast.hardware.sourced_values import DEVICES, sourced_values

HEAD = """# The catalog

Made by `make docs-catalog` from the files in `hardware/catalog/`; do not edit it. Values are written as in those files.
A small number names the line of [Sources](#sources) that says where a value comes from and of which kind it is:
**peak** (the maker's figure), **measured**, **fitted** or **assumed**. FLOP/s are dense, rates of links are those of
one direction. [Assumed values](#assumed-values) are listed once more at the end.
"""

SECTIONS: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        "GPUs",
        "gpus",
        [
            ("architecture", "architecture"),
            ("compute capability", "compute_capability"),
            ("memory", "memory"),
            ("for programs", "usable"),
            ("memory bandwidth", "memory_bandwidth"),
            ("last-level cache", "l2"),
            ("multi&shy;processors", "multiprocessors"),
            ("clock", "clock"),
            ("power", "power"),
            ("scale-up link", "scale_up"),
            ("link to the host", "host"),
            ("peer access over PCIe", "peer_access"),
            ("usual node", "usual_node"),
        ],
    ),
    (
        "Peak FLOP/s of GPUs",
        "gpus",
        [(form, f"peak.{form}") for form in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")],
    ),
    (
        "Links and network ports",
        "links",
        [
            ("", "title"),
            ("family", "family"),
            ("rate of one link or port", "rate"),
            ("links per GPU or adapter", "links"),
            ("latency", "latency"),
            ("payload", "payload"),
        ],
    ),
    (
        "Nodes",
        "nodes",
        [
            ("", "title"),
            ("GPU", "gpu"),
            ("GPUs", "gpus"),
            ("scale-up link", "scale_up.link"),
            ("switched", "scale_up.switched"),
            ("links between two GPUs", "scale_up.mesh"),
            ("axes of a torus", "scale_up.torus"),
            ("GPUs of a domain", "scale_up.domain"),
            ("rate of its links", "scale_up.rate"),
            ("network port", "nics.link"),
            ("ports", "nics.count"),
            ("rails", "nics.rail_optimised"),
            ("peer access over PCIe", "peer_access"),
            ("through the memory of the host", "staging"),
            ("copies of a program's own to peers", "peer_copies"),
            ("memory of the host", "host.memory"),
            ("its size", "host.capacity"),
            ("links to the host", "host.uplinks"),
            ("disks, reading", "host.read"),
            ("disks, writing", "host.write"),
            ("their size", "host.disk_capacity"),
        ],
    ),
)
"""Title, folder and columns (head, path of the field) of each table."""


def page() -> str:
    """Returns the page as Markdown."""
    sources: dict[str, int] = {}
    parts = [HEAD]
    for title, kind, columns in SECTIONS:
        parts += [f"## {title}\n", _table(kind, columns, sources), *_notes(kind, columns)]
    parts += ["## Clusters\n", _clusters(), "## Machines of clouds\n", _machines(sources)]
    parts += ["## Reliability\n", _reliability(sources), "## Stores of checkpoints\n", _stores(sources)]
    listed = "\n".join(f"{number}. {text}" for text, number in sources.items())
    parts += ["## Sources\n", listed + "\n", "## Assumed values\n", _assumed_rows()]
    return "\n".join(parts)


def at(model: Any, path: str) -> Any:
    """Returns the field at `path`; None where there is none."""
    for name in path.split("."):
        model = model.get(name) if isinstance(model, dict) else getattr(model, name, None)
    return model


def _table(kind: str, columns: Sequence[tuple[str, str]], sources: dict[str, int]) -> str:
    used = [(head, path) for head, path in columns if any(at(load(kind, name), path) for name in catalog(kind))]
    rows = [[f"`{name}`", *(_cell(at(load(kind, name), path), sources) for _, path in used)] for name in catalog(kind)]
    return render_table(Table(kind.removesuffix("s").replace("gpu", "GPU"), *(head for head, _ in used), rows=rows))


def _cell(item: Any, sources: dict[str, int]) -> str:
    if isinstance(item, Value | Fact):
        source = f"{item.kind}: {_source(item)}"
        return f"{_text(item)} <sup>{sources.setdefault(source, len(sources) + 1)}</sup>"
    return "" if item is None else f"`{item.name}`" if isinstance(item, DEVICES) else escape_text(item)


def _text(item: Value | Fact) -> str:
    if isinstance(item, Value):
        return escape_text(item.text)
    if isinstance(item.value, bool):
        return "yes" if item.value else "no"
    rows = [" ".join(map(str, row)) for row in item.value] if isinstance(item.value, tuple) else [item.value]
    return "<br>".join(map(escape_text, rows))


def _source(item: Value | Fact) -> str:
    page_ = getattr(item, "page", None)
    page_of, read = f", page {page_}" if page_ else "", f" (read on {item.checked})" if item.checked else ""
    return escape_text(f"{item.source}{page_of}{read}")


def _notes(kind: str, columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    paths = {path: head for head, path in columns}
    lines = [
        f"- `{name}`, {paths[path] or path}: {escape_text(item.note)}\n"
        for name in catalog(kind)
        for path, item in sourced_values(load(kind, name))
        if item.note and path in paths
    ]
    lines += [
        f"- `{name}`: {escape_text(load(kind, name).note)}\n"
        for name in catalog(kind)
        if "title" in paths and load(kind, name).note
    ]
    if lines:
        yield "".join(lines)


def _clusters() -> str:
    rows = []
    for name in catalog("clusters"):
        cluster: Cluster = load("clusters", name)
        levels = [_level(level) for level in cluster.fabric.joins]
        counts = [f"{cluster.nodes:,}", f"{cluster.gpus:,}"]
        rows.append(
            [
                *(f"`{name}`", escape_text(cluster.title), f"`{cluster.node.name}`", *counts),
                *("<br>".join(levels), escape_text(cluster.source)),
            ]
        )
    return render_table(Table("cluster", "", "node", "nodes", "GPUs", "levels of the fabric", "source", rows=rows))


def _reliability(sources: dict[str, int]) -> str:
    """Failures of every component of an entry, and the times after a failure."""
    rows = []
    for name in catalog("reliability"):
        entry: Reliability = load("reliability", name)
        for component, item in entry.components.items():
            counted = f"{_cell(item.failures, sources)} of {_cell(item.units, sources)}" if item.failures else ""
            hours = f"{entry.mtbf(component) / 3600:,.0f}"
            stated = _cell(item.mtbf, sources) or _cell(entry.observed, sources)
            rows.append([f"`{name}`", f"`{component}`", item.per, counted, stated, hours, item.loses])
        after = {"detection": entry.detection, "scheduling": entry.scheduling, "warm-up": entry.warm_up}
        after["repair"] = entry.repair
        rows.append(
            [
                f"`{name}`",
                escape_text(entry.title),
                "",
                "",
                ", ".join(f"{n} {_cell(v, sources)}" for n, v in after.items()),
                "",
                "",
            ]
        )
    heads = ["entry", "component", "per", "failures of units", "observed for, or mean time", "MTBF of one [h]", "loses"]
    return render_table(Table(*heads, rows=rows))


def _stores(sources: dict[str, int]) -> str:
    rows = []
    for name in catalog("stores"):
        store: CheckpointStore = load("stores", name)
        rates = [_cell(rate, sources) for rate in (store.write, store.read, store.per_node, store.nodes)]
        rows.append([f"`{name}`", escape_text(store.title), *rates])
    return render_table(Table("store", "", "writing", "reading", "one node", "rates are of nodes", rows=rows))


def _machines(sources: dict[str, int]) -> str:
    rows = []
    for cloud in catalog("machines"):
        for group in load("machines", cloud).groups:
            read = f" (read on {group.checked})" if group.checked else ""
            number = sources.setdefault(escape_text(f"{group.kind}: {group.source}{read}"), len(sources) + 1)
            for name, machine in group.machines.items():
                same = f"node `{machine.node}`" if machine.node else f"{machine.gpus} x `{machine.gpu}`"
                rate = f"{escape_text(machine.network)}, {machine.gbps:g} Gb/s" if machine.gbps else ""
                rows.append(
                    [escape_text(load("machines", cloud).title), f"`{name}`", f"{same} <sup>{number}</sup>", rate]
                )
    return render_table(Table("cloud", "machine", "taken for", "network", rows=rows))


def _level(level: Level) -> str:
    """Returns a level of a fabric: how many nodes it joins, and what it passes."""
    nodes = " + ".join(map(str, level.blocks)) if level.blocks else level.nodes or "all"
    if level.link is None:
        return f"{nodes} nodes, {level.oversubscription:g} : 1"
    return f"{nodes} nodes, by {f'{level.links} x ' if level.links > 1 else ''}`{level.link.name}`"


def _assumed_rows() -> str:
    rows = [
        [f"`{kind}/{name}`", f"`{path}`", _text(item), escape_text(item.source)]
        for kind in ("gpus", "links", "nodes", "reliability", "stores")
        for name in catalog(kind)
        for path, item in sourced_values(load(kind, name))
        if item.kind == "assumed"
    ]
    return render_table(Table("file", "field", "value", "why", rows=rows))


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), page())

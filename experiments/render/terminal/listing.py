"""``meshcast list``: rows and tables of the GPUs, nodes, clusters, models, schemes and frameworks that jobs name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Format, Table, Wrap
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.units import GIB

if TYPE_CHECKING:
    from meshcast.simulator.models.model import Model

Row = dict[str, Any]


def gpus() -> list[Row]:
    """Returns GPUs of the catalog, in SI units."""
    from meshcast import hardware

    rows = []
    for name in hardware.gpus():
        gpu = hardware.load("gpus", name)
        rows.append(
            {
                "name": name,
                "title": gpu.title,
                "architecture": gpu.architecture,
                "memory_bytes": float(gpu.memory),
                "memory_bytes_per_s": float(gpu.memory_bandwidth),
                **{f"{key}_flop_per_s": _float(gpu.peak.get(key)) for key in ("fp16", "bf16", "fp8", "fp4")},
                "scale_up": gpu.scale_up,
                "host": gpu.host.name,
                "usual_node": gpu.usual_node,
            }
        )
    return rows


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def nodes() -> list[Row]:
    """Returns nodes of the catalog."""
    from meshcast import hardware

    rows = []
    for name in hardware.nodes():
        node = hardware.load("nodes", name)
        nics = node.nics
        rows.append(
            {
                "name": name,
                "title": node.title,
                "gpu": node.gpu.name,
                "gpus": int(node.gpus),
                "scale_up": node.scale_up.link.name if node.scale_up else None,
                "domain": node.domain,
                "switched": node.scale_up.switched.value if node.scale_up else None,
                "host": node.gpu.host.name,
                "network": nics.link.name if nics else None,
                "ports": int(nics.count) if nics else 0,
                "network_bytes_per_s_per_gpu": nics.link.bandwidth * nics.count / node.gpus if nics else None,
            }
        )
    return rows


def clusters() -> list[Row]:
    """Returns clusters of the catalog, and ``NODE:COUNT`` for every node: a cluster of any number of these."""
    from meshcast import hardware

    rows: list[Row] = []
    for name in hardware.clusters():
        cluster = hardware.load_cluster(name)
        rows.append(
            {
                "name": name,
                "title": cluster.title,
                "node": cluster.node.name,
                "nodes": cluster.nodes,
                "gpus": cluster.gpus,
            }
        )
    for name in hardware.nodes():
        title = f"any number of {hardware.load('nodes', name).title or name}"
        rows.append({"name": f"{name}:COUNT", "title": title, "node": name, "nodes": None, "gpus": None})
    return rows


def models() -> list[Row]:
    """Returns presets of models."""
    from meshcast.simulator.models.load import load_model, presets

    keys = ("parameters", "active_parameters", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    rows = []
    for name in presets():
        model = load_model(name)
        rows.append(
            {
                "name": name,
                **{key: getattr(model, key) for key in keys},
                "sequence": model.seq,
                "blocks": ", ".join(_blocks(model)) or None,
            }
        )
    return rows


def ids() -> list[Row]:
    """Returns ids of the Hugging Face hub with the preset, or the id, whose shape they have, and its source."""
    from meshcast.simulator.models.hub import hub_files, hub_models
    from meshcast.simulator.models.load import find_model, model_source

    rows = []
    for maker in hub_files():
        for name in hub_models(maker):
            shape = find_model(name) or name
            rows.append({"name": name, "shape": None if shape == name else shape, "source": model_source(shape)})
    return rows


def _blocks(model: Model) -> list[str]:
    """Returns the names the parts of a model other than plain attention and MLPs, in the words of its fields."""
    moe, blocks = model.moe, []
    if moe:
        shared = f" + {moe.shared_experts}" if moe.shared_experts else ""
        blocks.append(f"{moe.top_k} of {' or '.join(map(str, moe.expert_counts))} experts{shared}")
    blocks += [f"branches {', '.join(f'{branch.name} of {branch.layers} layers' for branch in model.branches)}"] * bool(
        model.branches
    )
    blocks += ["mla"] if model.mla else []
    blocks += (
        [f"{sum(kind.has_mamba * count for kind, count in model.kinds.items())} Mamba-{1 if model.ssm.rank else 2}"]
        if model.ssm
        else []
    )
    blocks += ["diffusion"] if model.diffusion else []
    blocks += [f"{model.frames} frames"] if model.frames else []
    blocks += [f"window {model.window:,}"] if model.window else []
    blocks += [f"attention_chunk {model.attention_chunk:,}"] if model.attention_chunk else []
    return blocks + ([f"mtp {model.mtp}"] if model.mtp else [])


def schemes() -> list[Row]:
    """Returns all schemes, with the first sentence of the docstring of each."""
    from meshcast.simulator.ir.registry import describe_scheme, find_scheme, scheme_names

    rows = []
    for use in scheme_names():
        paper = find_scheme(use).paper
        rows.append(
            {
                "name": use,
                "family": use.partition("/")[0],
                "paper": paper.ref,
                "year": paper.year,
                "title": paper.title,
                "idea": describe_scheme(use),
            }
        )
    return rows


def frameworks() -> list[Row]:
    """Returns frameworks with a profile."""
    from meshcast.simulator.job.framework import framework_names, load_framework

    loaded = [load_framework(name) for name in framework_names()]
    return [
        {"name": each.name, "title": each.title, "attention": each.attention, "weights": each.weights}
        for each in loaded
    ]


KINDS: Mapping[str, tuple[Callable[[], list[Row]], Mapping[str, tuple[str, Format]]]] = {
    "gpus": (
        gpus,
        {
            "memory_bytes": ("memory GiB", lambda v: f"{v / GIB:,.4g}"),
            "memory_bytes_per_s": ("TB/s", lambda v: f"{v / 1e12:.3g}"),
            "bf16_flop_per_s": ("bf16 TFLOP/s", lambda v: f"{v / 1e12:,.4g}"),
            "fp8_flop_per_s": ("fp8", lambda v: f"{v / 1e12:,.4g}"),
            "scale_up": ("scale-up link", ""),
            "usual_node": ("usual node", ""),
        },
    ),
    "nodes": (
        nodes,
        {
            "gpu": ("GPU", ""),
            "gpus": ("GPUs", ""),
            "scale_up": ("scale-up", ""),
            "domain": ("domain", ""),
            "network": ("network", ""),
            "network_bytes_per_s_per_gpu": ("Gb/s per GPU", lambda v: f"{v * 8 / 1e9:,.4g}"),
        },
    ),
    "clusters": (
        clusters,
        {"title": ("", ""), "node": ("node", ""), "nodes": ("nodes", ","), "gpus": ("GPUs", ",")},
    ),
    "models": (
        models,
        {
            "parameters": ("parameters", ","),
            "active_parameters": ("active", lambda v: f"{v / 1e9:,.4g} B"),
            "layers": ("layers", ""),
            "hidden": ("hidden", ","),
            "heads": ("heads", ""),
            "blocks": ("blocks", ""),
        },
    ),
    "ids": (ids, {"shape": ("shape of", "")}),
    # Of a web address only the host name is shown; --json and docs/schemes.md have the whole address.
    "schemes": (
        schemes,
        {"paper": ("paper", lambda v: re.sub(r"^https://([^/]+)/.*", r"\1", v)), "idea": ("idea", "")},
    ),
    "frameworks": (frameworks, {"title": ("", "")}),
}
"""Rows of every kind, and the columns of its table after the name."""


def check_kind(kind: str) -> None:
    """Raises PlanError for an unknown kind."""
    if kind not in KINDS:
        rule = "there is no such list" if kind else "the kind of list is missing"
        raise PlanError("KIND", rule, nearest(kind, [*KINDS, "schedule"]), kind or None)


def list_rows(kind: str) -> list[Row]:
    """Returns rows of a kind. Raises PlanError for an unknown kind."""
    check_kind(kind)
    return KINDS[kind][0]()


def list_table(kind: str, rows: Sequence[Row]) -> RenderableType:
    """Makes a table of the rows, with the columns that `KINDS` names."""
    columns = KINDS[kind][1]
    title = "scheme" if kind == "schemes" else kind[:-1].replace("gpu", "GPU")
    table = Table(Column(title, style="bold", wrap="never"), dense=True)
    for key, (head, form) in columns.items():
        numeric = any(isinstance(row[key], int | float) for row in rows)
        wrap: Wrap = "never" if key == "paper" else "words"
        table.columns.append(Column(head, format=form, align="right" if numeric else "left", wrap=wrap))
    for row in rows:
        values = {key: row[key] for key in columns}
        # A function also formats texts, such as addresses of papers.
        values |= {key: form(row[key]) for key, (_, form) in columns.items() if callable(form) and row[key] is not None}
        table.add(row["name"], *values.values())
    return show_table(table)

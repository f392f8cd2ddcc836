"""The support matrix as a page of docs: ``python -m tools.pages.models docs/models.md``.

It is made of the tables of the tests, which hold what transformers and torch count, so that it needs neither of them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Column, Table
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.hub import HubModel, hub_files, hub_models
from meshcast.simulator.models.huggingface import SUPPORTED, from_config
from meshcast.simulator.models.model import Model

TABLES = Path(__file__).parents[2] / "tests" / "simulator" / "models"

TOKENS = 256
"""Tokens of the passes whose FLOPs types.jsonl has."""

SMALL_TOKENS = 64
"""Those of passes of small models."""

HEAD = """# Types of models

Made by `make docs-models` from the tables of `tests/simulator/models` (`types.jsonl`, `traced.jsonl`); do not edit it.
It has the causal language models of `transformers` 5.24, of which {read} are read, {traced} traced and {refused}
refused, and what else is read. How each is described is in [model.md](model.md#configjson).

- **how**: by a reader of its config, or by a [trace](model.md#models-without-a-reader) of its code.
- **parameters** are those of the config that `transformers` writes by default or, where that cannot be built, of a
  released one; **beside** is the difference of ours to them, as its code builds them on the meta device. What routers
  keep as buffers there and as parameters here, and multi-token prediction, which it leaves out, do not count.
- **FLOPs** is the difference of a forward pass to the products that torch's `FlopCounterMode` counts in eager code.
  Routed experts are left out for readers, as it does not see them, and get the same number of tokens in traces.
  Recurrences count by the elements of their states here and by the products of chunks there: of these
  models, and of Llama 4, the products with weights are compared (*weights*), and of a trace all (*states*). *small*:
  of a model with few narrow layers, whose real pass is counted, with routed experts. *encoder*: of that of images or
  sounds and its projector, for decoders have rows of their own; the work of a class token is left out. Empty: not
  compared, for `transformers` lacks its code (`bailing_moe`, `grok-1`, `nsa`; `minimax_text_01`, read as `minimax_m1`;
  `kimi_k3`, made of parts that are compared) or its tokens are not those of a text alone (`blt`, `clip`).
- **notes**: parts whose rates are derived, not measured; products, attention, experts and kernels that move bytes have
  [measured ones](calibration.md). What a forecast takes so is listed under `assumed`. Of a trace: the share of its
  FLOPs that no part describes, which is priced by FLOPs and bytes alone; and what its config has beside the default.
- **names** are ids of the Hugging Face hub that a job may give as its `model`, beside those of
  [presets](model.md#ids).

"""

KINDS = {
    "gated-delta-net": "Gated DeltaNet: bytes at the rate of Mamba-2",
    "kimi-delta": "Kimi delta attention: bytes at the rate of Mamba-2",
    "lightning": "Lightning attention: bytes at the rate of Mamba-2",
    "short-conv": "",
    "mlstm": "mLSTM: bytes at the rate of Mamba-2",
    "rg-lru": "RG-LRU: bytes at the rate of Mamba-2",
    "rwkv": "RWKV: as selective scans",
}
"""Rates of linear attention by its kind."""

RARE = {
    "blocks": "attention to blocks of keys: as a window, with a result of each block",
    "compressed": "attention to compressed entries: as a window",
    "hyper_connections": "residual streams: bytes",
    "distance_profiles": "biases by distance: bytes",
    "layer_input": "inputs of layers: bytes",
}
"""Rates of other fields."""


def page() -> str:
    """Returns the whole page."""
    read, listed = _read_rows("types.jsonl"), _read_rows("traced.jsonl")
    causal, names = (TABLES / "causal_types.txt").read_text("utf-8").split(), _list_names()
    others = sorted((SUPPORTED.keys() | read.keys()) - set(causal))
    rows = {
        kind: _list_cells(kind, read.get(kind), listed.get(kind), names.get(kind, [])) for kind in [*causal, *others]
    }
    counts = [sum(rows[kind][1] == how for kind in causal) for how in ("reader", "trace", "refused")]
    head = HEAD.format(**dict(zip(("read", "traced", "refused"), counts, strict=True)))
    numbers = [Column(name, align="right") for name in ("parameters", "beside", "FLOPs")]
    heads: list[Column | str] = ["type", "how", *numbers, "notes", "names"]
    tables = [render_table(Table(*heads, rows=[rows[kind] for kind in kinds])).rstrip() for kinds in (causal, others)]
    return head + "\n\n## Other types that are read\n\n".join(tables) + "\n"


def _read_rows(name: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a table by their types; of several the first, which is of the whole model."""
    rows = [json.loads(line) for line in (TABLES / name).read_text("utf-8").splitlines()]
    return {row["model_type"]: row for row in reversed(rows)}


def _list_names() -> dict[str, list[str]]:
    """Returns the ids of the table of public models by their types."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for maker in hub_files():
        for name, model in hub_models(maker).items():
            if isinstance(model, HubModel):
                names[str(model.config.get("model_type") or model.config["_class_name"])].append(name)
    return names


def _list_cells(
    kind: str, read: dict[str, Any] | None, listed: dict[str, Any] | None, names: list[str]
) -> tuple[str, ...]:
    """Returns the cells of a type. read, listed: its rows in the tables of readers and of traces."""
    ids = ", ".join(f"`{name}`" for name in names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    if kind in SUPPORTED:
        return (f"`{kind}`", "reader", *(_describe_read(read) if read else ("", "", "", "")), ids)
    if listed is None or "refused" in listed:
        return f"`{kind}`", "refused", "", "", "", (listed or {}).get("refused", ""), ids
    left = [f"{listed['left']:.1%} of its FLOPs"] if listed["left"] >= 0.0005 else []
    source = [listed["source"]] if "source" in listed else []
    products = f"{abs(listed['states']):.2%} *states*" if "states" in listed else "< 0.1 %"
    return f"`{kind}`", "trace", f"{listed['parameters']:,}", "0", products, "; ".join([*left, *source]), ids


def _describe_read(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns what is known of a type with a reader: parameters, differences, derived rates."""
    model = from_config(row)
    beside = model.parameters - model.parameter_parts["mtp"] - row["parameters"] - row["corrections"]
    return f"{row['parameters']:,}", f"{beside:,}", _compare_products(model, row), "; ".join(_name_derived(model))


def _compare_products(model: Model, row: dict[str, Any]) -> str:
    """Describes how far the products of a forward pass are from those of a row; empty: it has none."""
    kind = next((key for key in ("products", "weights") if key in row), "")
    if not kind and "small" in row:
        what = "encoder" if "encoder" in row["small"] else "weights, small" if "weights" in row["small"] else "small"
        return f"{abs(compare_small(row['model_type'], row['small'])):.2%} *{what}*"
    if not kind:
        return ""
    return f"{abs(count_products(model, kind) / row[kind] - 1):.2%}" + (" *weights*" if kind == "weights" else "")


def compare_small(kind: str, small: dict[str, Any]) -> float:
    """Returns how far the products of a small model of a type are from those counted for it, as a share of these.

    small: its config, and its products or those with weights, over `SMALL_TOKENS` tokens, of an encoder with a decoder
        so many of each; or those of its encoder of images or sounds with its projector, over one of them.
    """
    model = from_config({"model_type": kind, **small["config"]})
    if "encoder" in small:
        trunk = model.model_copy(update={"branches": ()})
        whole, alone = (
            sum(forward_matmul_flops(shape, model.seq, model.seq, causal=True).values()) for shape in (model, trunk)
        )
        return (whole - alone) / small["encoder"] - 1
    encoders = tuple(branch.model_copy(update={"tokens": SMALL_TOKENS}) for branch in model.branches)
    tokens, plain = SMALL_TOKENS * (1 + len(encoders)), model.model_copy(update={"branches": encoders, "mtp": 0})
    parts = forward_matmul_flops(plain, tokens, tokens, causal=False)
    without = ("attention", "scan") if "weights" in small else ()
    counted = small.get("weights") or small["products"]
    return sum(flops for part, flops in parts.items() if part not in without) / counted - 1


def count_products(model: Model, kind: str) -> float:
    """Counts the FLOPs of a forward pass over `TOKENS` tokens, of an encoder with a decoder so many of each, as a row
    of types.jsonl has them. kind: products, or weights without attention and scans."""
    encoders = tuple(branch.model_copy(update={"tokens": TOKENS}) for branch in model.branches)
    tokens = TOKENS * (1 + len(encoders))
    plain = model.model_copy(update={"branches": encoders, "mtp": 0})
    parts = forward_matmul_flops(plain, tokens, tokens, causal=False)
    without = ("experts",) if kind == "products" else ("experts", "attention", "scan")
    return sum(flops for part, flops in parts.items() if part not in without)


def _name_derived(model: Model) -> list[str]:
    """Names what of a model has derived rates."""
    ssm, linear = model.ssm, model.linear_attention
    scan = (
        "selective scan: exponentials and products of fp32" if ssm and ssm.rank else "scan of Mamba-2: training steps"
    )
    rare = [rate for field, rate in RARE.items() if getattr(model, field, None)]
    return [
        *([scan] if ssm else []),
        *([KINDS[linear.kind]] if linear and KINDS[linear.kind] else []),
        *(["indexer: as attention"] if model.mla and model.mla.index else []),
        *rare,
        *(f"{part} left out" for part in model.left_out),
    ]


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), page())

"""Layers under sequence schemes."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Op, UnitRun
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import make, sent_bytes
from meshcast.validation.contract.of_sequence import of_family

ORDERS = ("contiguous", "striped", "zigzag")

LLAMA = {"layers": 1, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 64, "seq": 8192, "gated": True}
"""The shapes of Llama-3-8B at 8192 tokens."""

Entry = tuple[str, int, dict[str, Any]]
"""A scheme by its name, its ranks, its options."""


def under(*entries: Entry, regather: bool = False, attention: str = "flash", **model: Any) -> UnitRun:
    """A layer under sequence schemes, the outermost first, each over an axis of its own."""
    mesh = Mesh({f"x{i}": ranks for i, (_, ranks, _) in enumerate(entries)})
    schemes = [make(f"sequence/{name}", mesh, (f"x{i}",), **options) for i, (name, _, options) in enumerate(entries)]
    shape = Model(**({"layers": 1, "hidden": 192, "heads": 24, "vocab": 64, "seq": 48} | model))
    built = Architecture(shape, 1, shape.seq, 64, attention=attention)
    (unit_run,) = Lowering(mesh, schemes, regather).run(built.stage(range(1), False, False)).unit_runs
    return unit_run


def layer(name: str, ranks: int, **options: Any) -> UnitRun:
    return under((name, ranks, options))


def sent_by(unit_run: UnitRun, *sizes: int) -> tuple[float, float]:
    """Bytes that a rank sends forward and backward."""
    mesh = Mesh({f"x{i}": ranks for i, ranks in enumerate(sizes)})
    return sent_bytes(of_family(unit_run.fragment.forward), mesh), sent_bytes(
        of_family(unit_run.fragment.backward), mesh
    )


def attending(unit_run: UnitRun, backward: bool = False) -> list[Op]:
    """Attention and its messages."""
    ops = unit_run.fragment.backward if backward else unit_run.fragment.forward
    return [op for op in ops if isinstance(op.work, Attention | Collective)]

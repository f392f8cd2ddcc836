"""Measures the closed forms of schemes that overlap collectives with GEMMs: on one pair alone, and on one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Unit
from meshcast.simulator.ir.ops import Collective, Fragment, Op, TensorUse
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.program.block import resolve_dependencies
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import OverlapSetting
from meshcast.validation.contract import of_tensor
from meshcast.validation.contract.measure import make, sent_bytes
from meshcast.validation.contract.of_tensor import LoweredLayer


@dataclass(frozen=True)
class GemmPair(OverlapSetting):
    """One GEMM and its collective at a setting."""

    def pair(self, gathers: bool, reduction: str = "reduce_scatter") -> Fragment:
        """All-gather and GEMM, or GEMM and reduction; on one rank the GEMM alone."""
        product = Op("product", work=self.gemm)
        if self.p == 1:
            return Fragment(forward=[product])
        operation, width = ("all_gather", self.inner) if gathers else (reduction, self.columns)
        nbytes = 2 * self.rows * width
        moves = Op(operation, "tensor", Collective(operation, nbytes, ("tp",)))
        ops = [moves, product] if gathers else [product, moves]
        ops[1].after = [ops[0]]
        return Fragment(forward=ops, tensor_uses=[TensorUse("rows", nbytes, op, made=op is ops[0]) for op in ops])


def seconds(ops: Sequence[Op], setting: GemmPair) -> float:
    """Seconds from the first start to the last end, every stream in issue order."""
    flat, mesh = FlatProgram(), Mesh({"tp": setting.p})
    for op, after in zip(ops, resolve_dependencies(ops, None, None)[0], strict=True):
        assert op.work is not None
        op_seconds = sent_bytes([op], mesh) / setting.bytes_per_s + op.work.flops / setting.flop_per_s
        flat.add(op, op_seconds, 0.0, 0.0, after, 0)
    return longest_path(flat).span


def overlapped_ops(
    setting: GemmPair, use: str, gathers: bool, reduction: str = "reduce_scatter", **options: object
) -> list[Op]:
    """The ops of a pair under a scheme."""
    scheme = make(use, Mesh({"tp": setting.p}), **{**dict(setting.options), **options})
    return scheme.lower(Unit("unit", ()), lambda _: setting.pair(gathers, reduction)).forward


def gather_seconds(setting: GemmPair, use: str) -> float:
    return seconds(overlapped_ops(setting, use, True), setting)


def scatter_seconds(setting: GemmPair, use: str) -> float:
    return seconds(overlapped_ops(setting, use, False), setting)


def reduce_seconds(setting: GemmPair, use: str) -> float:
    return seconds(overlapped_ops(setting, use, False, "all_reduce"), setting)


def sent_per_layer(setting: GemmPair, use: str, tensor: str = "tensor/megatron-sp") -> float:
    """Bytes that a rank sends in a layer of Megatron with the overlap scheme."""
    return of_tensor.sent_per_layer(LoweredLayer(setting.p, 1, 64, 128, 8, setting.regather, more=((use, ()),)), tensor)


OPTION_VALUES: dict[str, tuple[object, ...]] = {"schedule": ("split", "fuse"), "chunks": (1, 3)}
"""Values of options that appear in closed forms."""


def settings(kind: type[Scheme]) -> Iterator[GemmPair]:
    for p in (1, 2, 4, 8):
        for links in (1e5, 1e6, 1e7, 1e9):
            # One wave of the tiles of an H100, four, and twelve.
            for rows, columns, inner in ((1536, 2816, 64), (6144, 2816, 32), (12 * 1536, 2816, 128)):
                yield GemmPair(p, rows, inner, columns, 1e11, links, regather=rows > 1536)
    for name, values in OPTION_VALUES.items():
        for value in values if name in kind.Options.model_fields else ():
            for links in (1e5, 1e7, 1e9):
                yield GemmPair(4, 6144, 32, 2816, 1e11, links, options=((name, value),))


MEASURES = {
    "gather_seconds": gather_seconds,
    "scatter_seconds": scatter_seconds,
    "reduce_seconds": reduce_seconds,
    "sent_per_reduced_layer": lambda setting, use: sent_per_layer(setting, use, "tensor/megatron"),
    "sent_per_layer": sent_per_layer,
}

"""Chunks of a round that are compressed before each all-to-all and decompressed behind it (ScheMoE).

All chunks are compressed first, on the stream of the kernels; then chunk after chunk is decompressed, computed and
compressed again; the last decompressions follow, so that no kernel waits for a chunk while another could run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Memory, Op
from meshcast.simulator.lowering.rewrite import Rewrite


def compress_exchanges(fragment: Fragment, chunks: Sequence[tuple[list[Op], list[Op]]], ratio: float) -> list[Op]:
    """Compresses the tokens of all-to-alls by `ratio`; returns these.

    chunks: for each round the all-to-alls that dispatch its chunks, and those that combine them.
    """
    rewrite, exchanges = Rewrite(fragment), list[Op]()
    for outs, backs in chunks:
        issued = fragment.forward if outs[0] in fragment.forward else fragment.backward
        last: list[Op] = []
        for out, back in zip(outs, backs, strict=True):
            compress, sent, decompress = _compress_exchange(out, ratio)
            first = next(op for op in issued if out in op.after)
            rewrite.swap(out, [compress, sent], [decompress])
            rewrite.swap(first, [decompress, first])
            again, returned, end = _compress_exchange(back, ratio)
            last.append(end)
            behind = last if back is backs[-1] else []
            rewrite.swap(back, [again, returned, *behind], [end])
            exchanges += [sent, returned]
    rewrite.apply()
    return exchanges


def _compress_exchange(op: Op, ratio: float) -> tuple[Op, Op, Op]:
    """An all-to-all of compressed tokens between the kernels that compress and decompress them."""
    work = op.work
    assert isinstance(work, Collective)
    small = round(work.nbytes / ratio)
    pack = Memory("cast", work.nbytes, small, pace=work.pace)
    unpack = replace(pack, read=small, write=work.nbytes)
    before = replace(op, name=f"compress {op.name}", stream=COMPUTE, work=pack)
    sent = replace(op, work=replace(work, nbytes=small), after=[before])
    return before, sent, replace(before, name=f"decompress {op.name}", work=unpack, after=[sent])

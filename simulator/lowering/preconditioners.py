"""Kernels of optimizers that keep factors of a matrix: SOAP and Shampoo keep squares of both sides, Dion a basis.

All products are in fp32, as PyTorch multiplies unless it is told else. A decomposition that is made every few steps
counts with its share of a step. Columns of a decomposition follow each other: each is a product of what is left with a
vector and an update of rank one, by kernels of their own; the rest is products of panels. LAPACK's blocked algorithms,
which cuSOLVER has, are made so (geqrf, orgqr, sytrd); their times are derived, not measured.

References: Vyas et al. 2024 (SOAP), arXiv 2409.11321, and nikhilvyas/SOAP @a1e553530f, soap.py; Shi et al. 2023
(distributed Shampoo), arXiv 2309.06497; Ahn et al. 2025 (Dion), arXiv 2504.05295, and microsoft/dion @0a059a4542,
dion/dion.py (`dion_update_ddp`, `dion_update_fsdp`, `orthogonalize`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshcast.simulator.ir.ops import Gemm

PANEL = 32
"""Columns of a panel (`ilaenv` of LAPACK for geqrf and sytrd)."""


def multiply(rows: float, columns: int, inner: float, turns: float) -> Gemm:
    """Returns `turns` products in fp32, one after the other; fewer than one: a share of one."""
    return Gemm(rows * turns, columns, inner, dtype="fp32", out_dtype="fp32", what="precondition", part=turns)


def factorise(rows: int, columns: int, turns: float) -> Iterable[Gemm]:
    """Yields the kernels of `turns` QR decompositions with their orthogonal matrices (geqrf and orgqr)."""
    panel = min(PANEL, columns)
    left, steps = rows - columns / 2, columns * turns
    yield multiply(panel, 1, left, steps)
    yield multiply(left, panel, 1, steps)
    trailing = max(1, columns // 2)
    yield multiply(panel, trailing, left, 2 * steps / panel)
    yield multiply(left, trailing, panel, 2 * steps / panel)


def decompose(side: int, turns: float) -> Iterable[Gemm]:
    """Yields the kernels of `turns` eigendecompositions of symmetric matrices: sytrd, whose columns are products of
    what is left with a vector and updates of rank two; eigenvectors of the tridiagonal matrix and the way back, as
    products."""
    left = side / 2
    yield multiply(left, 1, left, side * turns)
    yield multiply(left, min(PANEL, side), 2, side * turns)
    yield multiply(side, side, side, 2 * turns)


def precondition(rows: int, columns: int, number: int, root: bool, every: int, largest: int) -> Iterable[Gemm]:
    """Yields the kernels of equal matrices in a step of SOAP or Shampoo.

    root: of Shampoo, inverse roots of the factors by eigendecompositions; otherwise eigenbases by a power iteration and
        a QR decomposition.
    every: steps between them.
    largest: of SOAP the largest side that has a factor, of Shampoo that of the blocks of a matrix.
    """
    if root:
        number *= math.ceil(rows / largest) * math.ceil(columns / largest)
        rows, columns = min(rows, largest), min(columns, largest)
    for side, other in ((rows, columns), (columns, rows)):
        if side > largest:
            continue
        # The factor of a side; the gradient into its basis and back, the momentum out of the old one and into the new.
        yield multiply(side, side, other, number)
        yield multiply(side, other, side, (1 if root else 4) * number)
        if root:
            yield from decompose(side, number / every)
            yield multiply(side, side, side, number / every)
        else:
            yield multiply(side, side, side, 3 * number / every)
            yield from factorise(side, side, number / every)


def approximate(rows: int, columns: int, rank: int, number: int, shards: int) -> tuple[list[Gemm], list[Gemm]]:
    """Returns the kernels of Dion for equal matrices, before and behind the decomposition: the product with the basis;
    the new basis, what it leaves of the momentum, and the update of the weights.

    rows, columns: of a matrix, whose columns are sharded.
    shards: ranks that share the products.
    """
    each = max(1, round(columns / shards))
    before = [multiply(rows, rank, each, number)]
    behind = [multiply(each, rank, rows, number), multiply(rows, each, rank, 2 * number)]
    return before, behind


def orthonormalise(rows: int, rank: int, number: int) -> Iterable[Gemm]:
    """Yields the kernels that orthonormalise the columns of equal matrices: of tall ones by a random sketch of 1.25
    times as many rows as columns, its QR decomposition, and a Cholesky decomposition of what that leaves."""
    if rows <= rank:
        yield from factorise(rows, rank, number)
        return
    sketch = min(rows, math.ceil(1.25 * rank))
    yield multiply(sketch, rank, rows, number)
    yield from factorise(sketch, rank, number / 2)  # without its orthogonal matrix
    yield multiply(rank, rank, rows, number)
    yield multiply(rows, rank, rank / 2, 2 * number)  # solutions of triangular systems
    yield multiply(rank, 1, rank / 2, rank * number)  # columns of Cholesky's

"""The (max,+) matrices of passes, as `engine.maxplus` computes them."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.arrays import ARRIVAL, HEADER, HOST, NEVER
from meshcast.simulator.batch.loops.compiled import compile_loop


@compile_loop
def sweep_block(whole: np.ndarray, reals: np.ndarray, size: int, launch: float) -> np.ndarray:
    """Returns the (max,+) matrix of a block [size, size]. launch: time of the host to launch an op [s]; 0: none."""
    ops, after = whole[0], HEADER + 2 * whole[0]
    waits = after + ops + 1
    now = np.full((size, size), NEVER)
    for i in range(size):
        now[i, i] = 0.0
    seen = np.full((ops, size), NEVER)
    for i in range(ops):
        row = now[whole[HEADER + i]]
        if launch > 0 and reals[2 * ops + i] > 0:
            for c in range(size):
                now[HOST, c] += launch * reals[2 * ops + i]
                row[c] = max(row[c], now[HOST, c])
        for at in range(whole[after + i], whole[after + i + 1]):
            other = whole[waits + at]
            for c in range(size):
                row[c] = max(row[c], seen[other, c])
        if whole[HEADER + ops + i]:
            row[ARRIVAL] = max(row[ARRIVAL], 0.0)
        for c in range(size):
            row[c] += reals[i]
            seen[i, c] = row[c] + reals[ops + i]
    if not whole[1]:
        now[ARRIVAL, ARRIVAL] = NEVER
    for at in range(whole[2]):
        place = whole[waits + whole[waits - 1] + at]
        for c in range(size):
            now[ARRIVAL, c] = max(now[ARRIVAL, c], seen[place, c])
    return now


@compile_loop
def multiply(late: np.ndarray, early: np.ndarray) -> np.ndarray:
    """Returns the (max,+) product of two matrices of one size: that of what `early` stands for and then `late`."""
    size = len(late)
    result = np.full((size, size), NEVER)
    for i in range(size):
        for j in range(size):
            if late[i, j] > NEVER:
                for c in range(size):
                    result[i, c] = max(result[i, c], late[i, j] + early[j, c])
    return result


@compile_loop
def raise_matrix(matrix: np.ndarray, count: int) -> np.ndarray:
    """Returns the (max,+) power of a matrix: of `count` copies one behind the other."""
    size = len(matrix)
    result = np.full((size, size), NEVER)
    for i in range(size):
        result[i, i] = 0.0
    square = matrix
    while count > 0:
        if count % 2:
            result = multiply(square, result)
        count //= 2
        if count:
            square = multiply(square, square)
    return result

"""The peaks of memory, as `engine.peak_memory` computes them."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.arrays import BUFFERS, NEVER, Order, PassKinds, SlotMessages
from meshcast.simulator.batch.loops.compiled import compile_loop


@compile_loop
def find_peaks(
    order: Order, pass_of: np.ndarray, kinds: PassKinds, messages: SlotMessages, overlap: bool, peaks: np.ndarray
) -> None:
    """Finds what every device holds at the peak of its passes, and what they leave, by category and in sum.

    pass_of: by slot, the kind of pass.
    overlap: whether buffers of messages lie beside the actions before and behind.
    peaks: what is filled in [devices, 2, categories + 1] [bytes].
    """
    memory, total = kinds.memory, kinds.memory.shape[2] - 1
    for device in range(len(order.starts) - 1):
        level, highest, best, beside = 0.0, NEVER, 0, 0.0
        first, behind = order.starts[device], order.starts[device + 1]
        for action in range(first, behind):
            kind, flying = pass_of[order.slot[action]], 0.0
            if overlap and action > first:
                flying += messages.moved[order.slot[action - 1], 0]
            if overlap and action + 1 < behind:
                flying += messages.moved[order.slot[action + 1], 1]
            if level + memory[kind, 1, total] + flying > highest:
                highest, best, beside = level + memory[kind, 1, total] + flying, action, flying
            level += memory[kind, 0, total]
        held, left = peaks[device, 0], peaks[device, 1]
        for action in range(first, behind):
            if action == best:
                held[:] = left + memory[pass_of[order.slot[action]], 1]
            left += memory[pass_of[order.slot[action]], 0]
        held[BUFFERS] += beside
        held[total] += beside

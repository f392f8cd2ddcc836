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
    runs = np.empty(len(memory))
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
        runs[:] = 0
        for action in range(first, best):
            runs[pass_of[order.slot[action]]] += 1
        add_up(memory, runs, peaks[device, 0])
        for c in range(total + 1):
            peaks[device, 0, c] += memory[pass_of[order.slot[best]], 1, c]
        peaks[device, 0, BUFFERS] += beside
        peaks[device, 0, total] += beside
        for action in range(best, behind):
            runs[pass_of[order.slot[action]]] += 1
        add_up(memory, runs, peaks[device, 1])


@compile_loop
def add_up(memory: np.ndarray, runs: np.ndarray, left: np.ndarray) -> None:
    """Adds to `left` what passes leave. runs: how often each kind has run."""
    for kind in range(len(runs)):
        for c in range(len(left)):
            left[c] += runs[kind] * memory[kind, 0, c]


@compile_loop
def add_profiles(parts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns what successive parts leave and hold at their peak, by category; see `Profile.in_series`.

    parts: what a copy of each leaves and holds at its peak, by category and in sum [parts, 2, categories + 1].
    counts: copies of each.
    """
    total = parts.shape[2] - 1
    result, held, highest = np.zeros((2, total + 1)), 0.0, 0.0
    for part in range(len(parts)):
        # What grows from copy to copy is highest in the last.
        before = counts[part] - 1 if parts[part, 0, total] > 0 else 0.0
        if held + before * parts[part, 0, total] + parts[part, 1, total] > highest:
            highest = held + before * parts[part, 0, total] + parts[part, 1, total]
            for c in range(total):
                result[1, c] = result[0, c] + before * parts[part, 0, c] + parts[part, 1, c]
        for c in range(total):
            result[0, c] += counts[part] * parts[part, 0, c]
        held += counts[part] * parts[part, 0, total]
    return result

"""Which of many pipeline devices are drawn."""

from __future__ import annotations


def choose_devices(devices: int, count: int, fullest: int = 0) -> list[int]:
    """Chooses at most `count` devices, or 2, evenly spaced, including the first, the last and the fullest."""
    count = min(devices, max(2, count))
    chosen = [round(i * (devices - 1) / max(1, count - 1)) for i in range(count)]
    if fullest not in chosen:  # it replaces its neighbour, never an end
        chosen[min(range(1, count - 1), key=lambda i: abs(chosen[i] - fullest))] = fullest
    return sorted(chosen)

"""Marks of the arrival of gathered weights, handed from unit to unit."""

from __future__ import annotations

from meshcast.simulator.ir.ops import Op


def relay_arrivals(reach: int, phase: str) -> list[Op]:
    """Ops without work that pass on to later units that their weights have arrived; the next unit waits for the first.

    Units are connected by their residual stream alone. The arrival of weights for the unit after the next is relayed
    from unit to unit on a stream of its own, arrivals for units further on on other streams; every unit hands them to
    the stream before.
    """
    marks = [mark_arrival(phase, 1, [])] if reach else []
    for stream in range(1, reach):
        marks.append(mark_arrival(phase, stream + 1, []))
        marks.append(mark_arrival(phase, stream, marks[-1:]))
    return marks


def mark_arrival(phase: str, stream: int, after: list[Op]) -> Op:
    """A mark, on one of the streams of arrivals, that weights are there."""
    name = "data-forward" if phase == "F" else "data-backward"
    return Op("weights arrived", f"{name}-{stream}", None, after, phase)

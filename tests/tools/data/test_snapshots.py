"""Recorded allocations are played through the model of the allocator."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tools.data.snapshots import read_snapshot, replay

MIB = 1 << 20
OWN, SHARED = 30 * MIB, 20 * MIB
"""Bytes of a segment of its own, and of one that tensors of 1 to 10 MiB share."""


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def segment(address: int, size: int, state: str) -> dict[str, Any]:
    blocks = [{"size": size, "state": state}]
    return {"device": 0, "stream": 0, "address": address, "total_size": size, "blocks": blocks}


HELD, FREED = segment(0, OWN, "active_allocated"), segment(OWN, SHARED, "inactive")
"""A tensor that was there before the first event and stays; one that is gone."""
EVENTS = [
    event("segment_free", 9 * OWN, OWN),  # cached before the history begins
    event("segment_alloc", OWN, SHARED),
    event("alloc", OWN, 3 * MIB),
    event("alloc", OWN + 3 * MIB, 4 * MIB),
    event("free_completed", OWN, 3 * MIB),
    event("alloc", OWN, 2 * MIB),
    event("free_completed", OWN, 2 * MIB),
    event("free_completed", OWN + 3 * MIB, 4 * MIB),
]


def test_the_peak_is_that_of_what_was_there_and_what_came() -> None:
    peak = replay(EVENTS, [HELD, FREED])
    assert peak.recorded == peak.modelled == OWN + SHARED


def test_what_was_there_leaves_its_room_to_tensors_of_its_stream() -> None:
    again = [event("free_completed", 0, OWN), event("alloc", 0, OWN)]
    assert replay(again, [HELD]).modelled == OWN


def test_returns_between_allocations_are_refused() -> None:
    with pytest.raises(ValueError, match="given back"):
        replay([*EVENTS, event("segment_free", OWN, SHARED)], [HELD])


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"segments": os.getcwd}))
    with pytest.raises(pickle.UnpicklingError, match="getcwd"):
        read_snapshot(file)

"""Plays recorded allocations of a GPU through the model of torch's caching allocator.

python -m tools.data.snapshots snapshot.pickle ...

Each file is one of `torch.cuda.memory._dump_snapshot`, whose history (`_record_memory_history`) holds all allocations
and frees since it began. What was allocated before is taken in the order of addresses. Memory that was given back to
the device before the first allocation was cached, and is not there; later returns are not modelled, so a file with some
is refused.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.allocator import CachedBlock, CachingAllocator

Event = Mapping[str, Any]

TAKEN, RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
"""Actions by which memory is taken from the device, and given back."""


class ContainersOnly(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers: a snapshot has nothing else, and a class could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError."""
        raise pickle.UnpicklingError(f"a snapshot has no {module}.{name}")


@dataclass(frozen=True)
class ReplayedPeak:
    """The most memory that is reserved at once [bytes].

    recorded: on the GPU.
    modelled: by the model, for the same allocations.
    """

    recorded: int
    modelled: int


def read_snapshot(path: Path) -> dict[str, Any]:
    """Returns a snapshot. Raises UnpicklingError for a file that holds anything else than plain data."""
    with path.open("rb") as file:
        snapshot: dict[str, Any] = ContainersOnly(file).load()
    return snapshot


def replay(events: Sequence[Event], segments: Sequence[Mapping[str, Any]]) -> ReplayedPeak:
    """Plays the events of a device.

    segments: at the end. Raises ValueError where memory is given back between allocations.
    """
    before, reserved = _find_beginning(events, segments)
    is_expandable = any(event["action"] == "segment_map" for event in events)
    allocator, blocks = CachingAllocator(expandable=is_expandable), dict[int, CachedBlock]()
    for address, (nbytes, stream) in sorted(before.items()):
        blocks[address] = allocator.allocate(nbytes, stream)
    recorded = modelled = 0
    for event in events:
        action = event["action"]
        reserved += _change_of_reserved(event)
        if action in RETURNED and modelled:
            raise ValueError("memory is given back to the device between allocations")
        if action == "alloc":
            blocks[event["addr"]] = allocator.allocate(event["size"], str(event["stream"]))
        elif action == "free_completed":
            allocator.free(blocks.pop(event["addr"]))
        if modelled or action == "alloc":
            recorded, modelled = max(recorded, reserved), max(modelled, allocator.reserved)
    return ReplayedPeak(recorded, modelled)


def _find_beginning(
    events: Sequence[Event], segments: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, tuple[int, str]], int]:
    """Returns, by address, size and stream of what was allocated before the first event, and the reserved bytes."""
    live: dict[int, tuple[int, str]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                live[address] = block.get("requested_size", block["size"]), str(segment["stream"])
            address += block["size"]
    reserved = sum(segment["total_size"] for segment in segments)
    for event in reversed(events):
        reserved -= _change_of_reserved(event)
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            live[event["addr"]] = event["size"], str(event["stream"])
    return live, reserved


def _change_of_reserved(event: Event) -> int:
    """Returns by how much an event changes what is reserved [bytes]."""
    return int(event["size"]) * ((event["action"] in TAKEN) - (event["action"] in RETURNED))


def main(paths: Sequence[str]) -> None:
    """Prints the recorded and the modelled peak of every device of every file."""
    for path in paths:
        snapshot = read_snapshot(Path(path))
        for device, events in enumerate(snapshot["device_traces"]):
            if events:
                segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
                peak = replay(events, segments)
                share = peak.modelled / peak.recorded - 1
                figures = f"{peak.recorded:,} bytes recorded, {peak.modelled:,} modelled, {share:+.2%}"
                print(f"{path} device {device}: {figures}")


if __name__ == "__main__":
    main(sys.argv[1:])

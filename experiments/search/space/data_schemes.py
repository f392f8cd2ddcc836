"""What bounds know of data schemes; of others they count no collectives, no update and no shares of the states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshcast.experiments.search.space.scheme_keys import DATA_OPTIONS, takes_option
from meshcast.simulator.job.framework import Framework

DATA = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")
"""Ways to shard states over data-parallel ranks that are tried by default, and that bounds know."""

SHARDED = {"zero-2": (1, 0), "zero-3": (1, 2), "fsdp": (1, 2)}
"""Data schemes that reduce gradients in every micro-batch: how often they do, and how often they gather weights."""

KNOWN_OPTIONS = ("reshard", "unit", "prefetch")
"""Keys of options whose effect bounds know."""

Options = Callable[[str], Any]
"""What a choice says of the options of data schemes, by their keys (`StepChoice.option`)."""


class DataSchemes:
    """What bounds know of the data schemes of a space.

    known: schemes whose collectives and states they know: none with an option that they do not know.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]]) -> None:
        """values: of every field of the space."""
        changed = [key for key, usual in DATA_OPTIONS.items() if {*values[key]} != {usual} and key not in KNOWN_OPTIONS]
        self.known = frozenset(name for name in DATA if not any(takes_option(name, key) for key in changed))
        kept = False in values["reshard"]
        self.gathered_once = {name for name in values["data"] if kept and takes_option(name, "reshard")}
        """Schemes whose weights may be gathered once in a micro-batch."""
        self.most_layers = max(values["unit"])
        """Layers of the largest unit."""

    def may_shard_gradients(self, data: str) -> bool:
        """Returns whether a data scheme may reduce gradients in every micro-batch."""
        return data in SHARDED or data not in self.known

    def collectives_of_microbatch(self, data: str, piped: bool, overlaps: bool) -> tuple[int, int]:
        """Returns how often a micro-batch reduces gradients, and gathers weights at most, with a data scheme.

        piped, overlaps: under a pipeline that overlaps, FSDP keeps weights whole through all micro-batches.
        """
        kept = (data == "fsdp" and piped and overlaps) or data not in self.known
        return (0, 0) if kept else SHARDED.get(data, (0, 0))


def gathers_once(option: Options) -> bool:
    """Returns whether weights are gathered once in a micro-batch at most."""
    return not option("reshard")


def layers_of_unit(option: Options) -> int:
    """Returns the layers whose weights are gathered together."""
    return int(option("unit"))


def gathers_ahead(option: Options, overlaps: bool, framework: Framework) -> bool:
    """Returns whether sharded weights are gathered during the computation before. overlaps: data parallelism."""
    stated = framework.overlap.sharded_weights if option("prefetch") is None else option("prefetch") > 0
    return overlaps if stated is None else bool(stated)


def left_to_framework(framework: Framework) -> dict[str, Any]:
    """Returns what options are with a framework where a plan leaves them to it, by their keys."""
    return {"prefetch": int(framework.overlap.gathers_ahead)}

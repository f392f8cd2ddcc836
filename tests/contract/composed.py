"""Plans with one scheme of every family: a chosen one, and the defaults of the other families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.ir.scheme import FAMILIES
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from tests.contract import of_pipeline
from tests.strategies import chain_options, complete

SCHEMES = [use for use in scheme_names() if complete(use)]
"""All schemes without required options. Those with some (a file) are tested where that file is."""

Options = dict[str, Any]

AXES = {"pipeline": "pp", "data": "dp", "sequence": "cp", "tensor": "tp", "expert": "ep"}
"""Of every family, outermost first; that of the experts belongs to their view."""

DEFAULTS = {
    "pipeline": "pipeline/1f1b",
    "data": "data/zero-1",
    "sequence": "sequence/all-gather",
    "tensor": "tensor/megatron-sp",
    "expert": "expert/all-to-all",
    "memory": "memory/recompute-selective",
}


def axes_for(use: str, name: str) -> tuple[str, ...]:
    """As many axes as a scheme needs: one called `name`, or several called after it."""
    kind = find_scheme(use)
    if kind.most_axes == 0:
        return ()
    return (name,) if kind.least_axes <= 1 else tuple(f"{name}{i}" for i in range(kind.least_axes))


def chunks_for(use: str) -> int:
    """Chunks of which a schedule makes four micro-batches on two devices."""
    kind = find_scheme(use)
    if (
        issubclass(kind, Schedule)
        and not chain_options(use)
        and not of_pipeline.exists(kind, PipelineShape(2, 4, kind.directions))
    ):
        return 2
    return 1


def entries_with(use: str, size: int = 2, memory: bool = True) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The schemes of a plan with `use` in its family, all of its axes of `size`, and the mesh.

    A scheme without axes, in a family that has some, is added to the default of the family.
    """
    family = use.partition("/")[0]
    entries: list[dict[str, Any]] = []
    mesh: dict[str, int] = {}
    for name in FAMILIES:
        uses = [use] if name == family else [DEFAULTS[name]]
        if name in AXES and find_scheme(uses[0]).most_axes == 0:
            uses = [uses[0], DEFAULTS[name]]
        for one in uses if memory or name != "memory" else []:
            axes = axes_for(one, AXES[name]) if name in AXES else ()
            more = {"chunks": chunks_for(one), **chain_options(one)} if name == "pipeline" else {}
            entries.append({"use": one, **({"over": list(axes)} if axes else {}), **more})
    for name, axis in AXES.items():
        if name != "expert":
            own = use if name == family and find_scheme(use).most_axes != 0 else DEFAULTS[name]
            mesh |= dict.fromkeys(axes_for(own, axis), size)
    return entries, mesh


def of_family(*families: str) -> list[str]:
    return [use for use in SCHEMES if use.partition("/")[0] in families]


def options_of(use: str) -> Iterator[Options]:
    """No options, and each other choice of one option; of a number the choice 2."""
    kind = find_scheme(use)
    yield {}
    for name, field in kind.Options.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else [field.annotation]
        values: Sequence[Any] = ()
        if get_origin(field.annotation) is Literal:
            values = get_args(field.annotation)
        elif bool in kinds:
            values = (True, False)
        elif int in kinds:
            values = (2,)
        for value in values:
            try:
                chosen = kind.Options(**{name: value})
            except ValidationError:
                continue
            if chosen != kind.Options():
                yield {name: value}


def with_options(*families: str) -> list[tuple[str, Options]]:
    return [(use, options) for use in of_family(*families) for options in options_of(use)]

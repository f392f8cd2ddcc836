"""Data flow and placement in a layer under every tensor and sequence scheme, with each of its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from simulator.ir.mesh import Mesh
from simulator.ir.registry import find_scheme
from simulator.ir.scheme import Scheme
from tests.contract.checked import layer_problems
from tests.contract.composed import SCHEMES
from tests.contract.measure import make

Options = dict[str, Any]


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


def schemes_on(use: str, mesh: Mesh, options: Options) -> list[Scheme]:
    """A scheme over all axes of the mesh; one without axes beside a tensor scheme that shards activations."""
    if find_scheme(use).most_axes == 0:
        return [make(use, mesh, (), **options), make("tensor/megatron-sp", mesh, tuple(mesh.axes))]
    return [make(use, mesh, tuple(mesh.axes), **options)]


@pytest.mark.parametrize(("use", "options"), with_options("tensor", "sequence"))
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_data_flow_and_placement_in_a_layer(use: str, options: Options, attention: str) -> None:
    """On two, three and four ranks, or a grid of two or three along each axis."""
    axes = max(1, find_scheme(use).least_axes)
    for ranks, regather in product((2, 3, 4) if axes == 1 else (2, 3), (True, False)):
        mesh = Mesh({f"x{i}": ranks for i in range(axes)})
        found = layer_problems(mesh, partial(schemes_on, use, mesh, options), regather, attention)
        assert found == [], (ranks, regather)

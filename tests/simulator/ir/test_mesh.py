"""The mesh: ranks of groups, and the parts that several readings of the same ranks have in common."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.mesh import Mesh
from tests.strategies import views_of

REGION = ("dp", "cp", "tp")


def read(axes: dict[str, int], view: dict[str, int], region: tuple[str, ...] = REGION) -> Mesh:
    return Mesh(axes, {"experts": view}, region)


def group(axes: dict[str, int], of: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks over `of` with rank 0, by counting through all places, the last axis fastest."""
    places = enumerate(product(*(range(size) for size in axes.values())))
    held = [axis in of for axis in axes]
    return tuple(
        rank for rank, place in places if not any(at for at, in_it in zip(place, held, strict=True) if not in_it)
    )


def test_without_views_every_axis_is_its_own_part() -> None:
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 4})
    assert mesh.axes == mesh.named_axes == {"pp": 2, "dp": 3, "tp": 4} and mesh.world == 24
    assert [(mesh.parts(axis), mesh.stride(axis)) for axis in mesh.axes] == [(("pp",), 12), (("dp",), 4), (("tp",), 1)]
    assert mesh.ranks(("pp", "tp")) == (0, 1, 2, 3, 12, 13, 14, 15) and mesh.ranks(("dp", "tp"), (0, -1)) == (0, 11)
    assert mesh.size(("pp", "tp", "none")) == 8 and not mesh.view_of("dp")
    assert mesh.inner_first(["pp", "tp", "dp"]) == ["tp", "dp", "pp"]


@pytest.mark.parametrize(
    ("axes", "view", "parts"),
    [
        ({"dp": 6, "cp": 1, "tp": 1}, {"edp": 1, "ep": 3, "etp": 2}, {"edp": (), "ep": ("dp.0",), "etp": ("dp.1",)}),
        # Experts over part of the replicas, each whole on all tensor ranks' tokens: ep inside dp.
        ({"dp": 8, "cp": 1, "tp": 1}, {"edp": 2, "ep": 4}, {"edp": ("dp.0",), "ep": ("dp.1",)}),
        # The axes themselves.
        ({"dp": 4, "cp": 1, "tp": 2}, {"edp": 4, "ep": 2}, {"edp": ("dp",), "ep": ("tp",)}),
        # All ranks of a stage.
        ({"dp": 2, "cp": 2, "tp": 2}, {"edp": 1, "ep": 8}, {"edp": (), "ep": ("dp", "cp", "tp")}),
        # A part of one axis and all of the next.
        ({"dp": 4, "cp": 1, "tp": 2}, {"edp": 2, "ep": 4}, {"edp": ("dp.0",), "ep": ("dp.1", "tp")}),
        # Narrower than tp: the rest of tp sees other tokens with the same experts.
        ({"dp": 2, "cp": 1, "tp": 4}, {"edp": 4, "ep": 2}, {"edp": ("dp", "tp.0"), "ep": ("tp.1",)}),
        # Experts divided among neighbours.
        (
            {"dp": 4, "cp": 1, "tp": 2},
            {"edp": 1, "ep": 2, "etp": 4},
            {"edp": (), "ep": ("dp.0",), "etp": ("dp.1", "tp")},
        ),
    ],
)
def test_a_view_is_read_in_parts(axes: dict[str, int], view: dict[str, int], parts: dict[str, tuple[str, ...]]) -> None:
    mesh = read({"pp": 2, **axes}, view)
    assert {axis: mesh.parts(axis) for axis in view} == parts
    assert {axis: mesh.size(axis) for axis in view} == view
    assert {mesh.view_of(axis) for axis in view} == {"experts"}
    assert mesh.parts("pp") == ("pp",)
    assert mesh.named_axes == {"pp": 2, **axes}


@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    of=st.lists(st.sampled_from(["pp", "dp", "tp"]), min_size=1, unique=True),
    data=st.data(),
)
def test_positions_at_other_places_have_the_ranks_of_these_places(
    sizes: list[int], of: list[str], data: st.DataObject
) -> None:
    """In the order of the positions, the innermost axis fastest; where each has its own place nothing changes."""
    axes = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    places = data.draw(st.permutations(range(axes["pp"])))
    plain, mesh = Mesh(axes), Mesh(axes).with_places("pp", places)
    each = ((places if axis == "pp" else range(n)) if axis in of else [0] for axis, n in axes.items())
    assert mesh.ranks(tuple(of)) == tuple(_rank(axes, at) for at in product(*each))
    assert plain.with_places("pp", range(axes["pp"])).ranks(tuple(of)) == plain.ranks(tuple(of))


def _rank(axes: dict[str, int], at: tuple[int, ...]) -> int:
    """The number of a rank, row-major over the axes."""
    rank = 0
    for size, place in zip(axes.values(), at, strict=True):
        rank = rank * size + place
    return rank


def test_parts_of_one_axis_belong_together() -> None:
    mesh = read({"pp": 1, "dp": 4, "cp": 1, "tp": 2}, {"edp": 2, "ep": 4})
    assert mesh.of_one_axis(("dp.0", "dp.1")) and mesh.of_one_axis(("dp.1", "tp"))
    assert not mesh.of_one_axis(("dp.0", "tp"))
    assert mesh.parts(("dp", "tp")) == ("dp.0", "dp.1", "tp")
    assert mesh.parts("dp.1") == ("dp.1",)


def test_the_pipeline_may_lie_between() -> None:
    """Views read the ranks of one stage, which then are no neighbours."""
    mesh = read({"dp": 4, "pp": 2, "tp": 2}, {"edp": 2, "ep": 4})
    assert mesh.parts("ep") == ("dp.1", "tp")
    assert mesh.ranks(("ep",)) == (0, 1, 4, 5)
    assert mesh.ranks(("edp",)) == (0, 8)
    assert mesh.ranks(("pp",)) == (0, 2)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.sampled_from([1, 2, 4]))


@given(sizes=SIZES, data=st.data())
def test_both_readings_are_row_major_over_the_same_ranks(sizes: tuple[int, ...], data: st.DataObject) -> None:
    axes = dict(zip(("pp", *REGION), sizes, strict=True))
    view = data.draw(st.sampled_from(views_of([axes[axis] for axis in REGION])))
    mesh = read(axes, view)
    assert mesh.world == math.prod(axes.values()) == math.prod(mesh.axes.values())
    parts = mesh.parts(mesh.named_axes)
    assert list(parts) == list(mesh.axes)
    again = {"pp": axes["pp"], **view}
    for reading in (axes, again):
        large = [axis for axis, size in reading.items() if size > 1]
        for axis in large:
            assert mesh.ranks((axis,)) == group(reading, (axis,))
            assert mesh.stride(axis) == group(reading, (axis,))[1]
            assert mesh.size(axis) == reading[axis]
        for pair in pairwise(large):
            assert mesh.ranks(pair) == group(reading, pair)

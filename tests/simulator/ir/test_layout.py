"""Layouts: local sizes, the rules for inputs and outputs, and every movement between two of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.layout import PARTIAL, Dim, Tensor, collectives_between, output_layout, required_layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective

MESH = Mesh({"dp": 3, "cp": 2, "tp": 4})
X = Tensor("x", {"b": Dim(24), "s": Dim(48), "h": Dim(96)})
WHOLE = 24 * 48 * 96 * 2
"""Bytes of x."""

ROWS = {
    "nothing to do": ({"tp": "s"}, {"tp": "s"}, []),
    "replicate to shard is a slice": ({}, {"tp": "s"}, []),
    "shard to replicate": ({"tp": "s"}, {}, [("all_gather", WHOLE, "tp")]),
    "partial to replicate": ({"tp": PARTIAL}, {}, [("all_reduce", WHOLE, "tp")]),
    "partial to shard": ({"tp": PARTIAL}, {"tp": "s"}, [("reduce_scatter", WHOLE, "tp")]),
    "shard to another shard": ({"tp": "s"}, {"tp": "h"}, [("all_to_all", WHOLE // 4, "tp")]),
    "all-reduce, data axis": ({"dp": "b", "tp": PARTIAL}, {"dp": "b"}, [("all_reduce", WHOLE // 3, "tp")]),
    "all-gather, data axis": ({"dp": "b", "tp": "h"}, {"dp": "b"}, [("all_gather", WHOLE // 3, "tp")]),
    "all-to-all, data axis": ({"dp": "b", "tp": "h"}, {"dp": "b", "tp": "s"}, [("all_to_all", WHOLE // 12, "tp")]),
    "slice on one, sum on the other": ({"tp": PARTIAL}, {"cp": "s", "tp": "s"}, [("reduce_scatter", WHOLE, "tp")]),
    "gathers go from the inner axis to the outer": (
        {"cp": "s", "tp": "s"},
        {},
        [("all_gather", WHOLE // 2, "tp"), ("all_gather", WHOLE, "cp")],
    ),
    "sums go from the inner axis to the outer": (
        {"cp": PARTIAL, "tp": PARTIAL},
        {"cp": "h", "tp": "s"},
        [("reduce_scatter", WHOLE, "tp"), ("reduce_scatter", WHOLE // 4, "cp")],
    ),
    "a sum moves less before a gather than after it": (
        {"cp": PARTIAL, "tp": "s"},
        {},
        [("all_reduce", WHOLE // 4, "cp"), ("all_gather", WHOLE, "tp")],
    ),
    "sums, then exchanges, then gathers": (
        {"dp": "b", "cp": "s", "tp": PARTIAL},
        {"cp": "h"},
        [("all_reduce", WHOLE // 6, "tp"), ("all_to_all", WHOLE // 6, "cp"), ("all_gather", WHOLE // 2, "dp")],
    ),
    "a scattered sum makes the exchange small": (
        {"cp": "s", "tp": PARTIAL},
        {"cp": "h", "tp": "s"},
        [("reduce_scatter", WHOLE // 2, "tp"), ("all_to_all", WHOLE // 8, "cp")],
    ),
}


@pytest.mark.parametrize(("source", "target", "steps"), ROWS.values(), ids=ROWS.keys())
def test_moves(source: dict[str, str], target: dict[str, str], steps: list[tuple[str, int, str]]) -> None:
    assert collectives_between(X, source, target, MESH) == [
        Collective(op, nbytes, (axis,)) for op, nbytes, axis in steps
    ]


@pytest.mark.parametrize(
    ("source", "target"),
    [({"dp": "s", "tp": PARTIAL}, {}), ({"dp": PARTIAL, "tp": PARTIAL}, {}), ({"dp": "b", "tp": "s"}, {"tp": "h"})],
    ids=["a gather behind a sum", "sums", "a gather behind an exchange"],
)
def test_parts_of_an_axis_move_as_the_axis_does(source: dict[str, str], target: dict[str, str]) -> None:
    """Also behind another operation."""

    def moves(mesh: Mesh) -> list[tuple[str, int, int]]:
        layouts = ({part: dim for axis, dim in of.items() for part in mesh.parts((axis,))} for of in (source, target))
        return [(step.operation, step.nbytes, mesh.size(step.axes)) for step in collectives_between(X, *layouts, mesh)]

    sizes = {"dp": 4, "tp": 2}
    assert moves(Mesh(sizes, {"experts": {"edp": 2, "ep": 2}}, ["dp"])) == moves(Mesh(sizes))


def test_an_axis_of_one_moves_nothing() -> None:
    mesh = Mesh({"tp": 1})
    for source in ({}, {"tp": "s"}, {"tp": PARTIAL}):
        for target in ({}, {"tp": "s"}, {"tp": "h"}):
            assert collectives_between(X, source, target, mesh) == []
            assert X.nbytes(source, mesh) == WHOLE


STATES = st.sampled_from(["b", "s", "h"])


@given(
    source=st.dictionaries(st.sampled_from(["dp", "cp", "tp"]), STATES | st.just(PARTIAL)),
    target=st.dictionaries(st.sampled_from(["dp", "cp", "tp"]), STATES),
)
def test_collectives_between_any_two_layouts(source: dict[str, str], target: dict[str, str]) -> None:
    """One movement per axis that is not whole already, in the order of the rule, each with the buffer it sees."""
    steps = collectives_between(X, source, target, MESH)
    # Every axis that is cut or partial, and only these, must communicate.
    assert {step.axes[0] for step in steps} == {axis for axis in source if source[axis] != target.get(axis)}
    assert len(steps) == len({step.axes[0] for step in steps})
    rank = {"all_reduce": 0, "reduce_scatter": 0, "all_to_all": 1, "all_gather": 2}
    assert [rank[step.operation] for step in steps] == sorted(rank[step.operation] for step in steps)
    now, sliced = dict(source), {}
    for step in steps:
        (axis,) = step.axes
        if rank[step.operation] and not sliced:
            # Along a dim that is whole a rank drops what is not its own before it sends anything.
            own = {axis: dim for axis, dim in target.items() if axis not in source}
            sliced = {axis: dim for axis, dim in own.items() if dim not in now.values()}
            now |= sliced
        was = now.pop(axis)
        before = {**now, axis: was}
        if axis in target:
            now[axis] = target[axis]
        wanted = {
            "all_reduce": was == PARTIAL and axis not in target,
            "reduce_scatter": was == PARTIAL and axis in target,
            "all_to_all": was != PARTIAL and axis in target,
            "all_gather": was != PARTIAL and axis not in target,
        }
        assert wanted[step.operation]
        largest = now if step.operation == "all_gather" else before
        assert step.nbytes == X.nbytes(largest, MESH)
    assert now == {axis: dim for axis, dim in target.items() if axis in source} | sliced


# ------------------------------------------------------------------------------------- sizes and rules


@given(b=st.integers(1, 3), s=st.integers(1, 3), layout=st.dictionaries(st.sampled_from(["dp", "cp", "tp"]), STATES))
def test_the_parts_make_the_whole(b: int, s: int, layout: dict[str, str]) -> None:
    tensor = Tensor("x", {"b": Dim(24 * b), "s": Dim(24 * s), "h": Dim(24)}, "fp32")
    cuts = math.prod(MESH.size(axis) for axis in layout)
    assert tensor.local(layout, MESH) * cuts == 24 * 24 * 24 * b * s
    assert tensor.nbytes(layout, MESH) == 4 * tensor.local(layout, MESH)
    for dim, size in tensor.local_dims(layout, MESH).items():
        parts = math.prod(MESH.size(axis) for axis, cut in layout.items() if cut == dim)
        assert size == tensor.dims[dim].size // parts


def test_a_head_is_never_cut_and_key_heads_are_copied() -> None:
    """Eight ranks, two key/value heads of 128: each rank holds one of them whole."""
    heads, few = Dim(16 * 128, unit=128), Dim(2 * 128, unit=128, copies=True)
    assert [heads.local(n) // 128 for n in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]
    assert [few.local(n) // 128 for n in (1, 2, 4, 8, 16)] == [2, 1, 1, 1, 1]
    assert [heads.is_divisible_by(n) for n in (1, 3, 8, 16, 32)] == [True, False, True, True, False]
    assert [few.is_divisible_by(n) for n in (1, 2, 3, 4, 8)] == [True, True, False, True, True]
    k = Tensor("k", {"s": Dim(64), "a": few})
    mesh = Mesh({"tp": 8})
    assert k.local({"tp": "a"}, mesh) == 64 * 128


def test_a_dim_under_another_name() -> None:
    """Keys are made at positions s and read at t: a cut along one is a cut along the other."""
    k = Tensor("k", {"b": Dim(2), "s": Dim(64), "a": Dim(32)})
    seen = k.rename_dims(s="t")
    assert seen.has("t") and not seen.has("s") and seen.name == "k"
    assert seen.layout_of_producer({"cp": "s", "tp": "a", "dp": PARTIAL}) == {"cp": "t", "tp": "a", "dp": PARTIAL}
    assert seen.local({"cp": "t"}, Mesh({"cp": 4})) == k.local({"cp": "s"}, Mesh({"cp": 4}))


def test_the_rules_of_one_statement() -> None:
    """y[b, s, f] = x[b, s, h] w[h, f], f divided: x whole, w and y cut, the gradient of x partial."""
    x, y = Tensor("x", {"b": Dim(2), "s": Dim(4), "h": Dim(8)}), Tensor("y", {"b": Dim(2), "s": Dim(4), "f": Dim(8)})
    w = Tensor("w", {"h": Dim(8), "f": Dim(8)})
    columns, rows = {"tp": "f"}, {"tp": "h"}
    assert [required_layout(tensor, columns) for tensor in (x, w)] == [{}, columns]
    assert [output_layout(tensor, columns) for tensor in (y, x)] == [columns, {"tp": PARTIAL}]
    assert [required_layout(tensor, rows) for tensor in (x, w)] == [rows, rows]
    assert output_layout(y, rows) == {"tp": PARTIAL}
    assert required_layout(y, rows) == {}, "the gradient of a partial sum must arrive whole"
    assert output_layout(w, {"dp": "b", "tp": "f"}) == {"dp": PARTIAL, "tp": "f"}

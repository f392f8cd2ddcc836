"""Copies of ops."""

from __future__ import annotations

from dataclasses import fields

from meshcast.simulator.ir.ops import Fragment, Memory, Op


def test_a_copy_has_all_fields_of_an_op_but_what_it_waits_for() -> None:
    values = ["all", "stream", Memory("norm", 1, 2), [Op("before")], "W", "last", "tag", 2.0, "norm", 3, "router"]
    op = Op(*values)
    names = [field.name for field in fields(Op)]
    assert all(getattr(op, name) != getattr(Op("other"), name) for name in names)
    assert Op("mark").issued == 0 and op.issued == 2
    copied = op.copy()
    assert [getattr(copied, name) for name in names] == [*values[:3], [], *values[4:]]


def test_a_copy_of_a_fragment_waits_for_its_own_ops() -> None:
    first = Op("first")
    copied = Fragment([first, Op("second", after=[first])]).copy()
    assert copied.forward[1].after == [copied.forward[0]] and copied.forward[0] is not first

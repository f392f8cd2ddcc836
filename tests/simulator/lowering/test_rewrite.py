"""Rewrites of ops: the work stays the same, and all dependencies are kept."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import (
    Attention,
    Collective,
    Exchange,
    Fragment,
    Gemm,
    Memory,
    Op,
    Param,
    TensorUse,
    Transfer,
    Work,
)
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies, split_work, working_predecessors
from meshcast.validation.contract.measure import waits_for

SIZES = st.integers(1, 10_000)
WORK: st.SearchStrategy[Work] = st.one_of(
    st.builds(Gemm, SIZES, SIZES, SIZES, st.integers(1, 4), layout=st.sampled_from(["tn", "nn", "nt"])),
    st.builds(Memory, st.just("add"), SIZES, SIZES),
    st.builds(Collective, st.sampled_from(["all_gather", "shift"]), SIZES, st.just(("tp",))),
    st.builds(Transfer, SIZES, st.just("pp"), st.just(0), st.just(1)),
    st.builds(Exchange, st.just("dispatch"), SIZES, st.just(64), st.just(2), st.just(8), st.just(("ep",))),
)


# ----------------------------------------------------------------------------------------------- parts


@given(work=WORK, n=st.integers(1, 9))
def test_parts_of_work_add_up_to_it(work: Work, n: int) -> None:
    made = split_work(work, n)
    assert len(made) == n
    assert sum(part.flops for part in made) == pytest.approx(work.flops)
    for field in ("nbytes", "read", "write", "tokens"):
        if field in type(work).__dataclass_fields__:
            each = [getattr(part, field) for part in made]
            assert sum(each) == getattr(work, field)
            assert max(each) - min(each) <= 1
    if not isinstance(work, Gemm):
        return
    for part in made:
        assert isinstance(part, Gemm)
        assert (part.n, part.batch, part.layout) == (work.n, work.batch, work.layout)
        # Rows of tokens are what is parted: of a weight gradient these are what it sums over.
        assert (part.m, part.k) == ((work.m, work.k / n) if work.layout == "nt" else (work.m / n, work.k))


def test_parts_of_a_grouped_product_have_a_part_of_every_group() -> None:
    work = Gemm(6, 8, 4, batch=4, groups=((3, 4), (1, 12)))
    assert split_work(work, 2) == [Gemm(3, 8, 4, batch=4, groups=((3, 2), (1, 6)))] * 2


def test_attention_has_no_parts() -> None:
    with pytest.raises(AssertionError, match="cannot be split"):
        split_work(Attention(1, 8, 8, 2, 2, 4, 4), 2)


# ------------------------------------------------------------------------------------ dependencies by marks


def test_marks_are_followed_only_to_replaced_ops() -> None:
    a, b, new = (Op(name, work=Memory("add", 1, 1)) for name in ("a", "b", "new"))
    both, other, begin = Op("both", after=[a, b]), Op("other", after=[b]), Op("begin")
    above = Op("above", after=[both, begin])
    assert replace_dependencies([above, other], {a: [new]}) == [new, b, begin, other]
    assert replace_dependencies([other], {a: [new]}) == [other]
    assert replace_dependencies([a], {a: []}) == []
    assert working_predecessors(Op("all", after=[above, other])) == {a, b}


# ------------------------------------------------------------------------------------------------ swapping


def kernel(name: str, after: list[Op], phase: str = "F", stream: str = "compute") -> Op:
    return Op(name, stream, Memory("add", 12, 12), list(after), phase)


def fragment() -> Fragment:
    """x -> a -> b -> c -> y, and its gradient; b's weight is used by b; c's gradient is ready behind a mark."""
    begin, grads = Op("x in"), Op("dy in", phase="B")
    a = kernel("a", [begin])
    middle = Op("middle", after=[a])
    b = kernel("b", [middle])
    c = kernel("c", [b, middle])
    db = kernel("db", [grads], "B")
    wb = kernel("wb", [db], "W")
    made = Op("made", after=[wb], phase="W")
    return Fragment(
        forward=[a, b, c],
        backward=[db, wb],
        entry={"x": begin},
        exit={"y": c, "b": b},
        grad_entry={"y": grads},
        grad_exit={"x": db},
        params=[Param("w", 4, 4, (), made, b)],
        tensor_uses=[
            TensorUse("a", 8, a, made=True),
            TensorUse("a", 8, b),
            TensorUse("b", 8, b, made=True),
            TensorUse("b", 8, wb),
        ],
    )


def test_successors_of_an_op_wait_for_the_ends_of_its_replacement() -> None:
    frag = fragment()
    a, b, c = frag.forward
    one = kernel("b1", [a])
    two = kernel("b2", [one])
    rewrite = Rewrite(frag)
    rewrite.swap(b, [one, two], [one, two])
    assert rewrite.apply() is frag
    assert frag.forward == [a, one, two, c]
    assert c.after[:2] == [one, two] and working_predecessors(c) == {a, one, two}
    # An output that exists behind several ops exists behind a mark that joins them.
    assert frag.exit["b"].work is None and frag.exit["b"].after == [one, two] and frag.exit["y"] is c
    assert frag.params[0].used is one
    ends = [(tensor_use.key, tensor_use.op, tensor_use.made) for tensor_use in frag.tensor_uses]
    assert ends[1:5] == [("a", one, False), ("a", two, False), ("b", one, True), ("b", two, False)]


def test_marks_that_only_a_parameter_knows_are_changed_too() -> None:
    frag = fragment()
    db, wb = frag.backward
    new = kernel("new wb", [db], "W")
    rewrite = Rewrite(frag)
    rewrite.swap(wb, [new])
    rewrite.apply()
    assert working_predecessors(frag.params[0].ready) == {new}
    assert frag.backward == [db, new] and frag.tensor_uses[-1].op is new


def test_an_op_may_stay_and_end_later() -> None:
    frag = fragment()
    a, b, c = frag.forward
    parallel = kernel("parallel", [a], stream="tensor")
    rewrite = Rewrite(frag)
    rewrite.swap(a, [a])
    rewrite.swap(b, [b, parallel], [b, parallel])
    rewrite.apply()
    assert frag.forward == [a, b, parallel, c]
    assert (
        working_predecessors(b) == {a}
        and working_predecessors(parallel) == {a}
        and working_predecessors(c) == {a, b, parallel}
    )


def test_the_work_of_an_op_may_be_done_in_the_place_of_another() -> None:
    frag = fragment()
    a, b, c = frag.forward
    whole = kernel("whole", [a])
    rewrite = Rewrite(frag)
    rewrite.swap(b, [], [whole])
    rewrite.swap(a, [a, whole], [a])
    rewrite.apply()
    assert frag.forward == [a, whole, c]
    assert working_predecessors(c) == {a, whole} and frag.exit["b"] is whole and frag.params[0].used is whole
    assert {tensor_use.op for tensor_use in frag.tensor_uses if tensor_use.key == "b"} == {whole, frag.backward[1]}


def test_nothing_swapped_is_nothing_changed() -> None:
    frag = fragment()
    lists = list(frag.forward), list(frag.backward), list(frag.tensor_uses), list(frag.params)
    waits = [list(op.after) for op in (*frag.forward, *frag.backward)]
    Rewrite(frag).apply()
    assert (frag.forward, frag.backward, frag.tensor_uses, frag.params) == lists
    assert [op.after for op in (*frag.forward, *frag.backward)] == waits


# ------------------------------------------------------------------------------------------------ chunking


@st.composite
def stages_ops(draw: st.DrawFn) -> tuple[Fragment, list[Op]]:
    """Ops in issue order on two streams, joined by marks here and there, and a chain among them: each waits for the one
    before it, and others wait for some of it or stand aside."""
    names = (str(i) for i in count())
    begin = Op("x in")
    stage_ops: list[Op] = []
    issued: list[Op] = []
    length = draw(st.integers(1, 4))
    first = draw(st.booleans())
    while len(stage_ops) < length:
        if draw(st.booleans()) and issued:
            after = draw(st.lists(st.sampled_from(issued), max_size=2, unique=True))
            issued.append(kernel(f"aside {next(names)}", after or [begin]))
            continue
        # Other predecessors of the chain wait for none of it.
        free = [op for op in issued if not op.name.startswith("chain") and not waits_for(op) & set(stage_ops)]
        more = [draw(st.sampled_from(free))] if free and draw(st.booleans()) else []
        before: list[Op] = stage_ops[-1:] or [begin]
        joined = [Op("mark", after=[*before, *more])] if draw(st.booleans()) else [*before, *more]
        stream = "expert" if first and not stage_ops and length > 1 else "compute"
        stage_ops.append(kernel(f"chain {next(names)}", joined, stream=stream))
        issued.append(stage_ops[-1])
    issued.append(kernel("last", [issued[-1], stage_ops[-1]]))
    return Fragment(forward=issued, entry={"x": begin}, exit={"y": issued[-1]}), stage_ops


@given(drawn=stages_ops(), n=st.integers(1, 4))
def test_each_part_waits_for_its_part_of_the_one_before(drawn: tuple[Fragment, list[Op]], n: int) -> None:
    frag, stage_ops = drawn
    before = {op: working_predecessors(op) for op in frag.forward}
    work = {op: op.work for op in stage_ops}
    rewrite = Rewrite(frag)
    made = dict(zip(stage_ops, rewrite.chunk(stage_ops, (1,) * n), strict=True))
    rewrite.apply()
    standing = {op: made.get(op, [op]) for op in before}
    assert set(frag.forward) == {one for ops in standing.values() for one in ops}
    assert len(frag.forward) == len(set(frag.forward))
    for op, waits in before.items():
        for i, one in enumerate(standing[op]):
            inside = {made[other][i] for other in waits if op in made and other in made}
            outside = {part for other in waits if not (op in made and other in made) for part in standing[other]}
            assert working_predecessors(one) == inside | outside
    for op, ops in made.items():
        whole = work[op]
        assert isinstance(whole, Memory)
        assert sum(one.work.read for one in ops if isinstance(one.work, Memory)) == whole.read
    # Whatever an op waits for is issued before it.
    place = {op: i for i, op in enumerate(frag.forward)}
    assert all(place[other] < i for op, i in place.items() for other in working_predecessors(op))


def test_leading_communication_is_issued_for_all_parts_first() -> None:
    begin = Op("x in")
    dispatch = Op("dispatch", "expert", Collective("all_to_all", 12, ("ep",)), [begin])
    up, down = kernel("up", [dispatch]), kernel("down", [])
    down.after = [up]
    combine = Op("combine", "expert", Collective("all_to_all", 12, ("ep",)), [down])
    frag = Fragment(forward=[dispatch, up, down, combine], entry={"x": begin}, exit={"y": combine})
    rewrite = Rewrite(frag)
    rewrite.chunk([dispatch, up, down, combine], (1, 1))
    rewrite.apply()
    turns = ["dispatch 0", "dispatch 1", "up 0", "down 0", "combine 0", "up 1", "down 1", "combine 1"]
    assert [op.name for op in frag.forward] == turns
    assert [op.name for op in frag.exit["y"].after] == ["combine 0", "combine 1"]


@pytest.mark.parametrize("one_kernel", [False, True])
def test_parts_are_launched_as_often_as_the_whole(one_kernel: bool) -> None:
    """A part of a kernel of its own has its share of the launches; of a kernel in parts, the first has them all."""
    op = Op("product", work=Gemm(12, 8, 4), launches=3.0)
    (parts,) = Rewrite(Fragment([op])).chunk([op], [1, 1, 2], one_kernel)
    launches = [part.launches for part in parts]
    assert sum(launches) == op.launches and min(launches) >= 0
    assert (launches == [3.0, 0.0, 0.0]) == one_kernel

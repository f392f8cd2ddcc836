"""FLOPs and bytes of traced operators, against counts by hand."""

from __future__ import annotations

import pytest

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.imported.module_graph import ModuleOperator, merge_operators
from meshcast.experiments.planning.imported.operator_works import OperatorCall, PassWorks, TensorShape, list_works
from meshcast.simulator.ir.ops import Memory


def shape(*sizes: int, gradient: bool = True) -> TensorShape:
    return TensorShape(sizes, "bf16", 2, gradient)


def flops(kind: str, *inputs: TensorShape, output: TensorShape | None = None, **options: object) -> tuple[float, float]:
    return list_works(OperatorCall(kind, inputs, (output or shape(1),), options)).flops


def test_products_cost_two_flops_for_each_triple() -> None:
    forward = 2 * 6 * 5 * 7
    assert flops("linear", shape(2, 3, 7), shape(5, 7)) == (forward, 2 * forward)
    assert flops("linear", shape(2, 3, 7, gradient=False), shape(5, 7)) == (forward, forward)
    assert flops("linear", shape(2, 3, 7, gradient=False), shape(5, 7, gradient=False)) == (forward, 0)
    assert flops("addmm", shape(5), shape(6, 7), shape(7, 5)) == (forward, 2 * forward)
    assert flops("matmul", shape(2, 3, 7), shape(7, 5)) == (forward, 2 * forward)
    assert flops("bmm", shape(4, 6, 7), shape(4, 7, 5), output=shape(4, 6, 5)) == (4 * forward, 8 * forward)
    assert flops("matmul", shape(4, 6, 7), shape(2, 4, 7, 5), output=shape(2, 4, 6, 5))[0] == 8 * forward
    assert flops("matmul", shape(7), shape(7, 5)) == (2 * 5 * 7, 4 * 5 * 7)


@pytest.mark.parametrize(
    ("equation", "sizes", "forward"),
    [
        ("bth,bsh->bts", ((2, 3, 5), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        ("ij,jk", ((3, 5), (5, 4)), 2 * 3 * 4 * 5),
        ("bi,bj->bij", ((2, 3), (2, 4)), 2 * 2 * 3 * 4),
        ("ij,ij->", ((3, 5), (3, 5)), 2 * 3 * 5),
    ],
)
def test_einsum_costs_the_product_of_all_its_dims(
    equation: str, sizes: tuple[tuple[int, ...], tuple[int, ...]], forward: int
) -> None:
    assert flops("einsum", *(shape(*one) for one in sizes), equation=equation) == (forward, 2 * forward)


def test_einsum_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="3 operands"):
        flops("einsum", shape(2), shape(2), shape(2), equation="a,a,a->a")


def test_convolutions_are_products_of_their_windows() -> None:
    """2 x positions x channels out x channels in of a group x window."""
    forward = 2 * (8 * 14 * 14) * 64 * 32 * 3 * 3
    image, result = shape(8, 32, 28, 28), shape(8, 64, 14, 14)
    assert flops("conv2d", image, shape(64, 32, 3, 3), output=result, groups=1) == (forward, 2 * forward)
    assert flops("conv2d", image, shape(64, 1, 3, 3), output=result, groups=32)[0] == forward / 32
    unbatched = flops("conv1d", shape(32, 28), shape(64, 32, 3), output=shape(64, 26), groups=1)
    assert unbatched[0] == 2 * 26 * 64 * 32 * 3
    transposed = flops("conv_transpose2d", result, shape(64, 32, 3, 3), output=image, groups=1)
    assert transposed[0] == 2 * (8 * 14 * 14) * 64 * 32 * 3 * 3


def test_attention_multiplies_scores_twice() -> None:
    """Half of them where it is causal; the backward pass computes the scores again: 5 products instead of 2."""
    query, keys = shape(2, 8, 16, 32), shape(2, 4, 20, 32)
    forward = 4 * 2 * 8 * 16 * 20 * 32
    assert flops("scaled_dot_product_attention", query, keys, keys) == (forward, 2.5 * forward)
    assert flops("scaled_dot_product_attention", query, keys, keys, is_causal=True)[0] == forward / 2


def test_recurrent_layers_multiply_inputs_at_once_and_states_step_by_step() -> None:
    weights = [shape(4 * 6, 5), shape(4 * 6, 6), shape(24), shape(24), shape(4 * 6, 6), shape(4 * 6, 6)]
    states = [shape(2, 3, 6, gradient=False)] * 2
    call = OperatorCall("lstm", (shape(7, 3, 5, gradient=False), *states, *weights), (shape(7, 3, 6),), {})
    tokens = 7 * 3
    forward = 2 * tokens * 24 * (5 + 6 + 6 + 6)
    assert list_works(call).flops == (forward, 2 * forward - 2 * tokens * 24 * 5)


def test_other_operators_move_bytes() -> None:
    one = shape(4, 8)
    forward, backward = list_works(OperatorCall("gelu", (one,), (one,), {}))
    assert forward == (Memory("gelu", 64, 64),)
    assert backward == (Memory("gelu", 128, 64, backward=True),)
    rows = OperatorCall("embedding", (shape(1000, 8), TensorShape((4,), "int64", 8)), (one,), {})
    assert list_works(rows).forward == (Memory("embedding", 64 + 32, 64),)
    assert list_works(OperatorCall("zeros", (), (one,), {})) == PassWorks((), ())


def test_runs_of_a_submodule_are_layers() -> None:
    """A block whose attention interrupts it has two layers of its own; what is sent is counted once a reader."""

    def operator(name: str, path: str, *reads: int, output: int = 10) -> ModuleOperator:
        parts = tuple(path.split(".")) if path else ()
        return ModuleOperator(name, parts, PassWorks((), ()), tuple((one, output) for one in reads), 3, output, 10)

    operators = [
        operator("a", "block.norm"),
        operator("b", "block.attention.q", 0),
        operator("c", "block.attention.k", 0),
        operator("d", "block", 0, 1, 2),
        operator("e", "head", 3),
    ]
    graph = merge_operators(operators, lambda works: (1.0, 2.0), depth=2)
    assert graph.names == ("block.norm", "block.attention", "block", "head")
    assert graph.edges == ((0, 1), (0, 2), (1, 2), (2, 3))
    assert graph.figures["activations"].tolist() == [10, 20, 10, 10]
    assert graph.figures["forward"].tolist() == [1, 2, 1, 1]
    whole = merge_operators(operators, lambda works: (1.0, 2.0), depth=1)
    assert whole.names == ("block", "head") and whole.figures["parameters"].tolist() == [12, 3]
    again = merge_operators([*operators, operator("f", "block", 4)], lambda works: (1.0, 2.0), depth=1)
    assert again.names == ("block#1", "head", "block#2") and isinstance(again, LayerGraph)

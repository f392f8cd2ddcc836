"""The all-gather dispatcher of tokens: what is sent, permuted and held, whatever the routing."""

from __future__ import annotations

import pytest

from meshcast.simulator.ir.ops import Gemm, Memory, Op
from tests.simulator.schemes.expert_layers import TOKENS, K, S, divided, moved

USE = "expert/all-gather-dispatch"


def permutes(ops: list[Op]) -> list[Memory]:
    return [op.work for op in ops if isinstance(op.work, Memory) and op.work.what == "permute"]


@pytest.mark.parametrize(("p", "ep"), [(4, 4), (8, 8), (2, 2)])
def test_every_token_goes_once_to_all_ranks(p: int, ep: int) -> None:
    """Two collectives of the tokens of all ranks each way, and one of the router's weights."""
    fragment = divided(USE, p, ep)
    weights = p * S * K * 4
    for phases in ("F", "B"):
        found = [(work.operation, work.nbytes) for work in moved(fragment, phases)]
        one = "all_gather" if phases == "F" else "reduce_scatter"
        assert sorted(found) == sorted([("all_gather", p * TOKENS), ("reduce_scatter", p * TOKENS), (one, weights)])


@pytest.mark.parametrize(("p", "ep"), [(4, 4), (8, 8), (2, 2)])
def test_a_rank_permutes_and_computes_the_tokens_of_its_experts(p: int, ep: int) -> None:
    """As many copies as all-to-alls bring, in one permutation instead of two."""
    gathered, exchanged = (divided(use, p, ep) for use in (USE, "expert/all-to-all"))
    products = [[op.work for op in one.forward if isinstance(op.work, Gemm)] for one in (gathered, exchanged)]
    assert products[0] == products[1]
    copies = p * K * TOKENS // ep
    first, last = permutes(gathered.forward)
    assert (first.read, first.write) == (p * TOKENS, copies)
    assert (last.read, last.write) == (copies + p * S * K * 4, p * TOKENS)
    assert len(permutes(exchanged.forward)) > 2


def test_routing_changes_the_work_of_the_experts_and_not_what_is_sent() -> None:
    even, uneven = (divided(USE, 4, 4, routing=routing) for routing in ("balanced", {"zipf": 1.5}))
    assert moved(even) == moved(uneven)
    paces = [max(op.work.pace for op in one.forward if isinstance(op.work, Gemm)) for one in (even, uneven)]
    assert paces[0] == 1 < paces[1]


def test_fewer_ranks_than_choices_of_a_token_send_less_than_all_to_alls() -> None:
    for p in (2, 4, 8):
        gathered, exchanged = (divided(use, p, p) for use in (USE, "expert/all-to-all"))
        tokens = [
            sum(work.nbytes for work in moved(gathered, "F") if work.nbytes == p * TOKENS),
            sum(work.nbytes for work in moved(exchanged, "F") if work.operation == "all_to_all"),
        ]
        # What a rank sends of a collective's bytes is (P-1)/P of the whole: of P T tokens, or of k T copies.
        assert (tokens[0] < tokens[1]) == (p < K) and tokens == [2 * p * TOKENS, 2 * K * TOKENS]

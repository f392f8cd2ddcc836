"""Attention of the positions of one rank is that of whole sequences, and every position is on one rank."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from meshcast.validation.reference import functions  # noqa: E402
from meshcast.validation.reference.context_parallel import ContextGroup, attend_by_blocks, attend_by_rows  # noqa: E402


@pytest.mark.parametrize(
    ("scheme", "held"), [("all-gather", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_positions_of_each_rank(scheme: str, held: list[list[int]]) -> None:
    positions = torch.arange(8)
    assert [ContextGroup(2, rank, None, scheme).own_positions(positions).tolist() for rank in (0, 1)] == held
    assert ContextGroup().own_positions(positions).tolist() == positions.tolist()


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("attend", [attend_by_rows, attend_by_blocks])
def test_attention_of_own_queries(attend: Any, ranks: int, keys: int) -> None:
    s, d = 24 * ranks, 8
    whole = [torch.randn(2, heads, s, d, dtype=torch.float64, requires_grad=True) for heads in (4, keys, keys)]
    grad = torch.randn(2, s, 4 * d, dtype=torch.float64)
    wanted = functions.attention(*whole)
    wanted.backward(grad)
    expected = [one.grad.clone() for one in whole]
    total: list[Any] = [torch.zeros_like(one) for one in whole]
    for rank in range(ranks):
        group = ContextGroup(ranks, rank)
        q, k, v = (one.detach().requires_grad_() for one in whole)
        found = attend(group.own_positions(q, 2), k, v, group.rows(s))
        torch.testing.assert_close(found, group.own_positions(wanted, 1))
        found.backward(group.own_positions(grad, 1))
        for one, part in zip(total, (q, k, v), strict=True):
            one += part.grad
    for one, want in zip(total, expected, strict=True):
        torch.testing.assert_close(one, want)


def test_gathered_positions_are_in_order() -> None:
    """With nothing sent a rank receives its own shard from all."""
    group = ContextGroup(2, 0)
    shard = torch.tensor([[0, 1, 6, 7]])
    assert group.all_gather(shard).tolist() == [[0, 1, 0, 1, 6, 7, 6, 7]]
    assert group.reduce_scatter(torch.arange(8)[None]).tolist() == [[0, 1, 6, 7]]

"""Values that a traced pass knows: what follows from token ids is computed, and routers choose evenly."""

from __future__ import annotations

import pytest

from meshcast.simulator.models.trace.folding import fold

torch = pytest.importorskip("torch", reason="a module is traced by torch")

from torch import nn  # noqa: E402

from meshcast.simulator.models.trace.tracer import TOKENS, trace  # noqa: E402

HIDDEN, EXPERTS = 32, 8


class LoopedExperts(nn.Module):
    """Experts as many write them: a loop over those that any token has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, result = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        loads = nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).tolist()
        for number, (expert, load) in enumerate(zip(self.experts, loads, strict=True)):
            places, slots = torch.where(chosen == number)
            assert len(places) == load
            result.index_add_(0, places, expert(rows[places]) * weights[places, slots, None])
        return result.view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, HIDDEN)
        self.layers = nn.ModuleList(LoopedExperts() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = (ids != 0).sum(1)
        assert lengths.max().item() == ids.shape[1]
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.table.weight.T


def test_experts_in_a_loop_have_even_loads() -> None:
    record = fold(trace(lambda _: Model()))
    assert record.parameters == sum(parameter.numel() for parameter in Model().parameters())
    products = HIDDEN * EXPERTS + 2 * HIDDEN * HIDDEN
    assert record.flops == 2 * TOKENS * (2 * products + HIDDEN * 1000)


def test_values_that_no_one_knows_are_not_read() -> None:
    class Reads(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids) * self.table(ids).sum().item()

    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        trace(lambda _: Reads())


def test_what_is_written_over_is_no_longer_known() -> None:
    class Writes(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            counts = torch.zeros(4)
            assert counts.sum().item() == 0
            counts[:2].copy_(self.table(ids)[0, 0, :2])
            return self.table(ids) * counts.sum().item()

    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        trace(lambda _: Writes())


def test_modules_are_cast_where_they_are_made() -> None:
    class Cast(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN).to(torch.bfloat16)

    assert trace(lambda _: Cast()).parameters["norm.weight"] == (HIDDEN,)

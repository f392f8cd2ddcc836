"""Stages of the reference model, built from a plan.

The weights come from a seed and a parameter's name, made whole and then cut, so that every plan holds the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from simulator.plan.plan import Plan
from validation.measurements.device import DTYPES
from validation.reference import functions
from validation.reference.layers import ROPE_BASE, ColumnLinear, Embedding, Layer, Norm, Positions, mark
from validation.reference.parallel import TensorGroup
from validation.reference.supported import check

SPREAD = 0.02
"""Standard deviation of the weights at the start."""


class Stage(nn.Module):
    """A virtual pipeline stage: some layers, in front of them the embedding and behind them the output layer where it
    is the first or the last. Its parameters' names are those of the whole model (`layers.7.mlp.up.weight`).
    """

    def __init__(self, plan: Plan, layers: range, first: bool, last: bool, tensor: TensorGroup) -> None:
        super().__init__()
        model = plan.job.model
        self.first, self.last, self.tensor, self.tied = first, last, tensor, model.tied
        sequence = plan.job.batch.sequence
        assert sequence is not None
        table = None
        if model.positions == "rope":
            table = functions.rope_table(sequence, model.rope_width, ROPE_BASE, torch.get_default_device())
        if first or (last and model.tied):
            self.embedding = Embedding(model, plan.vocab, tensor)
        if first and model.positions == "learned":
            self.positions = Positions(model, tensor)
        again = _recomputed(plan, layers)
        self.layers = nn.ModuleDict({str(i): Layer(model, i, tensor, table, again[i]) for i in layers})
        if last:
            self.norm = Norm(model, tensor)
            if not model.tied:
                self.head = ColumnLinear(model.hidden, (plan.vocab,), False, tensor)
        self.cuts = {name: param.cut for name, param in self.named_parameters()}  # type: ignore[attr-defined]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """From ids [b, s] or the stage before to the next stage, or to logits [b, s, v/tp]; with targets to the loss,
        so that no caller holds the logits."""
        if self.first:
            x = self.embedding(x)
            if hasattr(self, "positions"):
                x = self.positions(x)
        for layer in self.layers.values():
            x = layer(x)
        if not self.last:
            return x
        logits = self.logits(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)

    def logits(self, x: Tensor) -> Tensor:
        """Of what the last norm gives."""
        if self.tied:
            return functions.linear(self.tensor.enter(x), self.embedding.weight)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the tokens of the cross-entropy, see `functions.cross_entropy`."""
        return functions.cross_entropy(logits, targets, self.tensor)

    def mark(self) -> None:
        """Notes again on the parameters what a rank holds of them, after a wrapper put others in their place."""
        for name, param in self.named_parameters():
            mark(param, self.cuts[name])
            if name == "embedding.weight" and not self.first:
                param.counted = False  # type: ignore[attr-defined]


def build(
    plan: Plan,
    stage: int | None,
    tensor: TensorGroup,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Stage:
    """The virtual stage number `stage`, or the whole model as one stage where that is None, with its first weights.

    dtype: of the weights, if not the plan's. Raises PlanError for what the reference model lacks.
    """
    check(plan)
    last = plan.shape.stages - 1
    layers = range(plan.job.model.layers) if stage is None else plan.layers_of(stage)
    with torch.device(device):
        made = Stage(plan, layers, stage in (None, 0), stage in (None, last), tensor)
    made.to(dtype or DTYPES[plan.job.framework.weights])
    made.mark()
    with torch.no_grad():
        for name, param in made.named_parameters():
            param.copy_(
                made.cuts[name].part(whole(name, made.cuts[name].whole(param.shape), made.cuts[name].mean, device))
            )
    return made


def one_table(stages: Iterable[Stage]) -> None:
    """Where one device holds the first and the last stage, these use one table if the model ties them."""
    ends = [stage for stage in stages if stage.tied and stage.first != stage.last]
    if len(ends) == 2:
        first, last = sorted(ends, key=lambda stage: stage.last)
        last.embedding = first.embedding


def whole(name: str, shape: tuple[int, ...], mean: float, device: torch.device) -> Tensor:
    """The values in fp32 that the parameter `name` of the whole model starts with."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device).mul_(SPREAD).add_(mean)


def tied(stage: Stage) -> nn.Parameter | None:
    """The table whose gradient is to be summed over the first and the last stage, where each has a copy."""
    return stage.embedding.weight if stage.tied and stage.first != stage.last and (stage.first or stage.last) else None


def _recomputed(plan: Plan, layers: range) -> dict[int, str]:
    """What each layer computes again, see `Layer`."""
    if any(scheme.use == "memory/recompute-selective" for scheme in plan.schemes):
        return dict.fromkeys(layers, "core")
    full = next((scheme for scheme in plan.schemes if scheme.use == "memory/recompute-full"), None)
    if full is None:
        return dict.fromkeys(layers, "")
    most = len(layers) if full.options.layers is None else full.options.layers
    return {layer: "layer" if i < most else "" for i, layer in enumerate(layers)}

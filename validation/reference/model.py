"""The reference model, a plain PyTorch transformer: its pipeline stages, built from a plan.

Initial weights depend on a parameter's name only. A parameter is initialised whole, then sharded, so every plan trains
the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshcast.simulator.plan.plan import Plan
from meshcast.validation.measurements.device import DTYPES
from meshcast.validation.reference import functions
from meshcast.validation.reference.context_parallel import WHOLE_SEQUENCES, ContextGroup
from meshcast.validation.reference.layers import ROPE_BASE, ColumnLinear, Embedding, Layer, Norm, Positions
from meshcast.validation.reference.sharded_parameter import attach_sharding
from meshcast.validation.reference.supported import check as check
from meshcast.validation.reference.supported import check_distributed
from meshcast.validation.reference.tensor_parallel import ONE_RANK, AxisGroup, TensorGroup

INITIAL_STD = 0.02
"""Standard deviation of the initial weights."""


class Stage(nn.Module):
    """A virtual pipeline stage: a range of layers, the embedding if it is first and the output layer if it is last.

    Its parameters have the names that they have in the whole model (`layers.7.mlp.up.weight`).
    """

    def __init__(
        self,
        plan: Plan,
        layers: range,
        first: bool,
        last: bool,
        tensor: TensorGroup,
        context: ContextGroup = WHOLE_SEQUENCES,
        expert: AxisGroup = ONE_RANK,
    ) -> None:
        super().__init__()
        model = plan.job.model
        self.first, self.last, self.tensor, self.tied = first, last, tensor, model.tied
        sequence = plan.job.batch.sequence
        assert sequence is not None
        table = None
        if model.positions == "rope":
            table = functions.rope_table(sequence, model.rope_width, ROPE_BASE, torch.get_default_device())
            table = context.own_positions(table)
        if first or (last and model.tied):
            self.embedding = Embedding(model, plan.model_parts.vocab, tensor)
        if first and model.positions == "learned":
            self.positions = Positions(model, tensor, context)
        recompute = _recomputation_of_layers(plan, layers)
        self.layers = nn.ModuleDict(
            {str(i): Layer(model, i, tensor, context, expert, table, recompute[i]) for i in layers}
        )
        if last:
            self.norm = Norm(model, tensor)
            if not model.tied:
                self.head = ColumnLinear(model.hidden, (plan.model_parts.vocab,), False, tensor)
        self.shardings = {name: param.sharding for name, param in self.named_parameters()}  # type: ignore[attr-defined]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Computes the next stage's input; on the last stage the logits [b, s, v/tp], or the loss if there are targets.

        x: token ids [b, s] for the first stage, otherwise the previous stage's output.
        """
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
        """Computes vocabulary-parallel logits [b, s, v/tp] from the output of the final norm."""
        if self.tied:
            return functions.linear(self.tensor.enter_region(x), self.embedding.weight)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Computes the mean cross-entropy over the tokens."""
        return functions.cross_entropy(logits, targets, self.tensor)

    def reattach_shardings(self) -> None:
        """Attaches its sharding to every parameter; needed again after FSDP has replaced the parameters."""
        for name, param in self.named_parameters():
            attach_sharding(param, self.shardings[name])
            if name == "embedding.weight" and not self.first:
                param.in_norm = False  # type: ignore[attr-defined]


def build_stage(
    plan: Plan,
    stage: int | None,
    tensor: TensorGroup,
    device: torch.device,
    dtype: torch.dtype | None = None,
    context: ContextGroup = WHOLE_SEQUENCES,
    expert: AxisGroup = ONE_RANK,
) -> Stage:
    """Builds a virtual stage with its initial weights.

    stage: its number; None: the whole model as a single stage.
    dtype: number format of the weights; None: the plan's.
    Raises PlanError for a plan that the reference model does not support.
    """
    check_distributed(plan)
    last = plan.shape.stages - 1
    layers = range(plan.job.model.layers) if stage is None else plan.model_parts.layers_of(stage)
    with torch.device(device):
        stage_module = Stage(plan, layers, stage in (None, 0), stage in (None, last), tensor, context, expert)
    stage_module.to(dtype or DTYPES[plan.job.framework.weights])
    stage_module.reattach_shardings()
    with torch.no_grad():
        for name, param in stage_module.named_parameters():
            sharding = stage_module.shardings[name]
            whole = initial_values(name, sharding.whole_shape(param.shape), sharding.mean, device)
            param.copy_(sharding.shard_of(whole))
    return stage_module


def share_tied_embedding(stages: Iterable[Stage]) -> None:
    """Makes the first and the last stage share a tied embedding table, if a device holds both."""
    ends = [stage for stage in stages if stage.tied and stage.first != stage.last]
    if len(ends) == 2:
        first, last = sorted(ends, key=lambda stage: stage.last)
        last.embedding = first.embedding


def initial_values(name: str, shape: tuple[int, ...], mean: float, device: torch.device) -> Tensor:
    """Draws the initial values of a whole (unsharded) parameter in fp32, seeded by its name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device).mul_(INITIAL_STD).add_(mean)


def tied_embedding(stage: Stage) -> nn.Parameter | None:
    """Returns the copy of a tied embedding whose gradient is all-reduced between the first and last stage, or None."""
    return stage.embedding.weight if stage.tied and stage.first != stage.last and (stage.first or stage.last) else None


def _recomputation_of_layers(plan: Plan, layers: range) -> dict[int, str]:
    """Returns what each layer recomputes, as `Layer` names it, by layer number."""
    if any(scheme.use == "memory/recompute-selective" for scheme in plan.schemes):
        return dict.fromkeys(layers, "core")
    full = next((scheme for scheme in plan.schemes if scheme.use == "memory/recompute-full"), None)
    if full is None:
        return dict.fromkeys(layers, "")
    most = len(layers) if full.options.layers is None else full.options.layers
    return {layer: "layer" if i < most else "" for i, layer in enumerate(layers)}

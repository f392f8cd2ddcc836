"""Parameters of the reference model, each with its sharding over the tensor- and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshcast.hardware.records import dataclass
from meshcast.validation.reference.tensor_parallel import ONE_RANK, AxisGroup, TensorGroup


@dataclass(frozen=True)
class ParameterSharding:
    """How a parameter is divided over the tensor-parallel ranks, and dimension 0 over the expert-parallel ranks.

    tensor: the tensor-parallel ranks.
    dim: dimension sharded over them; None: every rank holds the whole parameter.
    sections: sizes of concatenated weights along `dim` (queries, keys and values; gate and up), each sharded by itself.
    mean: mean of the initial values.
    expert: the expert-parallel ranks, for weights of experts.
    """

    tensor: TensorGroup
    dim: int | None = None
    sections: tuple[int, ...] = ()
    mean: float = 0.0
    expert: AxisGroup = ONE_RANK

    @property
    def replicated(self) -> bool:
        """Whether several ranks each hold the whole parameter."""
        return self.dim is None and self.tensor.size > 1

    @property
    def partial_gradient(self) -> bool:
        """Whether a rank's gradient covers only its positions and must be all-reduced (sequence parallelism)."""
        return self.replicated and self.tensor.sequence

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole parameter, from the shape of a shard."""
        sizes = [sum(self.sections) if i == self.dim else size for i, size in enumerate(shape)]
        return sizes[0] * self.expert.size, *sizes[1:]

    def shard_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of the whole parameter."""
        if self.expert.size > 1:
            whole = whole.chunk(self.expert.size)[self.expert.rank]
        if self.dim is None or self.tensor.size == 1:
            return whole
        sections = whole.split(self.sections, self.dim)
        return torch.cat(
            [section.chunk(self.tensor.size, self.dim)[self.tensor.rank] for section in sections], self.dim
        )


def sharded_parameter(sharding: ParameterSharding, *shape: int) -> nn.Parameter:
    """Returns an uninitialised parameter; `shape` is that of the whole, the result has this rank's shard."""
    local = [size // sharding.tensor.size if i == sharding.dim else size for i, size in enumerate(shape)]
    local[0] //= sharding.expert.size
    param = nn.Parameter(torch.empty(local))
    attach_sharding(param, sharding)
    return param


def attach_sharding(parameter: Tensor, sharding: ParameterSharding) -> None:
    """Sets the attributes that the trainer reads from a parameter.

    sharding: its sharding.
    partial_gradient: see `ParameterSharding.partial_gradient`.
    in_norm: whether this rank adds it to the gradient norm; of replicas rank 0 does.
    """
    parameter.sharding = sharding  # type: ignore[attr-defined]
    parameter.partial_gradient = sharding.partial_gradient  # type: ignore[attr-defined]
    parameter.in_norm = not sharding.replicated or sharding.tensor.rank == 0  # type: ignore[attr-defined]


def holds_experts(param: Tensor) -> bool:
    """Returns whether expert-parallel ranks hold different experts in this parameter."""
    sharding: ParameterSharding = param.sharding  # type: ignore[attr-defined]
    return sharding.expert.size > 1

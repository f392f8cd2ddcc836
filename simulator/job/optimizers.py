"""Optimizers by the states that they keep for a tensor.

States of 8 or 4 bits are quantised in blocks, each with an fp32 maximum; tensors below `SMALL` elements keep theirs in
fp32. Adafactor keeps sums over rows and over columns of a matrix, and all elements of other tensors; where the elements
of tensors are shared out among ranks, they are flat, and nothing is factored.

Muon has one state of matrices of linear layers, and Adam's two of all other weights. SOAP has squares of both sides
beside two, as has Shampoo for the blocks of a matrix; Dion has a basis beside one.

Sources: bitsandbytes 0.49.2, bitsandbytes/optim/optimizer.py (`min_8bit_size`, blocks of 256); torchao,
torchao/optim/adam.py (4,096 elements, blocks of 256 and 128); huggingface/transformers v5.24.0,
src/transformers/optimization.py (Adafactor, without a first moment).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, model_validator
from meshcast.simulator.ir.modules import MatrixUpdate
from meshcast.simulator.ir.ops import BYTES, Param

OptimizerName = Literal[
    "adam",
    "adam-8bit",
    "adam-4bit",
    "ademamix",
    "ademamix-8bit",
    "lion",
    "lion-8bit",
    "sgd",
    "adafactor",
    "muon",
    "dion",
    "soap",
    "shampoo",
]

SMALL = 4096
"""Elements of a tensor below which its states are not quantised."""


class OptimizerStates(NamedTuple):
    """The states of an optimizer.

    tensors: states that are as large as the tensor.
    nbytes: of an element of a state, scales included, where it is quantised; 0: as the moments.
    factored: whether sums over rows and columns stand for the elements of a matrix.
    of_matrix: states of the matrices of linear layers that are as large as these; None: as of other tensors.
    squares: of such a matrix the number of squares in fp32 of each side, or of that of each of its blocks.
    blocks: whether a side that is larger than `largest` is cut into blocks; otherwise it has no squares.
    largest: side of a square.
    basis: whether a basis of the shorter side is kept, of as many columns.
    passes: bytes per element that operations read and write beside gradients, weights and states, each a kernel.
    """

    tensors: int
    nbytes: float = 0.0
    factored: bool = False
    of_matrix: int | None = None
    squares: int = 0
    blocks: bool = False
    largest: int = 0
    basis: bool = False
    passes: tuple[int, int] = (0, 0)

    def count_bytes(self, param: Param, shards: float, moments: str, options: MatrixOptions) -> float:
        """Returns the bytes of all states of a parameter, of which a rank updates `size` / `shards` elements.

        moments: their format.
        options: of the update of matrices.
        """
        if self.of_matrix is None or not param.matrix:
            return self.tensor_bytes(param.size, param.shape, shards, moments)
        states = OptimizerStates(self.of_matrix, self.nbytes).tensor_bytes(param.size, param.shape, shards, moments)
        return states + param.size / param.matrix / shards * self._factor_bytes(param.shape, moments, options)

    def _factor_bytes(self, shape: tuple[int, ...], moments: str, options: MatrixOptions) -> float:
        """Returns the bytes of the factors of a matrix."""
        if self.basis:
            return BYTES[moments] * max(shape) * math.ceil(options.rank * min(shape))
        largest, sides = options.largest or self.largest, shape
        if not self.squares:
            return 0.0
        number = 1
        if self.blocks:
            number = math.prod(math.ceil(side / largest) for side in sides)
            sides = tuple(min(side, largest) for side in sides)
        return BYTES["fp32"] * self.squares * number * sum(side**2 for side in sides if side <= largest)

    def element_bytes(self, moments: str) -> float:
        """Returns the bytes of all states for an element of a large tensor. moments: their format."""
        return self.tensors * (self.nbytes or BYTES[moments])

    def least_bytes(self, moments: str) -> float:
        """Returns the bytes of all states for an element of whichever large tensor has fewest. moments: as before."""
        fewest = self.tensors if self.of_matrix is None else min(self.tensors, self.of_matrix)
        return OptimizerStates(fewest, self.nbytes).element_bytes(moments)

    def mean_bytes(self, moments: str, share: float) -> float:
        """Returns the bytes of all states for an element in the mean.

        moments: their format.
        share: of the elements that are in matrices of linear layers.
        """
        if self.of_matrix is None:
            return self.element_bytes(moments)
        of_matrix = OptimizerStates(self.of_matrix, self.nbytes)
        return share * of_matrix.element_bytes(moments) + (1 - share) * self.element_bytes(moments)

    def tensor_bytes(self, size: float, shape: tuple[int, ...], shards: float, moments: str) -> float:
        """Returns the bytes of all states of a tensor, of which a rank updates `size` / `shards` elements.

        shape: of a matrix.
        moments: their format.
        """
        elements = size / shards
        if self.factored:
            return BYTES["fp32"] * (elements if shards > 1 or len(shape) < 2 else size / shape[0] + size / shape[1])
        if self.nbytes and elements < SMALL:
            return elements * self.tensors * BYTES["fp32"]
        return elements * self.element_bytes(moments)


IN_8_BITS, IN_4_BITS = 1 + 4 / 256, 0.5 + 4 / 128

OPTIMIZER_STATES: Mapping[OptimizerName, OptimizerStates] = {
    "adam": OptimizerStates(2),
    "adam-8bit": OptimizerStates(2, IN_8_BITS),
    "adam-4bit": OptimizerStates(2, IN_4_BITS),
    "ademamix": OptimizerStates(3),
    "ademamix-8bit": OptimizerStates(3, IN_8_BITS),
    "lion": OptimizerStates(1),
    "lion-8bit": OptimizerStates(1, IN_8_BITS),
    "sgd": OptimizerStates(0),
    # Square, sum, means of rows and columns, their product, that with the gradient, norm, two scales, sum, cast, norm
    # of the weights (`Adafactor.step`).
    "adafactor": OptimizerStates(0, factored=True, passes=(40, 24)),
    "muon": OptimizerStates(2, of_matrix=1),
    "dion": OptimizerStates(2, of_matrix=1, basis=True),
    "soap": OptimizerStates(2, of_matrix=2, squares=2, largest=10_000),
    "shampoo": OptimizerStates(2, of_matrix=2, squares=2, blocks=True, largest=1_024),
}
"""The states of every optimizer; an optimizer with a single moment, as SGD with momentum or RMSprop, has those of
lion."""

Owners = Literal["owner", "exchange", "gather", "all"]


class MatrixOptions(BaseModel):
    """How an optimizer updates matrices that it treats as one; profiles of frameworks state how their programs do."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    steps: int = Field(default=5, ge=1, le=100)
    """Newton-Schulz iterations (`ns_steps` of torch.optim.Muon, `--muon-num-ns-steps` of Megatron-LM)."""
    replicas: Literal[Owners, "auto"] = "auto"
    """Which replicas compute the update of a matrix: ``owner``, the rank that has it and its states whole (layer-wise
    distributed optimizer of Megatron-Core); ``exchange``, a rank to which the others send their shards, and which sends
    them back; ``gather``, every rank whose shard it is part of; ``all``, every rank that has all states. ``auto``:
    ``exchange`` where weights are sharded, ``owner`` where only states and gradients are, otherwise ``all``."""
    cuts: bool = False
    """Ranks have contiguous shares of flat states, which cut matrices: ``auto`` is ``gather`` where weights are whole
    (`get_flat_partition` of DeepSpeed's stage_1_and_2.py)."""
    tensor: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    """Matrices that tensor ranks share: every rank gathers and computes them, a rank computes its shard of the products
    with an all-reduce in every iteration, or its shard alone (`--muon-tp-mode`)."""
    symmetric: bool = False
    """Kernels compute half of the symmetric products (`--muon-use-syrk`)."""
    nesterov: bool = True
    """The momentum looks ahead, which is one more pass over it where kernels are not compiled."""
    joined: bool = False
    """Gate and up projection are one matrix."""
    batched: bool = False
    """Equal matrices of a rank are computed by kernels over all of them; otherwise in turn."""
    together: int = Field(default=0, ge=0, le=10_000)
    """Layers whose matrices are exchanged together; 0: all matrices of a shape."""
    compiled: bool = False
    """Passes over the elements are kernels that do as much as they can; otherwise each operation is a kernel."""
    exchanged: Literal["bf16", "fp32"] = "bf16"
    """Format in which replicas exchange momentum and updates."""
    every: int = Field(default=10, ge=1, le=1_000_000)
    """Steps between decompositions of the factors of SOAP and Shampoo (`precondition_frequency`); a step has its
    share."""
    largest: int = Field(default=0, ge=0, le=1_000_000)
    """Largest side of a factor of SOAP, and side of the blocks of Shampoo (`max_precond_dim`: 10,000;
    `max_preconditioner_dim`: 1,024); 0: these."""
    rank: float = Field(default=1.0, gt=0, le=1)
    """Columns of Dion's basis over the shorter side (`rank_fraction`)."""

    def make_update(
        self, method: OptimizerName, owners: str, gradient: int, main: int, moment: float, weight: int
    ) -> MatrixUpdate:
        """Returns the update of matrices.

        gradient, main, moment, weight: bytes of an element of each; weight: 0 where no copy in the format of the
            computation is written.

        Kernels of operations (`OrthogonalizedOptimizer.step` of NVIDIA-NeMo/Emerging-Optimizers): decay of weights,
        interpolation of the momentum, that which looks ahead; norm, division, cast to bf16; cast back, two scales; sum,
        copy. Compiled ones (`muon_update_pre_orthogonalize` of microsoft/dion, dion/muon.py): momentum and cast;
        norm, division; decay and sum.
        """
        passes: tuple[tuple[float, float], tuple[float, float]]
        if self.compiled:
            passes = (gradient + moment, moment + 2), (main + 2, main + weight)
            inner, kernels, temporaries = (2.0 + 2, 2.0), (1, 2), 6.0
        else:
            ahead = (gradient + moment, main) if self.nesterov else (0, 0)
            before = main + moment + gradient + ahead[0], main + moment + ahead[1]
            passes = before, (2 * main + (main if weight else 0), main + weight)
            inner, kernels, temporaries = (4.0 + 4 + 4 + 2 + 4 + 4, 4.0 + 2 + 4 + 4 + 4), (3, 6), 8.0
        largest = self.largest or OPTIMIZER_STATES[method].largest if method in ("soap", "shampoo") else 0
        if largest:  # operations of Adam in the basis, each a kernel (`SOAP.step` of nikhilvyas/SOAP, soap.py)
            passes, kernels, temporaries = ((44.0, 32.0), (8.0 + main, 4.0 + weight)), (5, 0), 12.0
            inner = (0.0, 0.0)
        return MatrixUpdate(
            "newton-schulz" if method == "muon" else method,
            owners,
            self.tensor,
            self.steps,
            self.symmetric,
            self.joined,
            self.batched,
            self.together,
            passes,
            inner,
            kernels,
            temporaries,
            int(BYTES[self.exchanged]),
            main,
            self.every,
            largest,
            self.rank,
        )


OF_JOBS: Mapping[str, tuple[str, ...]] = {
    "muon": ("steps", "replicas", "tensor", "symmetric"),
    "dion": ("rank",),
    "soap": ("replicas", "every", "largest"),
    "shampoo": ("replicas", "every", "largest"),
}
"""Options of matrices that a job states with its optimizer."""


class OptimizerChoice(BaseModel):
    """The optimizer of a job, and how it updates matrices; what is left open is as the framework does."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: OptimizerName = "adam"
    """What updates the weights."""
    steps: int | None = Field(default=None, ge=1, le=100)
    """Newton-Schulz iterations."""
    replicas: Literal[Owners] | None = None
    """Which replicas compute the update of a matrix."""
    tensor: Literal["duplicated", "distributed", "blockwise"] | None = None
    """How tensor ranks compute matrices that they share."""
    symmetric: bool | None = None
    """Kernels compute half of the symmetric products."""
    every: int | None = Field(default=None, ge=1, le=1_000_000)
    """Steps between decompositions of factors."""
    largest: int | None = Field(default=None, ge=1, le=1_000_000)
    """Largest side of a factor."""
    rank: float | None = Field(default=None, gt=0, le=1)
    """Columns of a basis over the shorter side."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        wrong = [key for key in self.options if key not in OF_JOBS.get(self.name, ())]
        if wrong:
            able = [name for name, keys in OF_JOBS.items() if wrong[0] in keys]
            raise ValueError(f"{self.name} has no {wrong[0]}. Leave it out, or write name: {' or '.join(able)}")
        return self

    @property
    def options(self) -> dict[str, object]:
        """What the job says of the update of matrices."""
        keys = dict.fromkeys(key for keys in OF_JOBS.values() for key in keys)
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

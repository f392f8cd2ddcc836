"""Optimizers by the states that they keep for a tensor.

States of 8 or 4 bits are quantised in blocks, each with an fp32 maximum; tensors below `SMALL` elements keep theirs in
fp32. Adafactor keeps sums over rows and over columns of a matrix, and all elements of other tensors; where the elements
of tensors are shared out among ranks, they are flat, and nothing is factored.

Sources: bitsandbytes 0.49.2, bitsandbytes/optim/optimizer.py (`min_8bit_size`, blocks of 256); torchao,
torchao/optim/adam.py (4,096 elements, blocks of 256 and 128); huggingface/transformers v5.24.0,
src/transformers/optimization.py (Adafactor, without a first moment).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from meshcast.simulator.ir.ops import BYTES

OptimizerName = Literal[
    "adam", "adam-8bit", "adam-4bit", "ademamix", "ademamix-8bit", "lion", "lion-8bit", "sgd", "adafactor"
]

SMALL = 4096
"""Elements of a tensor below which its states are not quantised."""


class OptimizerStates(NamedTuple):
    """The states of an optimizer.

    tensors: states that are as large as the tensor.
    nbytes: of an element of a state, scales included, where it is quantised; 0: as the moments.
    factored: whether sums over rows and columns stand for the elements of a matrix.
    """

    tensors: int
    nbytes: float = 0.0
    factored: bool = False

    def element_bytes(self, moments: str) -> float:
        """Returns the bytes of all states for an element of a large tensor. moments: their format."""
        return self.tensors * (self.nbytes or BYTES[moments])

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
    "adafactor": OptimizerStates(0, factored=True),
}
"""The states of every optimizer; an optimizer with a single moment, as SGD with momentum or RMSprop, has those of
lion."""

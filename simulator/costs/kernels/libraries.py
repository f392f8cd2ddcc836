"""Libraries whose kernels training programs run."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

TRAINING_LIBRARIES = {
    ("attention", "volta"): "flash-2",
    ("attention", "ampere"): "flash-2",
    ("attention", "ada"): "flash-2",
    ("attention", "hopper"): "flash-3",
    ("attention", "blackwell"): "transformer-engine",
    ("grouped", "ampere"): "cutlass",
    ("grouped", "hopper"): "cutlass",
    ("grouped", "blackwell"): "transformer-engine",
}
"""Libraries of the kernels of today's training programs, by section of the cost model and GPU architecture, where
tables of measurements have them; otherwise the mean of all libraries is used, most of which serve inference."""

AttentionLibrary = Literal["flash-1", "flash-2", "flash-3", "triton", "cudnn"]
"""Libraries of fused attention: FlashAttention 1 to 3, FlashAttention in Triton as of 2022 and 2023, cuDNN."""


class Relative(NamedTuple):
    """A library known by its rate against one that was measured.

    library: the measured one.
    rate: rate of its kernels against that.
    sigma: standard deviation of the logarithm of `rate` over shapes.
    """

    library: str
    rate: float
    sigma: float


def _relative(library: str, slowest: float, fastest: float) -> Relative:
    """The geometric middle of a published range of ratios, taken for nine of ten shapes."""
    return Relative(library, 1 / math.sqrt(slowest * fastest), math.log(fastest / slowest) / 3.29)


RELATIVE_LIBRARIES = {
    # FlashAttention-2 is 1.7 to 3.0 times faster than FlashAttention and 1.3 to 2.5 times faster than FlashAttention in
    # Triton, forward and backward, head widths 64 and 128, 512 to 16k positions (arXiv 2307.08691, section 4.1).
    "flash-1": _relative("flash-2", 1.7, 3.0),
    "triton": _relative("flash-2", 1.3, 2.5),
}
"""Libraries of attention without measurements of their own; kernels of neither use what Hopper's tensor cores added."""


def attention_library(name: str, architecture: str) -> Relative:
    """The measured library that stands for `name`; empty: that of today's training programs on the architecture."""
    # On Blackwell Transformer Engine runs attention by cuDNN.
    same = not name or (name == "cudnn" and architecture == "blackwell")
    usual = Relative(TRAINING_LIBRARIES.get(("attention", architecture), "") if same else name, 1.0, 0.0)
    return RELATIVE_LIBRARIES.get(name, usual)

"""Model FLOPs of training, in each convention that publications use.

Conventions differ by up to half at long sequences, so a FLOP/s or MFU figure means nothing without the name of
its convention. Every function here takes ``(model, seq)`` and returns the FLOPs of *one token* of one training
step, forward and backward, where each sequence holds `seq` tokens; a multiply-add is 2 FLOPs. N is the number
of parameters, L layers, h hidden, a heads, d the width of a head (a d = H Q in the words of PaLM), T = seq.

Measured throughput of all GPUs in tokens/s, times such a figure, over the peak of all GPUs is the MFU.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.models.model import Model


def forward_matmul_flops(model: Model, tokens: int, seq: int, causal: bool) -> dict[str, int]:
    """FLOPs of all matrix products of one forward pass over `tokens` tokens, by part, summed over all layers.

    A linear layer from m to n features does 2 tokens m n. Attention (scores and weighted values together) does
    4 tokens seq a d, half of it when `causal`. ``head`` is the output layer; looking rows up in the embedding
    is no product. Nothing else is counted: no biases, norms, activations, softmax. Over a training step
    without recomputation the products do exactly three times this (input and weight gradients cost as much as
    the forward pass each), if the backward pass of attention is counted without its own recomputation.

    Args:
        tokens: tokens of the pass, a multiple of `seq` for whole sequences.
        seq: tokens of each sequence.
        causal: count only pairs that the causal mask lets through, (seq - 1)/2 taken as seq/2.
    """
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 3 if model.gated else 2
    return {
        "qkv": model.layers * 2 * tokens * h * (q + 2 * kv),
        "attention": model.layers * (2 if causal else 4) * tokens * seq * q,
        "proj": model.layers * 2 * tokens * q * h,
        "mlp": model.layers * matrices * 2 * tokens * h * model.ffn,
        "head": 2 * tokens * h * model.vocab,
    }


def six_n(model: Model, seq: int) -> float:
    """6 N. All parameters count, embeddings and positions too; attention does not, so `seq` changes nothing.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), there without embeddings; Hoffmann et al. 2022
    (arXiv 2203.15556) with them, as here.
    """
    return 6.0 * model.parameters


def palm(model: Model, seq: int) -> float:
    """6 N + 12 L a d T: attention in full, without halving for the causal mask. All parameters count.

    Source: Chowdhery et al. 2022 (PaLM), appendix B, arXiv 2204.02311. nanoGPT leaves learned positions out of
    N, torchtitan an untied input embedding.
    """
    return six_n(model, seq) + 12.0 * model.layers * model.heads * model.head_dim * seq


def causal(model: Model, seq: int) -> float:
    """Three times the matrix products of the forward pass, attention halved: 6 (N in products) + 6 L a d T.

    The output layer counts, tied or not; the input embedding, positions, norms and biases do not. It is the
    least work that the model needs. Source: ``num_floating_point_operations`` of Megatron-LM (d98e8a64dd).
    """
    return 3.0 * sum(forward_matmul_flops(model, 1, seq, causal=True).values())


def megatron_2021(model: Model, seq: int, recompute: bool = True) -> float:
    """96 L h^2 (1 + T/(6 h) + V/(16 L h)): attention in full, the layers' forward pass done twice.

    With `recompute` (the paper's case) these are *hardware* FLOPs: factor 4 for the layers, 3 for the output
    layer, which is not recomputed. Without it, factor 3 for both. The input embedding does not count, the
    output layer does. The formula holds for a GPT (a d = h, f = 4 h, no gate, a = k); for other shapes the
    products are counted with the same factors, which gives the formula again for a GPT.

    Source: Narayanan et al. 2021, equation 3, arXiv 2104.04473.
    """
    parts = forward_matmul_flops(model, 1, seq, causal=False)
    head = parts.pop("head")
    return (4.0 if recompute else 3.0) * sum(parts.values()) + 3.0 * head


def mosaic_mfu(model: Model, seq: int) -> float:
    """3 (2 N + 4 L h T). All parameters count; equal to `palm` where a d = h.

    Source: MosaicML llm-foundry, scripts/train/benchmarking/README.md.
    """
    return 3.0 * _mosaic_forward(model, seq)


def mosaic_hfu(model: Model, seq: int, flash: bool = False) -> float:
    """4 (2 N + 4 L h T), hardware FLOPs when every activation is recomputed. All parameters count.

    flash: count attention 5 times, for a fused kernel computes the scores once more in its backward pass; the
    README calls this strictly right and prints its tables without it.

    Source: as `mosaic_mfu`.
    """
    return 4.0 * _mosaic_forward(model, seq) + (4.0 * model.layers * model.hidden * seq if flash else 0.0)


def _mosaic_forward(model: Model, seq: int) -> float:
    return 2.0 * model.parameters + 4.0 * model.layers * model.hidden * seq


CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "six_n": six_n,
    "palm": palm,
    "causal": causal,
    "megatron_2021": megatron_2021,
    "mosaic_mfu": mosaic_mfu,
    "mosaic_hfu": mosaic_hfu,
}
"""FLOPs per token by the name of the convention. `megatron_2021` and `mosaic_hfu` include recomputation."""


def step_flops(convention: str, model: Model, seq: int, sequences: int) -> float:
    """FLOPs of one optimizer step over `sequences` (the global batch) of `seq` tokens."""
    return CONVENTIONS[convention](model, seq) * seq * sequences

"""Model FLOPs of training, in each convention that publications use.

Conventions differ by up to half at long sequences, so a FLOP/s or MFU figure means nothing without the name of
its convention. Every function here takes ``(model, seq)`` and returns the FLOPs of *one token* of one training
step, forward and backward, where each sequence holds `seq` tokens; a multiply-add is 2 FLOPs. N is the number
of parameters, L layers, h hidden, a heads, d the width of a head (a d = H Q in the words of PaLM), T = seq.

What the papers of these formulas did not have is counted alike in all of them:

- experts: N are the *active* parameters (`Model.active_parameters`: the router and shared experts in full, top_k of the
  routed ones), for a token does no work in the others; work on padding (`MoE.capacity`) is no work of the model;
- latent attention: a d is the mean of the width of queries and keys, nope and rope parts, and that of values, for the
  scores are products over the one and the weighted values over the other;
- a window of w < T tokens: in the layers that have it `palm` counts w in place of T, `causal` the pairs that mask and
  window let through; the other conventions count all pairs, as the kernels of their time computed them;
- towers: N counts one of them, for a token passes only its own, and attention there is among the T / towers tokens of
  the tower;
- multi-token prediction: its layers count among L, their parameters in N. Only formulas of products (`causal`,
  `megatron_2021`) see that they run through the output layer again.

Measured throughput of all GPUs in tokens/s, times such a figure, over the peak of all GPUs is the MFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from simulator.models.model import Model

if TYPE_CHECKING:
    from simulator.models.adapters import Adapters

PARTS = ("qkv", "attention", "proj", "mlp", "router", "experts", "shared", "mtp", "head")
"""What `forward_matmul_flops` tells apart."""


def forward_matmul_flops(model: Model, tokens: int, seq: int, causal: bool) -> dict[str, float]:
    """FLOPs of all matrix products of one forward pass over `tokens` tokens, by part, summed over all layers.

    A linear layer from m to n features does 2 tokens m n. The parts:

    - ``qkv``: from the layer's input to queries, keys and values, with `mla` down to the latents and up again;
    - ``attention``: scores (2 tokens seq a d) and weighted values (as much; with `mla` the widths differ), half of it
      when `causal`, and in a layer with a window of w < seq tokens (2 w - w^2/seq)/seq of that half;
    - ``proj``: attention's output layer;
    - ``mlp``: of layers without experts;
    - ``router``, ``experts``, ``shared``: of layers with experts. A token passes top_k routed experts, times the
      capacity where tokens are dropped or padded to it;
    - ``mtp``: the projections of multi-token prediction from 2 h to h. Its layers count in the parts above;
    - ``head``: the output layer, once more for each multi-token prediction. Looking rows up in the embedding is no
      product.

    Nothing else is counted: no biases, norms, activations, softmax. Over a training step without recomputation the
    products do exactly three times this (input and weight gradients cost as much as the forward pass each), if the
    backward pass of attention is counted without its own recomputation.

    In a tower each token is among `seq` / towers others; all towers together have all tokens.

    Args:
        tokens: tokens of the pass, a multiple of `seq` for whole sequences.
        seq: tokens of each sequence.
        causal: count only pairs that the causal mask and the window let through, (seq - 1)/2 taken as seq/2.
            Otherwise all pairs, as kernels do that mask afterwards.
    """
    h = model.hidden
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    for (moe, slides), among, layers in _kinds(model, seq):
        seen = 2 * among if not causal else _half(among, model.window) if slides and model.window else among
        parts["attention"] += layers * tokens * seen * (model.query_width + model.output_width)
        parts["qkv"] += layers * 2 * tokens * _qkv_weights(model)
        parts["proj"] += layers * 2 * tokens * model.output_width * h
        if moe and model.moe:
            passes = model.moe.top_k * (model.moe.capacity or 1)
            parts["router"] += layers * 2 * tokens * h * model.moe.experts
            parts["experts"] += layers * passes * _mlp(model, tokens, model.moe.expert_ffn)
            parts["shared"] += layers * _mlp(model, tokens, model.moe.shared_ffn)
        else:
            parts["mlp"] += layers * _mlp(model, tokens, model.dense_ffn)
    parts["mtp"] = model.mtp * 2 * tokens * 2 * h * h
    parts["head"] = (1 + model.mtp) * 2 * tokens * h * model.vocab
    return parts


def _kinds(model: Model, seq: int) -> Iterator[tuple[tuple[bool, bool], float, int]]:
    """The kinds of layers (`Model.kind`) that a token passes, among how many tokens it is there, and how many layers
    there are of each, those of multi-token prediction included."""
    trunk = Counter(model.kind(model.trunk + layer) for layer in range(model.layers))
    trunk += Counter({model.kind(model.layers - 1): model.mtp})
    for kinds, among in ((Counter(map(model.kind, range(model.tower_layers))), seq / model.towers), (trunk, seq)):
        for kind, layers in kinds.items():
            yield kind, among, layers


def _half(seq: float, window: int) -> float:
    """Twice the mean number of tokens that a token attends to under the causal mask and a window; seq without one."""
    return 2 * window - window * window / seq if window < seq else seq


def _mlp(model: Model, tokens: int, ffn: int) -> int:
    return (3 if model.gated else 2) * 2 * tokens * model.hidden * ffn


def _qkv_weights(model: Model) -> int:
    """Elements of the matrices that make queries, keys and values."""
    h, mla = model.hidden, model.mla
    if mla is None:
        return h * (model.query_width + model.key_width + model.value_width)
    rank = mla.q_lora_rank
    queries = h * rank + rank * model.query_width if rank else h * model.query_width
    return queries + h * (mla.kv_lora_rank + mla.qk_rope) + mla.kv_lora_rank * model.heads * (mla.qk_nope + mla.v)


def six_n(model: Model, seq: int) -> float:
    """6 N. All active parameters count, embeddings and positions too; attention does not, so `seq` changes nothing.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), there without embeddings; Hoffmann et al. 2022
    (arXiv 2203.15556) with them, as here.
    """
    return 6.0 * model.active_parameters


def palm(model: Model, seq: int) -> float:
    """6 N + 12 L a d T: attention in full, without halving for the causal mask. All active parameters count.

    Source: Chowdhery et al. 2022 (PaLM), appendix B, arXiv 2204.02311. nanoGPT leaves learned positions out of
    N, torchtitan an untied input embedding.
    """
    seen = sum(
        layers * (min(among, model.window or among) if slides else among)
        for (_, slides), among, layers in _kinds(model, seq)
    )
    return six_n(model, seq) + 6.0 * seen * (model.query_width + model.output_width)


def causal(model: Model, seq: int) -> float:
    """Three times the matrix products of the forward pass, attention halved: 6 (N in products) + 6 L a d T.

    The output layer counts, tied or not; the input embedding, positions, norms and biases do not, nor do experts that
    a token does not pass. It is the least work that the model needs. Source: ``num_floating_point_operations`` of
    Megatron-LM (d98e8a64dd).
    """
    return 3.0 * sum(_needed(model, seq, causal=True).values())


def megatron_2021(model: Model, seq: int, recompute: bool = True) -> float:
    """96 L h^2 (1 + T/(6 h) + V/(16 L h)): attention in full, the layers' forward pass done twice.

    With `recompute` (the paper's case) these are *hardware* FLOPs: factor 4 for the layers, 3 for the output
    layer, which is not recomputed. Without it, factor 3 for both. The input embedding does not count, the
    output layer does. The formula holds for a GPT (a d = h, f = 4 h, no gate, a = k); for other shapes the
    products are counted with the same factors, which gives the formula again for a GPT.

    Source: Narayanan et al. 2021, equation 3, arXiv 2104.04473.
    """
    parts = _needed(model, seq, causal=False)
    head = parts.pop("head")
    return (4.0 if recompute else 3.0) * sum(parts.values()) + 3.0 * head


def _needed(model: Model, seq: int, causal: bool) -> dict[str, float]:
    """The products of one token, without padding of experts."""
    parts = forward_matmul_flops(model, 1, seq, causal)
    if model.moe and model.moe.capacity:
        parts["experts"] /= model.moe.capacity
    return parts


def mosaic_mfu(model: Model, seq: int) -> float:
    """3 (2 N + 4 L h T). All active parameters count; equal to `palm` where a d = h
    and no layer has a window.

    Source: MosaicML llm-foundry, scripts/train/benchmarking/README.md.
    """
    return 3.0 * _mosaic_forward(model, seq)


def mosaic_hfu(model: Model, seq: int, flash: bool = False) -> float:
    """4 (2 N + 4 L h T), hardware FLOPs when every activation is recomputed. All active parameters count.

    flash: count attention 5 times, for a fused kernel computes the scores once more in its backward pass; the
    README calls this strictly right and prints its tables without it.

    Source: as `mosaic_mfu`.
    """
    return 4.0 * _mosaic_forward(model, seq) + (4.0 * _layers(model) * model.hidden * seq if flash else 0.0)


def _mosaic_forward(model: Model, seq: int) -> float:
    return 2.0 * model.active_parameters + 4.0 * _layers(model) * model.hidden * seq


def _layers(model: Model) -> float:
    """L, with one of a tower for its share of a sequence."""
    return model.layers + model.tower_layers / model.towers


CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "six_n": six_n,
    "palm": palm,
    "causal": causal,
    "megatron_2021": megatron_2021,
    "mosaic_mfu": mosaic_mfu,
    "mosaic_hfu": mosaic_hfu,
}
"""FLOPs per token by the name of the convention. `megatron_2021` and `mosaic_hfu` include recomputation."""


def flops_with_adapters(convention: str, model: Model, seq: int, adapters: Adapters | None) -> float:
    """FLOPs per token in the words of `palm` or `causal` where adapters alone are trained; of all where there are none.

    Frozen weights have no gradients: 4 FLOPs a parameter that the convention counts, in place of 6. Those of adapters
    count 6, and attention as before, for its gradients all pass on.
    """
    whole = CONVENTIONS[convention](model, seq)
    if adapters is None:
        return whole
    frozen = {
        "palm": lambda: 2.0 * model.active_parameters,
        "causal": lambda: sum(n for part, n in _needed(model, seq, causal=True).items() if part != "attention"),
    }
    return whole - frozen[convention]() + 6.0 * adapters.parameters(model)


def step_flops(convention: str, model: Model, seq: int, sequences: int) -> float:
    """FLOPs of one optimizer step over `sequences` (the global batch) of `seq` tokens."""
    return CONVENTIONS[convention](model, seq) * seq * sequences

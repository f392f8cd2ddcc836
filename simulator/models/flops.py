"""Model FLOPs of training and of forward-only steps, in each convention that publications use.

Conventions differ by up to half at long sequences, so a FLOP/s or MFU figure means nothing without the name of
its convention. Every function here takes ``(model, seq)`` and returns the FLOPs of *one token* of one training
step, forward and backward, where each sequence holds `seq` tokens; a multiply-add is 2 FLOPs. N is the number
of parameters, L layers, h hidden, a heads, d the width of a head (a d = H Q in the words of PaLM), T = seq.

Features that the papers of these formulas did not have are counted the same in all conventions:

- experts: N are the *active* parameters (`Model.active_parameters`: the router and shared experts in full, top_k of the
  routed ones), because a token does no work in the others; padding (`MoEShape.capacity`) is not counted;
- latent attention: a d is the mean of the width of queries and keys (nope and rope parts) and the width of values:
  scores are products over the first, weighted values over the second;
- blocks of keys: in their layers `palm` counts the keys that a query attends to at most in place of T, `causal` the
  pairs that are left, and the scores that choose blocks; branches count with them;
- a window of w < T tokens: in layers with a window `palm` counts w in place of T, `causal` the pairs within mask and
  window; the other conventions count all pairs, as the kernels of their time computed them;
- frames of a video: tokens of a frame, and frames, by turns in place of T, in all pairs;
- chunks of c < T tokens: the same, with the length of a token's chunk (c, but less in the last) in place of w, and
  half of it for `causal`;
- branches: N counts a branch for its share of a sequence, because a token passes only its branch, and attention in a
  branch is among its tokens, all pairs of them where it is bidirectional. A linear layer from inputs such as
  patches, and a projector, count with the products of matrices. A frozen branch needs its forward pass alone;
- an encoder whose output a decoder attends to: every token counts the parameters of its stack, and attention to the
  encoder counts the tokens of the encoder in place of T, all of them. A sequence is inputs and targets together;
- multi-token prediction: its layers count in L, their parameters in N. Only the formulas that count GEMMs (`causal`,
  `megatron_2021`) include the further passes through the output layer;
- linear attention: L counts the layers with softmax attention; the state of the others, 7 FLOPs for each of its
  elements and token with a delta rule, 5 without and 2 of a convolution (`LinearAttention.update_flops`), is counted as
  below;
- state-space layers: L counts the layers with attention; the scan of a Mamba block, 7 FLOPs for each element of the
  state and token, is counted by the formulas that count GEMMs (``num_floating_point_operations`` of Megatron-LM).

MFU = tokens/s of all GPUs x FLOPs per token / peak FLOP/s of all GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from meshcast.simulator.models.block_flops import attention_to_blocks, keys_at_most, pooling
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.model import Model, count_patches
from meshcast.simulator.models.parts import MoEShape
from meshcast.simulator.models.transformer import LETTERS, LayerKind, Transformer, count_vectors, list_further_kinds

if TYPE_CHECKING:
    from meshcast.simulator.models.adapters import Adapters

PARTS = (
    *("inputs", "qkv", "attention", "proj", "mlp", "router", "experts", "shared", "mamba", "scan", "projector"),
    *("streams", "mtp", "other", "modulation", "head"),
)
"""The parts of `forward_matmul_flops`."""


def forward_matmul_flops(model: Model, tokens: int, seq: int, causal: bool) -> dict[str, float]:
    """Counts the FLOPs of all matrix products of a forward pass over `tokens` tokens, by part, summed over all layers.

    A linear layer from m to n features does 2 tokens m n. The parts:

    - ``inputs``: linear layers from inputs that are no token ids, of branches, and those to and from inputs of layers;
    - ``qkv``: projections to queries, keys and values, and to a gate of the result; with `mla` down to the latents and
      up from them;
    - ``attention``: scores (2 tokens seq a d) and weighted values (the same; with `mla` the widths differ), half of it
      if `causal`, in a layer with a window of w < seq tokens (2 w - w^2/seq)/seq of that half, in a layer with chunks
      of c tokens c/seq of it;
    - ``proj``: output layer of attention;
    - ``mlp``: MLP of layers without experts;
    - ``router``, ``experts``, ``shared``: in layers with experts. A token passes top_k routed experts, times the
      capacity factor where there is any; the router has the weights and the gate of shared experts, if there are;
    - ``mamba``, ``scan``: the projections of Mamba blocks, and their scan: 7 FLOPs for each element of the state (it
      decays, x B is added, and multiplied with C) in place of the matrix products that compute it chunk by chunk. The
      states of linear attention count in ``scan`` too, and its projections in ``qkv`` and ``proj``;
    - ``streams``: coefficients of several residual streams, and the products that mix streams; products of attention
      residuals with sums;
    - ``projector``: from branches to the trunk;
    - ``mtp``: projections of multi-token prediction from 2 h to h. Its layers count in the parts above;
    - ``other``: what a traced model has beside these parts;
    - ``modulation``: of a diffusion transformer, what a sample passes once: embedders of its conditions, and vectors
      that modulate layers;
    - ``head``: output layer, once more for each multi-token prediction, or logits of classes. The embedding lookup has
      no FLOPs, and those of a contrastive loss, which grow with the batch, do not count.

    Biases, norms, activations and softmax are not counted. A training step without recomputation has exactly three
    times these FLOPs (gradients of inputs and of weights cost a forward pass each), if the recomputation inside the
    backward kernel of attention is not counted.

    In a branch each token attends to those of the same branch; all branches together have all tokens.

    Args:
        model: the shape of the model.
        tokens: tokens of the pass, a multiple of `seq` for whole sequences.
        seq: tokens of each sequence.
        causal: count only pairs within the causal mask, window and chunks, with (seq - 1)/2 taken as seq/2. Otherwise
            all pairs, as kernels compute that mask afterwards.
    """
    trunk_tokens: float = tokens
    if model.cross_attention:
        trunk_tokens = tokens * model.trunk_tokens(seq) / seq
    parts = _trunk_flops(model, trunk_tokens, model.trunk_tokens(seq), causal)
    if model.cross_attention:
        for part, flops in _cross_flops(model, tokens, trunk_tokens, seq).items():
            parts[part] += flops
    for branch, of in _branches(model, seq):
        some = tokens * of / seq
        for part, flops in _layer_flops(branch, some, of, causal).items():
            parts[part] += flops
        parts["other"] += some * _other_flops(branch)
        parts["inputs"] += 2 * some * branch.input_products
        projected = some / of if branch.pool != "none" else some / branch.merge
        parts["projector"] += 2 * projected * branch.projector_products
    for part, flops in _end_flops(model, tokens, trunk_tokens, seq).items():
        parts[part] += flops
    return parts


def _cross_flops(model: Model, tokens: int, trunk_tokens: float, seq: int) -> dict[str, float]:
    """Counts the FLOPs of attention to an encoder, or to a text, by part: see `forward_matmul_flops`."""
    inputs, layers = (tokens - trunk_tokens) * _text_copies(model), 2 * _cross_layers(model)
    projected = trunk_tokens * model.query_width + inputs * (model.key_width + model.value_width)
    return {
        "qkv": layers * model.hidden * projected,
        "attention": 2 * trunk_tokens * _count_cross(model, seq),
        "proj": layers * trunk_tokens * model.output_width * model.hidden,
    }


def _cross_layers(model: Model) -> int:
    """Counts the layers that attend to an encoder, or to a text."""
    return model.diffusion.count_cross(model.layers) if model.diffusion else model.layers


def _text_copies(model: Model) -> int:
    """Counts the keys and values that a layer has of each token of a text."""
    return model.frames or 1 if model.diffusion and model.diffusion.cross_frames else 1


def _end_flops(model: Model, tokens: int, trunk_tokens: float, seq: int) -> dict[str, float]:
    """Counts the FLOPs of what is in front of all layers and behind them by part: see `forward_matmul_flops`."""
    if model.diffusion and model.modulation:
        patches = 2 * tokens * count_patches(model, seq) / seq * model.hidden
        of_samples = 2 * tokens / seq * model.diffusion.sample_weights(model.hidden, model.modulation)
        ends = {"inputs": patches * model.diffusion.inputs, "head": patches * model.diffusion.outputs}
        return ends | {"modulation": of_samples}
    ends = {"mtp": model.mtp * 2 * tokens * 2 * model.hidden * model.hidden}
    if model.layers:
        ends["head"] = (1 + model.mtp) * 2 * trunk_tokens * model.hidden * _head_columns(model, seq)
    return ends


def _head_columns(model: Model, seq: int) -> float:
    """Counts the columns of the products behind the final norm for each token: of those of a sequence a share."""
    square, output = model.hidden if {"transform", "dense"} & {*model.head} else 0, model.output
    if output is None:
        return model.vocab + square
    return (square + (output.classes or 0)) / (model.trunk_tokens(seq) if output.pools_states else 1)


def layer_products(model: Transformer, tokens: int) -> float:
    """Counts the FLOPs of the matrix products of all layers over one sequence, all pairs, without those of scans."""
    parts = _layer_flops(model, tokens, tokens, causal=False)
    return sum(parts.values()) - parts["scan"]


def _trunk_flops(model: Model, tokens: float, seq: float, causal: bool) -> dict[str, float]:
    """Counts the FLOPs of the trunk by part: see `forward_matmul_flops`."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    for shape, layers in _shapes(model):
        for part, flops in _layer_flops(shape, tokens, seq, causal).items():
            parts[part] += layers * flops
        parts["other"] += layers * tokens * _other_flops(shape)
        if shape.joint_attention == "last":
            joined = tokens * (1 - count_patches(model, int(seq)) / seq)
            parts["proj"] -= layers * 2 * joined * shape.output_width * shape.hidden
            parts["mlp"] -= layers * _mlp(shape, joined, shape.dense_ffn)
    if model.hyper_connections:
        parts["streams"] += tokens * model.hyper_connections.last_flops(model.hidden)
    if model.altup:
        parts["streams"] += tokens * model.altup.end_flops(model.hidden)
    if model.attention_residuals:
        parts["streams"] += tokens * model.attention_residuals.flops(model.hidden, model.layers)
    parts["other"] += tokens * (model.outside.flops if model.outside else 0)
    return parts


def _shapes(model: Model) -> list[tuple[Transformer, int]]:
    """Returns the model with its own layers, and each of its variants with the number of its layers."""
    return [(model, 1), *((variant, len(variant.numbers)) for variant in model.variants)]


def _layer_flops(model: Transformer, tokens: float, seq: float, causal: bool) -> dict[str, float]:
    """Counts the FLOPs of the layers of the trunk, or of a branch, by part: see `forward_matmul_flops`."""
    h = model.hidden
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    for kind, layers in _kinds(model):
        shape = model.shape_of(kind)
        mixing = _replaced_flops(kind, 2 * tokens * h * h)
        if kind.has_attention:
            mixing |= _attention_flops(model, kind, tokens, seq, causal)
        for part, flops in mixing.items():
            parts[part] += layers * flops
        parts["modulation"] += layers * _sample_flops(model, tokens / seq)
        if model.hyper_connections:
            parts["streams"] += layers * tokens * 2 * model.hyper_connections.flops(h)
        if model.altup:
            parts["streams"] += layers * tokens * model.altup.flops(h)
        if model.layer_input:
            parts["inputs"] += layers * 2 * tokens * 3 * h * model.layer_input.width
        if kind.linear and (linear := model.linear_attention):
            parts["qkv"] += layers * 2 * tokens * linear.input_weights(h)
            parts["scan"] += layers * tokens * linear.update_flops * linear.state
            parts["proj"] += layers * 2 * tokens * linear.value_width * h
        if kind.has_mamba and (ssm := model.ssm):
            parts["mamba"] += layers * 2 * tokens * (h * (ssm.projected + ssm.inner) + ssm.latent_weights)
            parts["scan"] += layers * 7 * tokens * ssm.inner * ssm.state
        if kind.block == "S":
            parts["proj"] += layers * 2 * tokens * shape.use_weights
        if kind.has_mlp:
            parts["mlp"] += layers * _mlp(model, tokens, shape.dense_ffn)
        if kind.experts and model.moe:
            weights = 2 * model.moe.residual + model.moe.shared_weights
            parts["router"] += layers * 2 * tokens * h * (kind.routed + model.moe.zero_experts + weights)
            parts["experts"] += layers * tokens * _expert_flops(model, model.moe)
            parts["shared"] += layers * _mlp(model, tokens, model.moe.shared_ffn)
    return parts


def _replaced_flops(kind: LayerKind, square: float) -> dict[str, float]:
    """Counts the FLOPs of the linear layers in place of blocks, by part. square: those of one."""
    places = {"attention": "proj", "mlp": "mlp"}
    return {places[block]: square for block in kind.replaced if kind.block in ("", LETTERS[block])}


def _sample_flops(model: Transformer, samples: float) -> float:
    """Counts the FLOPs of a layer in what a sample passes once."""
    if model.modulation is None:
        return 0
    return 2 * samples * model.modulation.layer_weights(model.hidden, count_vectors(model))


def _attention_flops(model: Transformer, kind: LayerKind, tokens: float, seq: float, causal: bool) -> dict[str, float]:
    """Counts the FLOPs of the attention of a layer, by part."""
    h, shape = model.hidden, model.shape_of(kind)
    seen = 2 * _reach(seq, model, kind) if not causal or kind.along else _seen(seq, model, kind)
    seen = (seen + _entries_seen(model, seq, causal)) * (shape.query_width + shape.output_width)
    seen += _index_flops(shape, seq if causal else 2 * seq)
    if shape.blocks:
        seen = attention_to_blocks(shape, shape.blocks, seq, causal)
    sides = 2 if kind.block == "S" else 1  # a shared block reads the embedding beside the stream
    projection = (model.projected_keys or 0) * (model.key_width + model.value_width)
    states = shape.distance_profiles.flops(h, shape.heads) if shape.distance_profiles else 0
    return {
        "attention": tokens * seen,
        "qkv": tokens * (2 * (sides * _qkv_weights(shape) + projection) + states + pooling(shape, seq)),
        "proj": 2 * tokens * _output_weights(shape),
        "router": 2 * tokens * h * (model.head_experts or 0),
    }


def _other_flops(model: Transformer) -> float:
    """Returns the FLOPs of a token in what the layers have beside the parts that are described."""
    return model.other.flops * sum(layers for _, layers in _kinds(model)) if model.other else 0


def _branches(model: Model, seq: int) -> Iterator[tuple[Branch, float]]:
    """Returns every branch with its inputs of a sequence, which are its tokens unless several are merged to a single
    token."""
    parts = zip(model.branches, model.branch_tokens(seq), strict=True)
    return ((branch, tokens * branch.merge) for branch, tokens in parts)


def _kinds(model: Transformer) -> Iterator[tuple[LayerKind, int]]:
    """Yields the kinds of the layers of the trunk, or of a branch, and the number of layers of each, including those of
    multi-token prediction."""
    varied = {layer for variant in model.variants for layer in variant.numbers} if isinstance(model, Model) else ()
    layers = Counter(Transformer.kind(model, layer) for layer in range(model.layers) if layer not in varied)
    for kind in list_further_kinds(model) if model.mtp else ():
        layers[kind] += model.mtp
    yield from layers.items()


def _reach(seq: float, model: Transformer, kind: LayerKind) -> float:
    """Counts the tokens that an attention runs over."""
    frames = model.frames or 1
    return {"": model.projected_keys or seq, "s": seq / frames, "u": frames}[kind.along]


def _seen(seq: float, model: Transformer, kind: LayerKind) -> float:
    """Returns twice the mean number of tokens that a token attends to."""
    if model.bidirectional:
        return 2 * (_chunk(seq, model) if kind.local else model.projected_keys or seq)
    return _half(seq, model) if kind.local or _chosen(model) else seq


def _index_flops(model: Transformer, seen: float) -> float:
    """Counts the FLOPs of a token's scores of the keys that an indexer chooses among; seen: twice their mean number."""
    part = model.compressed
    if part and part.index and part.rate:
        return seen / part.rate * part.index.heads * part.index.dim
    index = model.mla and model.mla.index
    return seen * index.heads * index.dim if index and not index.shared else 0


def _entries_seen(model: Transformer, seq: float, causal: bool) -> float:
    """Returns twice the mean number of compressed entries that a token attends to."""
    part = model.compressed
    if not part or not part.rate:
        return 0
    entries = part.entries(int(seq))
    chosen = min(part.index.top_k if part.index else entries, entries)
    return 2 * chosen - chosen * chosen / entries if causal else 2 * entries


def _chosen(model: Transformer) -> int | None:
    """Keys that an indexer chooses for a query; None: there is none."""
    return model.mla.index.top_k if model.mla and model.mla.index else None


def _half(seq: float, model: Transformer) -> float:
    """Returns twice the mean number of tokens that a token of a local layer attends to, under the causal mask."""
    window = min(_chosen(model) or model.window or seq, seq)
    return 2 * window - window * window / seq if window < seq else _chunk(seq, model)


def _chunk(seq: float, model: Transformer) -> float:
    """Tokens of the chunk of a token of a local layer, in the mean over tokens; seq without chunks."""
    full, rest = divmod(seq, chunk := model.attention_chunk or seq)
    return (full * chunk * chunk + rest * rest) / seq


def _mlp(model: Transformer, tokens: float, ffn: int) -> float:
    """Returns the FLOPs of an MLP of inner width `ffn`."""
    mixing = model.hidden if model.channel_mix else 0
    return 2 * tokens * model.hidden * ((3 if model.gated else 2) * ffn + mixing)


def _expert_flops(model: Transformer, moe: MoEShape) -> float:
    """Counts the FLOPs of a token in its routed experts, and in the projections to and from their latent."""
    passes, width = moe.top_k * (moe.capacity or 1), moe.token_width(model.hidden)
    inner = passes * (3 if model.gated else 2) * moe.expert_ffn
    return 2 * width * (inner + (2 * model.hidden if moe.latent else 0))


def _qkv_weights(model: Transformer) -> int:
    """Elements of the matrices that project to queries, keys and values."""
    h, mla = model.hidden, model.mla
    if model.compressed:
        return model.compressed.weights(h, model.heads, model.head_dim)
    if mla is None:
        blocks = model.blocks.weights(h, model.heads, model.key_width, model.value_width) if model.blocks else 0
        return h * sum(model.projected_widths) + blocks
    rank = mla.q_lora_rank
    queries = h * rank + rank * model.query_width if rank else h * model.query_width
    if (index := mla.index) and not index.shared:
        queries += (rank or 0) * index.heads * index.dim + h * (index.dim + index.heads)
    keys = h * (mla.kv_lora_rank + mla.qk_rope) + mla.kv_lora_rank * model.heads * (mla.qk_nope + mla.v)
    return queries + keys + h * model.gate_width


def _output_weights(model: Transformer) -> int:
    """Elements of the matrices behind attention."""
    if model.compressed:
        return model.compressed.out_weights(model.hidden, model.heads, model.head_dim)
    return model.output_width * model.hidden


def six_n(model: Model, seq: int) -> float:
    """Returns 6 N. All active parameters count, embeddings and positions too; attention does not, so `seq` has no
    effect.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), there without embeddings; Hoffmann et al. 2022
    (arXiv 2203.15556) with them, as here.
    """
    return 6.0 * model.active_parameters_at(seq)


def palm(model: Model, seq: int) -> float:
    """Returns 6 N + 12 L a d T: attention in full, without halving for the causal mask. All active parameters count.

    Source: Chowdhery et al. 2022 (PaLM), appendix B, arXiv 2204.02311. nanoGPT leaves learned positions out of
    N, torchtitan an untied input embedding.
    """
    trunk = model.trunk_tokens(seq)
    layers = sum(count * _count_attention(shape, trunk) for shape, count in _shapes(model))
    attention = (layers + _count_cross(model, seq)) * trunk / seq
    attention += sum(_count_attention(branch, of) * of / seq for branch, of in _branches(model, seq))
    return six_n(model, seq) + 6.0 * attention


def _count_attention(model: Transformer, seq: float) -> float:
    """Returns L a d T, of queries and of values, with the tokens that a layer leaves in place of T."""
    total, chosen = 0.0, _chosen(model) or math.inf
    for kind, layers in _kinds(model):
        if kind.has_attention:
            local = min(_chunk(seq, model), model.window or seq)
            seen, shape = local if kind.local else min(_reach(seq, model, kind), chosen), model.shape_of(kind)
            entries = _entries_seen(model, seq, causal=False) / 2
            seen += (
                min(entries, shape.compressed.index.top_k) if shape.compressed and shape.compressed.index else entries
            )
            seen = keys_at_most(shape.blocks, seq) if shape.blocks else seen
            total += layers * seen * (shape.query_width + shape.output_width)
    return total


def _count_cross(model: Model, seq: int) -> float:
    """Returns L a d T of attention to an encoder, of queries and of values, with the encoder's tokens as T; 0 without
    an encoder."""
    inputs = seq - model.trunk_tokens(seq)
    return _cross_layers(model) * inputs * (model.query_width + model.output_width)


def causal(model: Model, seq: int) -> float:
    """Returns three times the matrix products of the forward pass, attention halved: 6 (N in products) + 6 L a d T.

    The output layer counts, tied or not; the input embedding, positions, norms, biases and experts that a token does
    not pass do not. This is the least work of the model. Source: ``num_floating_point_operations`` of
    Megatron-LM (d98e8a64dd).
    """
    return 3.0 * sum(_without_padding(model, seq, causal=True).values())


def megatron_2021(model: Model, seq: int, recompute: bool = True) -> float:
    """Returns 96 L h^2 (1 + T/(6 h) + V/(16 L h)): attention in full, the forward pass of the layers twice.

    With `recompute` (the paper's case) these are *hardware* FLOPs: factor 4 for the layers, 3 for the output
    layer, which is not recomputed. Without it, factor 3 for both. The input embedding does not count, the
    output layer does. The formula holds for a GPT (a d = h, f = 4 h, no gate, a = k); for other shapes the
    GEMMs are counted with the same factors, which gives the same formula for a GPT.

    Source: Narayanan et al. 2021, equation 3, arXiv 2104.04473.
    """
    parts = _without_padding(model, seq, causal=False)
    head = parts.pop("head")
    return (4.0 if recompute else 3.0) * sum(parts.values()) + 3.0 * head


def _without_padding(model: Model, seq: int, causal: bool) -> dict[str, float]:
    """Counts the FLOPs of the matrix products of a token by part, without the padding of experts."""
    parts = forward_matmul_flops(model, 1, seq, causal)
    if model.moe and model.moe.capacity:
        parts["experts"] /= model.moe.capacity
    return parts


def mosaic_mfu(model: Model, seq: int) -> float:
    """Returns 3 (2 N + 4 L h T). All active parameters count; equal to `palm` where a d = h
    and no layer has a window or chunks.

    Source: MosaicML llm-foundry, scripts/train/benchmarking/README.md.
    """
    return 3.0 * _mosaic_forward(model, seq)


def mosaic_hfu(model: Model, seq: int, flash: bool = False) -> float:
    """Returns 4 (2 N + 4 L h T), hardware FLOPs when every activation is recomputed. All active parameters count.

    flash: count attention 5 times, because the backward pass of a fused kernel computes the scores once more; the
        README calls this strictly right and prints its tables without it.

    Source: as `mosaic_mfu`.
    """
    return 4.0 * _mosaic_forward(model, seq) + (4.0 * _mosaic_attention(model, seq) if flash else 0.0)


def _mosaic_forward(model: Model, seq: int) -> float:
    return 2.0 * model.active_parameters_at(seq) + 4.0 * _mosaic_attention(model, seq)


def _mosaic_attention(model: Model, seq: int) -> float:
    """Returns L h T, where layers without attention do not count, and a branch counts for its tokens."""
    kinds = Counter(map(model.kind, range(model.encoder_layers, model.encoder_layers + model.layers)))
    of = model.trunk_tokens(seq)
    trunk = sum(layers * _reach(of, model, kind) for kind, layers in kinds.items() if kind.has_attention) * of / seq
    trunk += _cross_layers(model) * (seq - of) * of / seq
    branches = sum(branch.layers * branch.hidden * of * of / seq for branch, of in _branches(model, seq))
    return trunk * model.hidden + branches


CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "six_n": six_n,
    "palm": palm,
    "causal": causal,
    "megatron_2021": megatron_2021,
    "mosaic_mfu": mosaic_mfu,
    "mosaic_hfu": mosaic_hfu,
}
"""FLOPs per token by the name of the convention. `megatron_2021` and `mosaic_hfu` include recomputation."""


@lru_cache(maxsize=256)
def needed_flops(
    convention: str, model: Model, seq: int, adapters: Adapters | None = None, forward_only: bool = False
) -> float:
    """Counts FLOPs per token by the convention `palm` or `causal`, also where not all parameters are trained.

    Frozen weights have no gradients: a parameter that the convention counts has 4 FLOPs in place of 6. Parameters of
    adapters have 6. Attention counts in full, because all its gradients are computed. A forward pass alone is a third:
    2 N and a third of attention; that is what a frozen branch needs, projector left out.

    adapters: the adapters, if they alone are trained.
    forward_only: nothing is trained.
    """
    whole = CONVENTIONS[convention](model, seq)
    if not forward_only and adapters is None:
        return whole - 2.0 / 3.0 * sum(
            _encoder(convention, branch, of) * of / seq for branch, of in _frozen(model, seq)
        )
    if forward_only:
        return whole / 3.0
    assert adapters is not None
    frozen = {
        "palm": lambda: 2.0 * model.active_parameters,
        "causal": lambda: sum(
            n for part, n in _without_padding(model, seq, causal=True).items() if part not in ("attention", "scan")
        ),
    }
    return whole - frozen[convention]() + 6.0 * adapters.active_parameters(model)


def _frozen(model: Model, seq: int) -> list[tuple[Branch, float]]:
    return [(branch, of) for branch, of in _branches(model, seq) if branch.frozen]


def _encoder(convention: str, branch: Branch, seq: float) -> float:
    """Counts the FLOPs of a token of a branch by the convention `palm` or `causal`, without its projector."""
    if convention == "palm":
        return 6.0 * (branch.parameters - branch.projector_parameters + _count_attention(branch, seq))
    products = sum(_layer_flops(branch, 1, seq, causal=True).values())
    return 3.0 * (products + 2 * branch.input_products)

"""FLOPs of attention to blocks of keys."""

from __future__ import annotations

from meshcast.simulator.ir.block_attention_operators import count_block_pairs, count_entries, count_entry_pairs
from meshcast.simulator.ir.operators import count_pairs
from meshcast.simulator.models.rare_parts import BlockAttention
from meshcast.simulator.models.transformer import Transformer


def attention_to_blocks(shape: Transformer, part: BlockAttention, seq: float, causal: bool) -> float:
    """Counts the FLOPs of a token in attention to blocks, forward: scores that choose blocks, scores and weighted
    values of keys, and those of other branches. causal: of pairs within the mask, else of all pairs."""
    both = shape.query_width + shape.output_width
    if seq < part.from_tokens:
        return 2 * (seq / 2 if causal else seq) * both
    blocks = count_block_pairs(seq, None, part.size, part.top_k) / seq if causal else seq
    flops = 2 * blocks * both
    if part.index:
        return flops + 2 * (seq / 2 if causal else seq) * part.index.heads * part.index.dim
    for times in {1, part.coarse or 1}:
        flops += 2 * _entries_seen(part, seq, causal, times) * shape.query_width
    if part.branches:
        window = count_pairs(int(seq), None, part.window) / seq if causal else seq
        flops += 2 * (_entries_seen(part, seq, causal) + window) * both
    return flops


def _entries_seen(part: BlockAttention, seq: float, causal: bool, times: int = 1) -> float:
    """Returns the mean number of entries, so many times longer and further apart, that a query sees."""
    length, stride = part.length * times, part.stride * times
    return count_entry_pairs(seq, None, length, stride) / seq if causal else count_entries(seq, length, stride)


def pooling(shape: Transformer, seq: float) -> float:
    """Counts the FLOPs of a token in the products that make entries."""
    part = shape.blocks
    if part is None or part.pool != "linear":
        return 0
    weights = part.pool_weights(shape.key_width, shape.value_width, shape.kv_heads)
    return 2 * count_entries(seq, part.length, part.stride) / seq * weights


def keys_at_most(part: BlockAttention, seq: float) -> float:
    """Counts the keys and entries that a query attends to at most."""
    blocks = min(seq, part.size * part.top_k) if seq >= part.from_tokens else seq
    return blocks + part.branches * (count_entries(seq, part.length, part.stride) + min(part.window or seq, seq))

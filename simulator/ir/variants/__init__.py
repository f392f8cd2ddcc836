"""Operators of variants of the transformer layer: capped scores and logits, norms over all heads, linear attention."""

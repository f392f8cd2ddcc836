"""Recomputation: what a site makes is forgotten after its forward pass, and made again when its gradients need it."""

from __future__ import annotations

from simulator.ops import Fragment, Touch
from simulator.scheme import Inner
from simulator.sites import Site


def recompute(site: Site, inner: Inner) -> Fragment:
    """`site` with its inside forgotten after the forward pass and computed again, once the gradient has arrived.

    Kept are the tensors that come in from outside, and those that others need; all else lives within one pass.
    """
    first, again = inner(site), inner(site)
    gradient = list(again.grad_entry.values())
    for mark in again.entry.values():
        mark.after += gradient
    for op in again.forward:
        op.phase, op.name = "R", f"re {op.name}"
    before, anew = set(map(id, first.forward)), set(map(id, again.forward))
    inside = {t.key for t in again.touches if t.made and id(t.op) in anew}
    touches = [t for t in first.touches if id(t.op) in before]
    touches += [
        Touch(f"{t.key}~" if t.key in inside and not t.stays else t.key, t.nbytes, t.op, t.made, t.category)
        for t in again.touches
    ]
    for param, other in zip(again.params, first.params, strict=True):
        param.used = other.used
    return Fragment(
        forward=first.forward,
        backward=[*again.forward, *again.backward],
        entry=first.entry,
        exit=first.exit,
        grad_entry=again.grad_entry,
        grad_exit=again.grad_exit,
        params=again.params,
        borrowed=again.borrowed,
        touches=touches,
    )

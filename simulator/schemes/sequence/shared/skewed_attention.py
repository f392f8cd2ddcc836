"""Attention of sequences that are divided as a whole: ranks have unequal pairs of tokens, and all wait for the one with
most."""

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import Self

from meshcast.simulator.ir.capabilities import DividesSequences
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Attention, Fragment
from meshcast.simulator.ir.scheme import LowerModule, SequenceScheme


class SkewedAttention(SequenceScheme, DividesSequences):
    """Changes nothing but the pace of attention, which only takes longer.

    skew: pairs of the most loaded rank over their mean.
    """

    skew: float = 1.0

    def with_skew(self, skew: float) -> Self:
        scheme = copy(self)
        scheme.skew = skew
        return scheme

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self.skew

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if self.skew > 1 and isinstance(module, CoreAttention):
            for op in (*fragment.forward, *fragment.backward):
                if isinstance(op.work, Attention):
                    op.work = replace(op.work, pace=op.work.pace * self.skew)
        return fragment

"""Attention that the devices of a pipeline exchange: late slices of a sequence give scores to early ones.

A late slice, whose queries attend to more keys than the mean of the sequence, sends them with keys and values of the
surplus, computes the mean, and adds the results that come back. An early slice computes its own scores, then those that
came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule

STREAM = "pipeline-exchange"

LEAST_SURPLUS = 1e-6
"""Keys from which on a slice exchanges: less is rounding."""


def exchange_attention(module: CoreAttention, inner: LowerModule, axes: Sequence[str]) -> Fragment:
    """The attention core of a slice, with its exchange along `axes`."""
    own = int(module.ins[1].dims["t"].size)
    surplus = _surplus_keys(module, own)
    if abs(surplus) < LEAST_SURPLUS:
        return inner(module)
    out = inner(replace(module, balanced=surplus > 0))
    (q, k, v), o = (one.name for one in module.ins), module.outs[0].name
    shares = dict.fromkeys((k, v, f"d:{k}", f"d:{v}"), abs(surplus) / own)
    forward = _Exchange(out, module.name, "F", surplus, tuple(axes))
    inputs, gradients = [out.entry[name] for name in (q, k, v)], list(dict.fromkeys(out.grad_exit.values()))
    out.exit = {o: forward.add(inputs, [out.exit[o]], forward.uses([q, k, v], shares), forward.uses([o], shares))}
    backward = _Exchange(out, module.name, "B", surplus, tuple(axes))
    sent, results = [q, k, v, o, f"d:{o}"], [f"d:{name}" for name in (q, k, v)]
    moved = backward.uses(sent, shares), backward.uses(results, shares)
    out.grad_exit = dict.fromkeys(out.grad_exit, backward.add([out.grad_entry[o]], gradients, *moved))
    return out


def _surplus_keys(module: CoreAttention, own: int) -> float:
    """Returns the keys that a query of a slice of `own` tokens attends to beyond the mean over the whole sequence."""
    begin, every = module.tokens_before, module.tokens_before + own + module.tokens_after
    pairs = module.pairs_before(begin + own) - module.pairs_before(begin)
    return pairs / own - module.pairs_before(every) / every


class _Exchange:
    """The exchange of one pass."""

    def __init__(self, out: Fragment, name: str, phase: str, surplus: float, axes: tuple[str, ...]) -> None:
        self.out, self.phase, self.surplus, self.axes = out, phase, surplus, axes
        self.name = name if phase == "F" else f"d{name}"
        self.ops = out.forward if phase == "F" else out.backward

    def uses(self, names: Sequence[str], shares: Mapping[str, float]) -> list[tuple[str, int, int]]:
        """Memory key, bytes and bytes that move of tensors. shares: of those that move in part."""
        found = {use.key.partition("@")[0]: use for use in self.out.tensor_uses if use.op in self.ops}
        return [
            (found[one].key, found[one].nbytes, round(shares.get(one, 1.0) * found[one].nbytes))
            for one in names
            if one in found
        ]

    def add(
        self,
        begin: Sequence[Op],
        ends: Sequence[Op],
        operands: Sequence[tuple[str, int, int]],
        results: Sequence[tuple[str, int, int]],
    ) -> Op:
        """Adds the exchange to the pass; returns the op that ends it.

        begin, ends: what the operands wait for, and what ends the pass without the exchange.
        """
        sent, returned = (sum(moved for *_, moved in uses) for uses in (operands, results))
        first = next(i for i, op in enumerate(self.ops) if op.phase == self.phase)  # behind what is recomputed
        send = self._op("exchange", Collective("shift", sent, self.axes), [*begin, *self.ops[:first]])
        answer = self._op("return", Collective("shift", returned, self.axes), [send, *ends])
        self.ops.insert(first, send)
        if self.surplus > 0:
            last = self._op("merge", Memory("add", 2 * returned, returned), [answer, *ends])
            self.out.tensor_uses += [TensorUse(key, nbytes, send) for key, nbytes, _ in operands]
            self.out.tensor_uses += [TensorUse(key, nbytes, last) for key, nbytes, _ in results]
            self._use_buffer("results", returned, answer, last)
            self.ops += [answer, last]
            return last
        kernel = next(op.work for op in self.ops if isinstance(op.work, Attention) and op.phase == self.phase)
        keys = ceil(-self.surplus)
        other = self._op("compute", replace(kernel, kv=keys, share=-self.surplus / keys), [send, *ends])
        answer.after = [other]
        self._use_buffer("operands", sent, send, other)
        self._use_buffer("results", returned, other, answer)
        self.ops += [other, answer]
        return answer

    def _op(self, what: str, work: Collective | Memory | Attention, after: Sequence[Op]) -> Op:
        stream = STREAM if isinstance(work, Collective) else COMPUTE
        return Op(f"{what} {self.name}", stream, work, [*after], self.phase)

    def _use_buffer(self, what: str, nbytes: int, maker: Op, reader: Op) -> None:
        key = f"{self.name}.{what}"
        self.out.tensor_uses += [TensorUse(key, nbytes, maker, True), TensorUse(key, nbytes, reader)]

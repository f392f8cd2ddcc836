"""SlimPipe: 1F1B over slices of equal length, whose devices exchange attention so that all slices take equally long.

The order is that of 1F1B over slices: the activations of little more than a micro-batch are held, and warm-up and
cool-down consist of passes of slices. Causal attention makes late slices slower than early ones. At any time the
devices have slices from all over a sequence, so a device with a late slice sends its queries, with keys and values of
some earlier tokens, to a device with an early slice, which returns its part of the output: both then compute the mean.

Per layer and slice of q tokens that attend to x keys more or fewer than the mean: q tokens of queries and x tokens of
keys and values go one way, q tokens of output the other; backward, the gradient of the output goes along, and gradients
of queries, keys and values return. For s slices: bubble (p-1)(t_f + t_B)/s [s] (t_f, t_B: forward and whole backward
pass of a micro-batch on a device), p - i + s - 1 slices in flight on device i; v times less with v chunks a device.

Not modelled: which devices exchange (neighbours here), keys and values that are sent ahead, waiting for the partner, an
exchange for recomputed attention, and the vocabulary shared among devices.

References: Li et al. 2025, arXiv 2504.14519 (from its abstract: the exchanged bytes follow from the balance).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape
from meshcast.simulator.scheduling.sequence_slicing import SliceCount, SlicedSchedule, sliced_1f1b, sliced_1f1b_forms


class SlimPipe(SlicedSchedule):
    paper = Paper(
        "arXiv:2504.14519",
        "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context LLM Training",
        2025,
    )

    class Options(SlicedSchedule.Options):
        slices: SliceCount = 4
        """Number of slices of equal length."""

    @property
    def lowering_key(self) -> Hashable:
        return self.use, self.axes, self.options.slices

    def check(self, shape: PipelineShape) -> None:
        """Accepts any number of chunks and slices."""

    def check_job(self, job: Any) -> None:
        if job.framework.attention != "flash":
            rule = f"{self.use} adds up outputs of attention by their log-sum-exp, which flash kernels save"
            raise PlanError("framework.set.attention", rule, "Use flash", job.framework.attention)

    def order(self, shape: PipelineShape, device: int) -> Sequence[Action]:
        return sliced_1f1b(shape, device)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, CoreAttention) or self.mesh.size(self.over) == 1:
            return inner(module)
        return exchange_attention(module, inner, self.over)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        return sliced_1f1b_forms(setting, len(self.slices))


STREAM = "pipeline-exchange"

MIN_SURPLUS = 1e-6
"""Keys from which on a slice exchanges: less is rounding."""


def exchange_attention(module: CoreAttention, inner: LowerModule, axes: Sequence[str]) -> Fragment:
    """Returns the attention core of a slice, with its exchange along `axes`.

    A late slice, whose queries attend to more keys than the mean, sends them with keys and values of the surplus,
    computes the mean, and adds the results that come back; an early slice computes its scores, then those of the
    late slice.
    """
    slice_tokens = int(module.ins[1].dims["t"].size)
    surplus = _surplus_keys(module, slice_tokens)
    if abs(surplus) < MIN_SURPLUS:
        return inner(module)
    out = inner(replace(module, balanced=surplus > 0))
    (q, k, v), o = (tensor.name for tensor in module.ins), module.outs[0].name
    shares = dict.fromkeys((k, v, f"d:{k}", f"d:{v}"), abs(surplus) / slice_tokens)
    forward = _Exchange(out, module.name, "F", surplus, tuple(axes))
    inputs, gradients = [out.entry[name] for name in (q, k, v)], list(dict.fromkeys(out.grad_exit.values()))
    out.exit = {o: forward.add(inputs, [out.exit[o]], forward.uses([q, k, v], shares), forward.uses([o], shares))}
    backward = _Exchange(out, module.name, "B", surplus, tuple(axes))
    sent, results = [q, k, v, o, f"d:{o}"], [f"d:{name}" for name in (q, k, v)]
    moved = backward.uses(sent, shares), backward.uses(results, shares)
    out.grad_exit = dict.fromkeys(out.grad_exit, backward.add([out.grad_entry[o]], gradients, *moved))
    return out


def _surplus_keys(module: CoreAttention, tokens: int) -> float:
    """Returns the keys that a query of a slice of `tokens` tokens attends to beyond the mean over the whole
    sequence."""
    begin, every = module.tokens_before, module.tokens_before + tokens + module.tokens_after
    pairs = module.pairs_before(begin + tokens) - module.pairs_before(begin)
    return pairs / tokens - module.pairs_before(every) / every


class _Exchange:
    """The exchange of a pass."""

    def __init__(self, out: Fragment, name: str, phase: str, surplus: float, axes: tuple[str, ...]) -> None:
        self.out, self.phase, self.surplus, self.axes = out, phase, surplus, axes
        self.name = name if phase == "F" else f"d{name}"
        self.ops = out.forward if phase == "F" else out.backward

    def uses(self, names: Sequence[str], shares: Mapping[str, float]) -> list[tuple[str, int, int]]:
        """Returns the memory key, bytes and bytes that move of tensors. shares: of those that move in part."""
        of_tensors = {use.key.partition("@")[0]: use for use in self.out.tensor_uses if use.op in self.ops}
        return [
            (of_tensors[name].key, of_tensors[name].nbytes, round(shares.get(name, 1.0) * of_tensors[name].nbytes))
            for name in names
            if name in of_tensors
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

"""Ring attention: queries stay on their ranks, and keys and values go round a ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.attention_mask import ScoreBlock
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Op
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import LowerModule, Rule, SequenceScheme
from meshcast.simulator.scheduling.schedule import Schedule
from meshcast.simulator.schemes.sequence.shared.attention_steps import AttentionSteps, MergeKernels, mask_blocks


class RingScheme(SequenceScheme):
    """Base of the schemes that bring keys and values to the queries, block by block."""

    kernels: ClassVar[str] = ""
    """The attention kernels of the framework that it needs (flash, unfused); empty: any."""
    kernels_reason: ClassVar[str] = ""
    """Why it needs them, in words for users."""
    only_causal: ClassVar[bool] = False
    """Whether it computes causal attention alone; otherwise bidirectional attention too."""

    @property
    def token_order(self) -> str:
        """Which rank holds which positions (see `mask_blocks`); schemes of a plan that shard the same sequences agree
        on it.
        """
        return "contiguous"

    @property
    def passes_keys(self) -> bool:
        """Whether keys and values pass from rank to rank; otherwise attention uses all-gathers or all-to-alls."""
        return True

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.over)

    @property
    def ring_axes(self) -> tuple[str, ...]:
        """The scheme's axes with several ranks."""
        return tuple(axis for axis in self.over if self.mesh.size(axis) > 1)

    def layouts(self, operator: Operator) -> str | Rule | None:
        if isinstance(operator, CoreAttention) and operator.along == "s":
            # Keys and values keep their layout.
            return "s|t"
        return "s" if operator.has("s") else None

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if self.ranks == 1 or not self.passes_keys or not isinstance(module, CoreAttention) or module.along != "s":
            return inner(module)
        return self.attend(module, inner)

    @property
    def merge(self) -> MergeKernels:
        """The kernels that merge partial results."""
        return "fused"

    @property
    def kernel_tile(self) -> tuple[int, int] | None:
        """Queries and keys of the tiles that kernels compute whole or not at all (see `RankShare`)."""
        return None

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        """Returns the attention core on several ranks."""
        blocks = mask_blocks(self.token_order, self.ranks, operator.bidirectional, self.kernel_tile)
        return RingAttention(operator, inner, self.ring_axes, blocks, self.merge).fragment

    def check_job(self, job: Any) -> None:
        """Raises PlanError where sequences cannot be split so, and for masks and kernels that it does not support."""
        if self.ranks == 1:
            return
        if self.passes_keys and job.batch.documents is not None:
            rule = f"{self.use} brings the keys of a sequence part by part, whatever documents are in it"
            raise PlanError("batch.documents", rule, "Use sequence/all-gather or sequence/ulysses, or leave it out")
        schemes = [(entry, find_scheme(entry.use)) for entry in job.plan.schemes]
        ranks = self.mesh.size(axis for e, kind in schemes if kind.family == self.family for axis in e.over)
        for shape, tokens in job.model.stacks(job.batch.sequence):
            self._check_shape(job, shape, tokens / (shape.frames or 1), ranks)
        if not self.passes_keys:
            return
        if self.kernels and job.framework.attention != self.kernels:
            rule = f"{self.use} {self.kernels_reason}, and the framework has {job.framework.attention} attention"
            raise PlanError("framework.set.attention", rule, f"Use {self.kernels}", job.framework.attention)
        for entry, kind in schemes:
            if issubclass(kind, Schedule | RingScheme):
                self._check_beside(kind(entry.over, kind.Options(**(entry.model_extra or {})), self.mesh))

    def _check_beside(self, other: Schedule | RingScheme) -> None:
        """Raises PlanError where another scheme of the plan orders or splits sequences differently."""
        if isinstance(other, Schedule) and len(other.slices) != 1:
            rule = f"{self.use} needs all keys of a sequence at once, and {other.use} splits sequences into slices"
            raise PlanError("plan.schemes", rule, "Use sequence/all-gather or sequence/ulysses")
        if isinstance(other, RingScheme) and other.token_order != self.token_order:
            rule = f"{self.use} orders tokens {self.token_order}, and {other.use} {other.token_order}"
            raise PlanError("plan.schemes", rule, "Give all rings of a plan one token order")

    def _check_shape(self, job: Any, shape: Any, tokens: float, ranks: int) -> None:
        """Raises PlanError where `tokens` of a model or of a branch cannot be split over `ranks`, or it has a mask
        that the blocks of a ring lack."""
        if self.token_order == "zigzag" and tokens % (2 * ranks):
            share = job.batch.sequence / tokens
            rule = f"{self.use} splits sequences into two parts per rank of {ranks}: a multiple of {2 * ranks} tokens"
            near = round(max(1, round(tokens / (2 * ranks))) * 2 * ranks * share)
            remedy = (
                f"{near} would work" if getattr(shape, "tokens", None) is None else "Change the tokens of its branch"
            )
            raise PlanError("batch.sequence", rule, remedy, job.batch.sequence)
        if not self.passes_keys:
            return
        if shape.bidirectional and self.only_causal:
            rule = f"{self.use} computes causal attention, and that of {shape.name} is bidirectional"
            raise PlanError("plan.schemes", rule, "Use sequence/all-gather or sequence/ulysses")
        for word, limit in (("sliding windows", shape.window), ("chunked attention", shape.attention_chunk)):
            if limit is not None and limit < tokens:
                rule = f"{self.use} supports no {word}, and {shape.name} has it, of {limit} tokens"
                raise PlanError("plan.schemes", rule, "Use sequence/all-gather or sequence/ulysses")


class RingAttention(AttentionSteps):
    """Ring attention: in every step each rank computes the block of the keys at hand and sends them a place further.

    Backward they go round the other way, from where the forward pass left them, and their gradients with them: those of
    a step travel during the next, and all are home after the last (Transformer Engine). So of p steps p-1 send keys
    and values, and p-1 their gradients. The keys left by the forward pass occupy the memory of the local keys and
    values.

    Beside outputs in fp32 they go round as in the forward pass, from the rank's keys, and gradients a place more than
    keys and values, in fp32 (zhuzilin/ring-flash-attention).

    gradient_bytes: of keys and values; carried: as they travel.
    """

    def __init__(
        self,
        operator: CoreAttention,
        inner: LowerModule,
        ring_axes: tuple[str, ...],
        mask_blocks: Sequence[ScoreBlock],
        merge: MergeKernels = "fused",
    ) -> None:
        super().__init__(operator, inner, ring_axes, mask_blocks, len(mask_blocks) - 1, merge)
        self.key_bytes, self.gradient_bytes = self.nbytes(self.k, self.v), self.nbytes(f"d:{self.k}", f"d:{self.v}")
        self.carried, self.by = (2 * self.gradient_bytes, 1) if self.in_fp32 else (self.gradient_bytes, -1)
        self.gradient_label = f"d{self.k} d{self.v}"
        pass_keys(self, lambda i: _backward_keys(self, self.turn(i)))
        self._run_backward()

    def turn(self, i: int) -> int:
        """Returns the number of the backward step that goes back through step i, and the other way round."""
        return i if self.in_fp32 else self.count - 1 - i

    def _run_backward(self) -> None:
        arrived = [self.fragment.grad_entry[self.o]]
        gradients: list[Op] = []
        total = [self.step_fragments[self.turn(0)].grad_exit[self.q]]
        for b in range(self.count):
            hop, step = self._send_back(b, [*arrived, *gradients]), self.step_fragments[self.turn(b)]
            step.grad_entry[self.o].after += arrived
            self.fragment.backward += step.backward
            gradients = [step.grad_exit[self.k], step.grad_exit[self.v]]
            if b:
                total = self._add_query_gradients(b, [*total, step.grad_exit[self.q]])
                gradients = self._add_key_gradients(b, [hop, *gradients])
            elif self.in_fp32:
                gradients = [
                    self.convert_gradients(self.gradient_label, (self.gradient_bytes, self.carried), gradients)
                ]
                self.use_memory(gradients[0], (self.memory_key("d:part", b), self.gradient_bytes))
                self.use_memory(gradients[0], (self.memory_key("d:dkv", b), self.carried), made=True)
            arrived = [hop]
        if self.in_fp32:
            gradients = self._bring_home(gradients)
        self.fragment.grad_exit = {self.q: total[0], self.k: gradients[0], self.v: gradients[0]}

    def _send_back(self, b: int, after: Sequence[Op]) -> Op:
        """Sends the keys and values of the step behind b with the gradients of all steps before it."""
        last = b == self.count - 1
        nbytes = self.key_bytes * (not last) + self.carried * (b > 0)
        hop = self.shift("ring back", nbytes, self.by, after, "B")
        if not last:
            if b:
                self.use_memory(hop, (self.memory_key("d:kv", b), self.key_bytes))
            else:
                self.use_tensors(hop, self.k, self.v)
            self.use_memory(hop, (self.memory_key("d:kv", b + 1), self.key_bytes), made=True)
        if b:
            self.use_memory(hop, (self.memory_key("d:dkv", b - 1), self.carried))
            self.use_memory(hop, (self.memory_key("d:dkv", b), self.carried), made=True)
        self.fragment.backward.append(hop)
        return hop

    def _add_query_gradients(self, b: int, after: Sequence[Op]) -> list[Op]:
        block, ends = self.step_operators[self.turn(b)].computed_block, (b == 1, b == self.count - 1)
        nbytes = self.nbytes(f"d:{self.q}")
        sums = self.add_gradients(f"d{self.q}", nbytes, block.queries, after, ends)
        self.use_through(sums, (self.memory_key("d:q", b), nbytes))
        for op in dict.fromkeys((sums[0], sums[-1])):
            self.use_tensors(op, f"d:{self.q}")
        return sums[-1:]

    def _add_key_gradients(self, b: int, after: Sequence[Op]) -> list[Op]:
        block = self.step_operators[self.turn(b)].computed_block
        sums = self.add_gradients(self.gradient_label, self.gradient_bytes, block.keys, after)
        self.use_memory(sums[0], (self.memory_key("d:dkv", b), self.carried))
        if b < self.count - 1 or self.in_fp32:
            self.use_memory(sums[0], (self.memory_key("d:part", b), self.gradient_bytes))
        else:
            self.use_tensors(sums[0], f"d:{self.k}", f"d:{self.v}")
        return sums

    def _bring_home(self, gradients: Sequence[Op]) -> list[Op]:
        """Sends fp32 gradients the last place further, and converts them."""
        home = self.shift("ring home", self.carried, self.by, gradients, "B")
        self.use_memory(home, (self.memory_key("d:dkv", self.count - 1), self.carried))
        self.use_memory(home, (self.memory_key("d:dkv", self.count), self.carried), made=True)
        self.fragment.backward.append(home)
        converted = self.convert_gradients(self.gradient_label, (self.carried, self.gradient_bytes), [home])
        self.use_memory(converted, (self.memory_key("d:dkv", self.count), self.carried))
        self.use_tensors(converted, f"d:{self.k}", f"d:{self.v}", made=True)
        return [converted]


def pass_keys(steps: AttentionSteps, backward_keys: Callable[[int], Mapping[str, str]]) -> None:
    """Adds the forward pass of a ring: keys and values go a rank further for each step but the last.

    backward_keys: memory keys of the backward pass through a step, see `AttentionSteps.take_over_memory`.
    """
    out, p = steps.fragment, steps.count
    k, v, o = steps.k, steps.v, steps.o
    kv = steps.nbytes(k, v)
    came, free = [out.entry[k], out.entry[v]], list[Op]()
    if steps.start:
        came = [steps.bring_first("place", kv, came, "F")]
        steps.use_tensors(came[0], k, v)
        steps.use_memory(came[0], (steps.memory_key("kv", 0), kv), made=True)
        out.forward += came
    for i, step in enumerate(steps.step_fragments):
        buffer = steps.memory_key("kv", i)
        step.entry[k].after += came
        step.entry[v].after += came
        arrives = i or steps.start
        steps.take_over_memory(i, {k: buffer, v: buffer} if arrives else {}, backward_keys(i))
        if i < p - 1:
            hop = steps.shift("ring", kv, 1, [*came, *free], "F")
            if arrives:
                steps.use_memory(hop, (buffer, kv))
            else:
                steps.use_tensors(hop, k, v)
            steps.use_memory(hop, (steps.memory_key("kv", i + 1), kv), made=True)
            out.forward.append(hop)
            came = [hop]
        out.forward += step.forward
        free = [step.exit[o]]
        if i:
            steps.merge_output(steps.step_operators[i].computed_block.queries, free, *steps.partial_output(i))
    if p == 1:
        out.exit = {o: free[0]}


def _backward_keys(steps: AttentionSteps, b: int) -> dict[str, str]:
    """Returns the memory keys of backward step b. The first step starts with the local keys and values and the gradient
    of the queries; the last produces the gradients of the local keys and values, unless these are summed in fp32.
    """
    q, k, v = steps.q, steps.k, steps.v
    kept = (
        {k: steps.memory_key("d:kv", b), v: steps.memory_key("d:kv", b), f"d:{q}": steps.memory_key("d:q", b)}
        if b
        else {}
    )
    part = steps.memory_key("d:part", b) if b or steps.in_fp32 else steps.memory_key("d:dkv", b)
    return kept | ({f"d:{k}": part, f"d:{v}": part} if b < steps.count - 1 or steps.in_fp32 else {})

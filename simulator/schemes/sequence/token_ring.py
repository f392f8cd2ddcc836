"""TokenRing: queries go round a ring, and each partial output returns straight to the rank of its queries.

Keys and values stay on their ranks. In step i a rank has the queries of the rank i places behind it in the ring,
computes them against its keys, and returns the partial output with its row sums during the next step, i places in the
other direction, where it is merged. So both directions of the links are in use at once; the last output returns when
nothing is left to compute.

    p = 3   step 0      step 1      step 2      after it
    rank 0  q0 x kv0    q1 x kv0    q2 x kv0
    rank 1  q1 x kv1    q2 x kv1    q0 x kv1
    rank 2  q2 x kv2    q0 x kv2    q1 x kv2
    sends   q           q           o of step 1    o of step 2

Positions are zigzag. Under a causal mask i of the p ranks need but the second half of the queries in step i, and only
these travel. With n tokens, h the width of queries, k of keys, a heads and e bytes an element, a rank sends
(p-1)/p n (2 h + 4 a/e) elements forward, under a causal mask 3/4 of that, half of them each way. Ring attention sends
2 (p-1)/p n k one way: fewer where keys have fewer heads.

The public code has the forward pass alone. Here the backward pass is that of sequence/burst-attention, in which keys
stay, too.

Not modelled: eager kernels that merge the partial outputs; a second ring, such as that of keys between nodes.

References: Wang et al. 2024, arXiv 2412.20501; https://github.com/ACA-Lab-SJTU/token-ring, zigzag_token_ring.py.
"""

from collections.abc import Callable, Iterable, Mapping

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Op
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.scheduling.schedule import Schedule
from meshcast.simulator.schemes.sequence.shared.attention_steps import AttentionSteps, mask_blocks
from meshcast.simulator.schemes.sequence.shared.query_ring import ring_of_queries
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme

RETURN = "sequence-return"
"""The stream of outputs: they return while queries are sent."""


class TokenRing(RingScheme):
    kernels, kernels_reason = "flash", "merges outputs by the row sums that flash kernels return"
    paper = Paper(
        "arXiv:2412.20501",
        "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional Communication",
        2024,
    )

    @property
    def token_order(self) -> str:
        return "zigzag"

    def _check_beside(self, other: Schedule | RingScheme) -> None:
        super()._check_beside(other)
        if isinstance(other, RingScheme) and other.passes_keys and other.ranks > 1 and other.over != self.over:
            rule = f"{self.use} sends the queries of all ranks round one ring, and {other.use} is a second"
            raise PlanError("plan.schemes", rule, "Use sequence/ring or sequence/burst-attention over both axes")

    def assumptions(self, model: object) -> Iterable[str]:
        if self.ranks > 1:
            yield f"{self.use}: its public code has no backward pass; that of sequence/burst-attention is forecast"

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        blocks = mask_blocks(self.token_order, self.ranks, operator.bidirectional)
        return ring_of_queries(operator, inner, self.ring_axes, blocks, pass_queries)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n, h, rows = setting.cp, setting.b * setting.s, 2 * setting.h, 4 * setting.heads
        hops = (p - 1) / p * n
        yield ClosedForm(
            "sent_forward", 3 / 4 * hops * (2 * h + rows), "queries p-1 hops, and p-1 outputs with their row sums"
        )
        backward = hops * (2 * h + 2 * rows) + (n * h if p > 1 else 0)
        yield ClosedForm("sent_backward", backward, "as sequence/burst-attention")
        yield ClosedForm("attention_efficiency", 1.0, "zigzag")


def pass_queries(steps: AttentionSteps, backward_keys: Callable[[int], Mapping[str, str]]) -> None:
    """Adds the forward pass: queries go a rank further for each step but the last, and outputs return.

    backward_keys: memory keys of the backward pass through a step, see `AttentionSteps.take_over_memory`.
    """
    out, q = steps.fragment, steps.q
    came, computed, returned = [out.entry[q]], list[Op](), list[Op]()
    for i, step in enumerate(steps.step_fragments):
        step.entry[q].after += came
        steps.take_over_memory(i, {q: steps.memory_key("q", i)} if i else {}, backward_keys(i))
        if i < steps.count - 1:
            came = [_send_queries(steps, i, [*came, *computed])]
        if i > 1:
            returned = [_return_output(steps, i - 1, computed)]
        out.forward += step.forward
        computed = [step.exit[steps.o]]
        if i > 1:
            _merge_returned(steps, i - 1, returned)
    last = steps.count - 1
    _merge_returned(steps, last, [_return_output(steps, last, computed)])


def _send_queries(steps: AttentionSteps, i: int, after: list[Op]) -> Op:
    """Sends the queries of step i on to where step i + 1 needs them, as many as take part there."""
    share, pace = steps.step_operators[i + 1].computed_block.queries
    nbytes = steps.nbytes(steps.q)
    hop = steps.shift("queries", float(share * nbytes), -1, after, "F", pace)
    if i:
        steps.use_memory(hop, (steps.memory_key("q", i), nbytes))
    else:
        steps.use_tensors(hop, steps.q)
    steps.use_memory(hop, (steps.memory_key("q", i + 1), nbytes), made=True)
    steps.fragment.forward.append(hop)
    return hop


def _return_output(steps: AttentionSteps, i: int, after: list[Op]) -> Op:
    """Returns the output of step i with its row sums to the rank of its queries."""
    share, pace = steps.step_operators[i].computed_block.queries
    hop = steps.shift("return", float(share * (steps.nbytes(steps.o) + steps.lse)), i, after, "F", pace)
    hop.stream = RETURN
    steps.use_memory(hop, *steps.partial_output(i))
    steps.use_memory(hop, _returned_output(steps, i), made=True)
    steps.fragment.forward.append(hop)
    return hop


def _merge_returned(steps: AttentionSteps, i: int, returned: list[Op]) -> None:
    steps.merge_output(steps.step_operators[i].computed_block.queries, returned, _returned_output(steps, i))


def _returned_output(steps: AttentionSteps, i: int) -> tuple[str, int]:
    """Returns the memory of the output of step i, back where its queries are from, with its row sums."""
    return steps.memory_key("returned", i), steps.nbytes(steps.o) + steps.lse

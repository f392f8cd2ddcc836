"""Ring self-attention (RSA), of Colossal-AI: keys and values go round a ring in turn; scores are kept.

Every rank holds 1/p of the positions of each sequence. Keys go round the ring once, until a rank has the scores of its
queries against all keys; after the softmax the values go round it for the output. So the softmax sees whole rows, with
unfused kernels, and the scores of s/p queries against s keys stay in memory. Backward, values and keys go round again,
and each rank's gradients of all keys and of all values are summed by an all-reduce.

    scores = q k0 | q k1 | ... (ring of k)   softmax   o = P0 v0 + P1 v1 + ... (ring of v)

With b sequences of s tokens, hidden size h (multi-head attention) and a heads, a rank sends 2 (p-1)/p b s h elements
forward and 6 (p-1)/p backward, 8 in all as in tensor parallelism, and keeps a b s^2/p scores. Kernels wait for every
message, as in the public code. Masked scores are computed too.

Of a model with `projected_keys` (Linformer) each rank projects its keys and values to k positions by its rows of
the matrices; all-reduces sum them, and backward their gradients. No ring follows: a rank sends 4 (p-1)/p b k h elements
each way, whatever the length, and keeps a b s k/p scores and 2 s k/p weights, all linear in s/p.

References: Li et al. 2021, arXiv 2105.13120; https://github.com/hpcaitech/ColossalAI, legacy/nn/layer/
parallel_sequence/_operation.py; projection: Wang et al. 2020 (Linformer), arXiv 2006.04768.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshcast.simulator.ir.capabilities import TakesProjectedKeys
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Gemm, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.sequence.shared.attention_steps import STREAM
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme


class Rsa(RingScheme, TakesProjectedKeys):
    kernels, kernels_reason = "unfused", "keeps the scores, which flash kernels never write"
    role = "ring of scores"
    paper = Paper("arXiv:2105.13120", "Sequence Parallelism: Long Sequence Training from System Perspective", 2021)

    @property
    def token_order(self) -> str:
        return "with kept scores"

    def layouts(self, operator: Operator) -> str | Rule | None:
        # Every rank has the projected keys and values of all positions.
        return "s" if _has_projected_keys(operator) else super().layouts(operator)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        return inner(module) if _has_projected_keys(module) else super().lower(module, inner)

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        return attend_by_scores(operator, inner, self.ring_axes, self.ranks)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n = setting.cp, setting.b * setting.s
        hops = (p - 1) / p * n * setting.kv_width * 2
        yield ClosedForm("sent_forward", 2 * hops, "a ring of keys and a ring of values")
        yield ClosedForm(
            "sent_backward", 6 * hops, "two rings, and all-reduces of the gradients of all keys and values"
        )
        scores = setting.heads * setting.b * setting.s**2 / p
        if p > 1:
            yield ClosedForm("scores_kept", 2 * scores, "the rows of a rank's queries, in bf16")


def _has_projected_keys(module: Module) -> bool:
    """Returns whether it is attention to keys whose positions are not those of tokens."""
    return isinstance(module, CoreAttention) and not module.ins[1].renamed


def attend_by_scores(operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], ranks: int) -> Fragment:
    """Returns ring self-attention, from unfused kernels of the local queries against the keys of all ranks.

    Each block of scores is copied into its columns; of the summed gradients of all keys, and of all values, every rank
    keeps its share.
    """
    q, k, v = operator.ins
    whole = replace(operator, ins=(q, _lengthen(k, ranks), _lengthen(v, ranks)), kernel="unfused")
    return _ScoreRing(operator, inner(whole), ring_axes, ranks).fragment


def _lengthen(tensor: Tensor, ranks: int) -> Tensor:
    """Returns the tensor with so many positions that a rank's shard has those of all `ranks`."""
    positions = tensor.dims["t"]
    return replace(tensor, dims={**tensor.dims, "t": Dim(positions.size * ranks, positions.unit)})


class _ScoreRing:
    """Replaces the GEMMs of unfused attention, in `fragment`, by messages and GEMMs of a rank's keys or values."""

    def __init__(self, operator: CoreAttention, fragment: Fragment, ring_axes: tuple[str, ...], ranks: int) -> None:
        self.name, self.ring_axes, self.ranks = operator.name, ring_axes, ranks
        self.fragment, self.rewrite = fragment, Rewrite(fragment)
        self.tensors = {use.key.partition("@")[0]: use for use in fragment.tensor_uses if "@" in use.key}
        self.added: list[TensorUse] = []
        q, k, v = (tensor.name for tensor in operator.ins)
        remade = {k, v, f"d:{k}", f"d:{v}", f"d:{q}"}
        fragment.tensor_uses = [use for use in fragment.tensor_uses if use.key.partition("@")[0] not in remade]
        for ops in (fragment.forward, [op for op in fragment.backward if op.phase == "R"]):
            gemms = [op for op in ops if isinstance(op.work, Gemm)]
            for op, keys in zip(gemms, (k, v), strict=False):
                self._go_round(op, keys, in_columns=keys == k)
        to_scores, to_values, to_queries, to_keys = (
            op for op in fragment.backward if op.phase == "B" and isinstance(op.work, Gemm)
        )
        self._go_round(to_scores, v, in_columns=True)
        value_gradients = self._sum_over_ranks(to_values, v)
        query_gradients = self._go_round(to_queries, k, in_columns=False, total=f"d:{q}")
        key_gradients = self._sum_over_ranks(to_keys, k)
        self.rewrite.apply()
        fragment.tensor_uses += self.added
        fragment.grad_exit = {q: query_gradients, k: key_gradients, v: value_gradients}

    def _use(self, op: Op, key: str, nbytes: int, made: bool = False) -> None:
        self.added.append(TensorUse(key, nbytes, op, made))

    def _shard(self, tensor: str) -> tuple[str, int]:
        """Returns the memory key and bytes of a rank's keys or values, or of their gradients."""
        return self.tensors[tensor].key, self.tensors[tensor].nbytes // self.ranks

    def _go_round(self, op: Op, tensor: str, in_columns: bool, total: str = "") -> Op:
        """Replaces a GEMM by a GEMM for the shard of each rank, which arrives round the ring; returns the last op.

        in_columns: the GEMMs make columns of the result, copied into it; otherwise the sum of their results is the
            result.
        total: memory of that sum, where `fragment` does not note it.
        """
        assert isinstance(op.work, Gemm)
        work = replace(op.work, n=op.work.n // self.ranks) if in_columns else replace(op.work, k=op.work.k / self.ranks)
        result = round(work.batch * work.m * work.n * BYTES[work.out_dtype])
        key, nbytes = self._shard(tensor)
        ops: list[Op] = []
        for i in range(self.ranks):
            after = ops[-1:] or op.after
            if i:
                hop = Op(
                    f"ring {tensor} {op.name}", STREAM, Collective("shift", nbytes, self.ring_axes), after, op.phase
                )
                self._use(hop, key, nbytes)
                key = f"{self.name}.{op.phase}.{tensor}{i}"
                self._use(hop, key, nbytes, made=True)
                ops.append(hop)
                after = [hop]
            gemm = replace(op, work=work, after=[*after])
            self._use(gemm, key, nbytes)
            ops.append(gemm)
            part = f"{self.name}.{op.phase}.part {tensor}{i}"
            if in_columns or i:
                move = Memory("concat", result, result) if in_columns else Memory("add", 2 * result, result)
                name = f"{'copy' if in_columns else 'add'} {op.name}"
                ops.append(Op(name, work=move, after=[gemm, *ops[-3:-2]], phase=op.phase))
                self._use(gemm, part, result, made=True)
                self._use(ops[-1], part, result)
            if total:
                self._use(ops[-1], self.tensors[total].key, self.tensors[total].nbytes, made=not i)
        self.rewrite.swap(op, ops)
        return ops[-1]

    def _sum_over_ranks(self, op: Op, tensor: str) -> Op:
        """Lets an all-reduce follow the GEMM of the gradients of all keys or values; returns it."""
        key, nbytes = self._shard(f"d:{tensor}")
        whole, work = (
            f"{self.name}.d{tensor} of all ranks",
            Collective("all_reduce", self.ranks * nbytes, self.ring_axes),
        )
        gemm = replace(op)
        summed = Op(f"all_reduce d{tensor}", STREAM, work, [gemm], op.phase)
        self._use(gemm, whole, self.ranks * nbytes, made=True)
        self._use(summed, whole, self.ranks * nbytes)
        self._use(summed, key, nbytes, made=True)
        self.rewrite.swap(op, [gemm, summed])
        return summed

"""Classifies the kernels of a trace by the part of the model that they compute.

Often the kernel's name suffices (``nvjet_tst_256x128...`` is a GEMM, ``flash_fwd_kernel`` attention). If it does not
(``vectorized_elementwise_kernel``), the operators that enclose its launch decide, innermost first: an elementwise
kernel launched by ``aten::mul`` inside ``_RMSNorm`` belongs to a norm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from meshcast.simulator.ir.ops import Attention, Collective, Exchange, Gemm, Host, HostUpdate, Memory, Op, Transfer

COMPUTE = ("gemm", "attention", "scan", "norm", "activation", "rope", "addition", "embedding", "loss", "experts",
           "optimizer", "copy", "other")  # fmt: skip
"""Classes of computation.

addition: residual additions, gradient accumulation, dropout.
scan: causal convolution and scan of Mamba-2 blocks.
experts: router, permute and unpermute of tokens.
copy: copies, casts and memsets outside the optimizer.
other: kernels that match no pattern.
"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

CLASSES = (*COMPUTE, *COLLECTIVES)

OTHER_COLLECTIVES = {"shift": "send_recv", "push_pull": "send_recv", "reduce": "other"}
"""Classes of simulated collectives that have another name: NCCL runs a shift in its kernel SendRecv."""

COLLECTIVE_PATTERNS = (
    # NCCL's kernels, torch's annotations of gloo's threads, and c10d's operators.
    ("all_reduce", r"all_?reduce"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_to_all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|[:_]i?(send|recv)(_|\b)"),
)
"""Patterns of the names of collectives. NCCL runs both messages and all-to-alls in its SendRecv kernels."""

COMMUNICATES = re.compile(r"nccl|^gloo:|^c10d::|^_c10d_functional::", re.I)

STRONG = (
    ("optimizer", r"adam|^Optimizer\.|multi_tensor_apply|_foreach_|clip_grad|lpnorm|zero_grad"),
    (
        "attention",
        r"flash|fmha|sdpa|scaled_dot_product|attention|masked_softmax|attn",
    ),
    ("scan", r"causal_?conv1d|chunk_(scan|state|cumsum)|selective_scan|state_passing|bmm_chunk|\A(?>.*?mamba).*scan"),
    ("loss", r"cross_?entropy|nll_?loss|log_?softmax"),
    ("norm", r"layer_?norm|rms_?norm|GammaBeta|RowwiseMoments|\bln_(fwd|bwd)"),
    ("rope", r"rope|rotary|(^|\W)_?Heads(Backward)?$"),
    ("activation", r"gelu|silu|swiglu|sigmoid|bias_swish|geglu"),
    ("embedding", r"embedding|index_?select"),
    ("experts", r"\bmoe|router|top_?k|unpermute|token_permut|^_?Permute(Backward)?$|bitonicSort|radixSort"),
    (
        "gemm",
        r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitKreduce|epilogue::impl|^Cijk_|grouped_mm|_scaled_mm"
        r"|^aten::(add|b|ba|sp)?mm\b|^aten::(linear|matmul|einsum)\b|mkldnn_?linear|(Add|B|Ba)?mmBackward|^MmBackward"
        r"|\btriton_tem\w*_mm",
    ),
)
"""Patterns that decide the class wherever they match: in the kernel's name or in an operator around its launch."""

WEAK = (
    # Losses, routers and norms use these kernels too, but then an enclosing operator matches a strong pattern.
    ("attention", r"softmax"),
    ("optimizer", r"vector_norm"),
    ("addition", r"Functor_add|Functor_sum|^aten::add_?\b|^AddBackward|AccumulateGrad|dropout|add_kernel"),
    (
        "copy",
        r"memcpy|memset|copy_kernel|CatArray|CopySlices|FillFunctor"
        r"|^aten::(copy_|cat|fill_|zero_|to|_to_copy|contiguous|clone)\b",
    ),
)
"""Patterns that decide only if no strong pattern matches, in this order: a copy inside an addition is an addition."""

MEMORY = {
    "norm": "norm",
    "rms-norm": "norm",
    "activation": "activation",
    "bias-gradient": "addition",
    "expert-activation": "activation",
    "clamped-activation": "activation",
    "expert-bias": "addition",
    "gelu": "activation",
    "rope": "rope",
    "residual": "addition",
    "add": "addition",
    "dropout": "addition",
    "embedding": "embedding",
    "cross-entropy": "loss",
    "softmax": "attention",
    "router": "experts",
    "permute": "experts",
    "conv": "scan",
    "scan": "scan",
    "selective-scan": "scan",
    "cast": "copy",
    "concat": "copy",
    "convert": "optimizer",
    "grad-norm": "optimizer",
    "adam": "optimizer",
    "zero-grad": "optimizer",
}
"""Class of a simulated memory-bound kernel, by `Memory.what`."""


SIMULATED = {
    "gemm": "gemm",
    "grouped_gemm": "gemm",
    "attention_scores_gemm": "attention",
    "flash_attention_forward": "attention",
    "flash_attention_backward": "attention",
    **{
        what.replace("-", "_") + suffix: kind
        for what, kind in {**dict.fromkeys(("amax", "low-rank"), "other"), **MEMORY}.items()
        for suffix in ("", "_backward")
    },
}
"""Classes of the kernels in traces that meshcast itself writes, by `simulator.report.tracing.names.function_of`."""

NODE = "autograd::engine::evaluate_function: "
"""Prefix of the event in which autograd evaluates a node of the backward graph."""


def _compile(table: Sequence[tuple[str, str]]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((name, re.compile(pattern, re.I)) for name, pattern in table)


_COLLECTIVES, _STRONG, _WEAK = _compile(COLLECTIVE_PATTERNS), _compile(STRONG), _compile(WEAK)


def _first_match(table: Sequence[tuple[str, re.Pattern[str]]], name: str) -> str:
    return next((kind for kind, pattern in table if pattern.search(name)), "")


def collective_of(name: str) -> str:
    """Finds the collective that the name of a kernel or operator stands for; empty if it is none.

    >>> collective_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'reduce_scatter'
    >>> collective_of("gloo:all_to_all"), collective_of("c10d::_allgather_base_"), collective_of("aten::broadcast_to")
    ('all_to_all', 'all_gather', '')
    """
    return _first_match(_COLLECTIVES, name) if COMMUNICATES.search(name) else ""


@lru_cache(100_000)
def classify(name: str, around: tuple[str, ...] = ()) -> str:
    """Returns the class of a kernel or operator, of `CLASSES`.

    around: names of the operators that enclose its launch, innermost first.

    >>> classify("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"), classify("void pytorch_flash::flash_fwd_kernel<...>")
    ('gemm', 'attention')
    >>> classify("void at::native::vectorized_elementwise_kernel<4, ...>", ("aten::mul", "_RMSNormBackward"))
    'norm'
    >>> classify("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"), classify("aten::index_put_")
    ('all_reduce', 'other')
    >>> classify("gemm(attn_qkv)"), classify("add(embedding)", ("embedding",))
    ('gemm', 'addition')
    """
    if kind := collective_of(name) or SIMULATED.get(name.partition("(")[0], ""):
        return kind
    # Gradient accumulation runs inside the evaluation of a node without being part of the node.
    name, around = name.removeprefix(NODE), tuple(caller for caller in around if not caller.startswith(NODE))
    for caller in (name, *around):
        if kind := _first_match(_STRONG, caller):
            return kind
    names = (name, *around)
    return next((kind for kind, pattern in _WEAK if any(map(pattern.search, names))), "other")


def class_of(op: Op) -> str:
    """Returns the class of a simulated op that has work, of `CLASSES`."""
    work = op.work
    if isinstance(work, Collective):
        return OTHER_COLLECTIVES.get(work.operation, work.operation)
    if isinstance(work, Exchange):
        return "all_to_all"
    if isinstance(work, Transfer):
        return "send_recv"
    if isinstance(work, Attention):
        return "attention"
    if isinstance(work, Gemm):
        # Unfused attention runs its score products as separate GEMM kernels.
        return "attention" if work.what == "scores" else "gemm"
    if isinstance(work, Host):
        return "optimizer" if isinstance(work, HostUpdate) else "copy"
    if not isinstance(work, Memory):
        return "other"
    return MEMORY.get(work.what, "other")

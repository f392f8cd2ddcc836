"""Classes of kernels, by their well-known names: what a kernel of a trace was for.

A name often says it (``nvjet_tst_256x128...`` is a matrix product, ``flash_fwd_kernel`` attention). Where it does not
(``vectorized_elementwise_kernel``), the operators around its launch do, the nearest first: a product of an
elementwise kernel launched by ``aten::mul`` inside ``_RMSNorm`` belongs to a norm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from simulator.ir.ops import Attention, Collective, Exchange, Gemm, Memory, Op, Transfer

COMPUTE = ("gemm", "attention", "norm", "activation", "rope", "addition", "embedding", "loss", "experts", "optimizer",
           "copy", "other")  # fmt: skip
"""Classes of computation. addition: residuals, sums of gradients, dropout. experts: routing and the order of tokens.
copy: copies, casts, zeroes outside of the optimizer. other: what no pattern knows."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

CLASSES = (*COMPUTE, *COLLECTIVES)

NAMED = (
    # NCCL's kernels, the names that torch gives to what gloo does, and c10d's operators.
    ("all_reduce", r"all_?reduce"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_to_all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|[:_]i?(send|recv)(_|\b)"),
)
"""Operations of collectives. NCCL sends and receives, and its all-to-alls, in kernels that are all called SendRecv."""

COMMUNICATES = re.compile(r"nccl|^gloo:|^c10d::|^_c10d_functional::", re.I)

SURE = (
    ("optimizer", r"adam|^Optimizer\.|multi_tensor_apply|_foreach_|clip_grad|lpnorm|zero_grad"),
    (
        "attention",
        r"flash|fmha|sdpa|scaled_dot_product|attention|masked_softmax|attn",
    ),
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
        r"|triton_tem\w*_mm",
    ),
)
"""What is believed of a kernel and of everything around its launch."""

WEAK = (
    # Of a loss or a router, too, or of a norm, but then they say so around it.
    ("attention", r"softmax"),
    ("optimizer", r"vector_norm"),
    ("addition", r"Functor_add|Functor_sum|^aten::add_?\b|^AddBackward|AccumulateGrad|dropout|add_kernel"),
    (
        "copy",
        r"memcpy|memset|copy_kernel|CatArray|CopySlices|FillFunctor"
        r"|^aten::(copy_|cat|fill_|zero_|to|_to_copy|contiguous|clone)\b",
    ),
)
"""What is believed only where nothing surer is around, in this order: a copy in an addition belongs to it."""


NODE = "autograd::engine::evaluate_function: "
"""What torch puts around every node of a backward pass."""


def _compiled(table: Sequence[tuple[str, str]]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((name, re.compile(pattern, re.I)) for name, pattern in table)


_NAMED, _SURE, _WEAK = _compiled(NAMED), _compiled(SURE), _compiled(WEAK)


def _first(table: Sequence[tuple[str, re.Pattern[str]]], name: str) -> str:
    return next((kind for kind, pattern in table if pattern.search(name)), "")


def operation(name: str) -> str:
    """The collective that a name tells of; empty for one that tells of none.

    >>> operation("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'reduce_scatter'
    >>> operation("gloo:all_to_all"), operation("c10d::_allgather_base_"), operation("aten::broadcast_tensors")
    ('all_to_all', 'all_gather', '')
    """
    return _first(_NAMED, name) if COMMUNICATES.search(name) else ""


@lru_cache(100_000)
def classify(name: str, around: tuple[str, ...] = ()) -> str:
    """The class of a kernel or operator. around: names of the operators that it was launched in, the nearest first.

    >>> classify("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"), classify("void pytorch_flash::flash_fwd_kernel<...>")
    ('gemm', 'attention')
    >>> classify("void at::native::vectorized_elementwise_kernel<4, ...>", ("aten::mul", "_RMSNormBackward"))
    'norm'
    >>> classify("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"), classify("aten::index_put_")
    ('all_reduce', 'other')
    """
    if found := operation(name):
        return found
    # What sums a gradient lies in what evaluates a node, but not in the node, and has nothing to do with it.
    name, around = name.removeprefix(NODE), tuple(one for one in around if not one.startswith(NODE))
    for one in (name, *around):
        if found := _first(_SURE, one):
            return found
    named = (name, *around)
    return next((kind for kind, pattern in _WEAK if any(map(pattern.search, named))), "other")


MEMORY = {
    "norm": "norm",
    "rms-norm": "norm",
    "activation": "activation",
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
    "cast": "copy",
    "concat": "copy",
    "grad-norm": "optimizer",
    "adam": "optimizer",
    "zero-grad": "optimizer",
}
"""Classes of simulated kernels that are bound by memory, by `Memory.what`."""


def class_of(op: Op) -> str:
    """The class of a simulated op that has work."""
    work = op.work
    if isinstance(work, Collective):
        return work.operation
    if isinstance(work, Exchange):
        return "all_to_all"
    if isinstance(work, Transfer):
        return "send_recv"
    if isinstance(work, Attention):
        return "attention"
    if isinstance(work, Gemm):
        # Products of scores are part of an attention whose parts are kernels of their own.
        return "attention" if work.what == "scores" else "gemm"
    assert isinstance(work, Memory)
    return MEMORY.get(work.what, "other")

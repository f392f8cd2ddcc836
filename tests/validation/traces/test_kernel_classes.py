"""Classes of kernels by the names that libraries give them; simulated ops fall into the same classes."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import HostLaunch
from meshcast.validation.traces.kernel_classes import CLASSES, COMPUTE, class_of, classify, collective_of

KERNELS = {
    "gemm": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(...)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>, ...)",
        "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1", "aten::addmm", "aten::mm", "MmBackward0",
        "AddmmBackward0",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, ...> >",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "void scaled_upper_triang_masked_softmax_warp_forward<...>",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, ...)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long, ...)",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>", "_RMSNorm",
        "NativeLayerNormBackward0",
    ],
    "activation": ["void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(...)>", "_SwiGLU"],
    "rope": ["void fused_rope_forward<...>", "_Heads", "_HeadsBackward"],
    "loss": ["_CrossEntropyBackward", "aten::nll_loss_forward", "cunn_LogSoftMaxForward log_softmax"],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<...> >",
        "Optimizer.step#AdamW.step", "aten::_fused_adamw_", "aten::linalg_vector_norm",
    ],
    "embedding": ["aten::embedding_dense_backward", "void at::native::indexSelectLargeIndex<...>"],
    "experts": ["_Permute", "_UnpermuteBackward", "aten::topk"],
    "copy": ["Memcpy DtoD (Device -> Device)", "Memset (Device)", "aten::copy_"],
    "addition": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>", "aten::add",
    ],
    "other": ["aten::view", "aten::permute", "PermuteBackward0", "void at::native::elementwise_kernel<128, 2, ...>"],
    "all_reduce": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gloo:all_reduce"],
    "all_gather": ["ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, ...)", "c10d::_allgather_base_"],
    "reduce_scatter": ["ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE(...)", "c10d::_reduce_scatter_base_"],
    "send_recv": ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "gloo:send", "gloo:recv", "c10d::recv_"],
    "all_to_all": ["gloo:all_to_all", "nccl:all_to_allv", "c10d::alltoall_base_"],
    "broadcast": ["ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_well_known_kernels(kind: str, name: str) -> None:
    assert classify(name) == kind
    assert (collective_of(name) == kind) == (kind not in COMPUTE)


def test_operators_around_a_kernel_classify_it_if_its_name_does_not() -> None:
    plain, node = "void at::native::elementwise_kernel<128, 2, ...>", "autograd::engine::evaluate_function: "
    assert classify(plain, ("aten::mul", "_RMSNormBackward", f"{node}_RMSNormBackward")) == "norm"
    assert classify(plain, ("aten::exp", "_CrossEntropy")) == "loss"
    assert classify("void softmax_warp_forward<...>", ("aten::_log_softmax", "aten::cross_entropy_loss")) == "loss"
    assert classify("void softmax_warp_forward<...>", ("aten::_softmax",)) == "attention"
    assert classify("aten::linalg_vector_norm", ("_RMSNorm",)) == "norm"
    assert classify("aten::add_", ("aten::_foreach_add_", "Optimizer.step#AdamW.step")) == "optimizer"
    assert classify("aten::copy_", ("aten::_to_copy", "aten::add_")) == "addition"
    # A sum of gradients is evaluated with a node and is none of its work.
    assert classify("aten::add", (f"{node}_RMSNormBackward",)) == "addition"


MODEL: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
BATCH = {"global": 8, "micro": 1}
EIGHT = {"cluster": "dgx-h100:1", "batch": BATCH}


@pytest.mark.parametrize(
    "job",
    [
        {**EIGHT, "model": MODEL, "plan": {"tp": 2, "pp": 2, "recompute": "full"}},
        {**EIGHT, "model": {**MODEL, "dropout": 0.1}, "plan": {"tp": 2, "zero": 0}, "framework": "megatron-lm-2021"},
        {**EIGHT, "model": "llama3-8b", "plan": {"tp": 8}, "precision": {"compute": "fp8"}},
        {**EIGHT, "model": "mixtral-8x7b", "plan": {"ep": 8, "tp": 1}, "framework": "reference"},
    ],
)
def test_every_simulated_op_has_a_class(job: dict[str, Any]) -> None:
    ops = simulate(job).play.step.flat.ops
    found = {class_of(op) for op in ops if op.work is not None and not isinstance(op.work, HostLaunch)}
    assert found <= {*CLASSES} - {"other"} and {"gemm", "attention", "norm", "loss", "optimizer"} <= found

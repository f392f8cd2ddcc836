"""Frameworks: the traits of training code bases, as data in a YAML file each.

Algorithms are schemes; what differs between implementations of the same algorithms is a field here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.plugins import find_files, remember_names
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, model_validator
from meshcast.hardware.shared import shared_instance
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.costs.kernels.decomposition import Decomposition
from meshcast.simulator.costs.kernels.eager import EagerOperation, EagerPasses
from meshcast.simulator.costs.kernels.libraries import AttentionLibrary
from meshcast.simulator.costs.regimes import Regime
from meshcast.simulator.ir.graph_parts import CudaGraphs
from meshcast.simulator.ir.host_calls import CallKind, PassCalls
from meshcast.simulator.ir.modules import UpdateWorkspace
from meshcast.simulator.ir.ops import BYTES
from meshcast.simulator.job.optimizers import OPTIMIZER_STATES, MatrixOptions, OptimizerName, OptimizerStates
from meshcast.simulator.job.release import find_month, generations_of
from meshcast.simulator.models.adapters import AdapterKernels
from meshcast.simulator.models.shapes import ComposedOperation, LossShape

Format = Literal["fp32", "bf16", "fp16"]
QuantisedRecipe = Literal["fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "fp8", "mxfp8", "nvfp4"]
"""Quantisation recipes of the GEMMs of linear layers; everything else is in bf16."""


FUSED_KERNEL_TIME = 1.2
"""Time of fused memory-bound kernels over the calibrated time: that of Megatron-Core, fitted on 20 published runs."""


class FrameworkPart(BaseModel):
    """Base class of the parts of a framework; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class CommunicationOverlap(FrameworkPart):
    """Which communication overlaps with computation."""

    dp: bool
    """Gradient buckets are reduced during the last backward pass."""
    updated_weights: bool = True
    """With `dp`, weights that ZeRO-1 has updated are all-gathered ahead of first use; otherwise after the update."""
    sharded_weights: bool | None = None
    """Sharded weights (ZeRO-3, FSDP) are all-gathered ahead of use. Default: as `dp`."""
    pp: bool
    """Pipeline sends overlap with computation; otherwise a device waits for each send."""
    gradients: bool = True
    """Communication of activation gradients overlaps with the weight gradients of the same linear layer."""
    tp: bool = False
    """Tensor-parallel communication overlaps with GEMMs, chunk by chunk; a plan without a scheme for that gets the
    framework's `tensor_overlap`."""
    ep: bool = False
    """Backward token dispatch overlaps with the weight gradients of the experts; otherwise it follows them."""

    @property
    def gathers_ahead(self) -> bool:
        """Whether sharded weights are all-gathered ahead of use."""
        return self.dp if self.sharded_weights is None else self.sharded_weights


OVERLAPS = tuple(name for name in CommunicationOverlap.model_fields if name != "updated_weights")
"""Fields of `CommunicationOverlap` that overlap something by themselves; `updated_weights` needs `dp`."""


class Bucket(FrameworkPart):
    """Gradient buckets, of max(elements, elements_per_rank x data-parallel ranks) elements, and their memory."""

    elements: float = Field(gt=0, le=1e15)
    elements_per_rank: float = Field(ge=0, le=1e15)
    in_units: bool = False
    """Gradients of a unit with sharded weights, such as a layer, are reduced in buckets, too; otherwise together."""
    buffers: int = Field(default=0, ge=0, le=10)
    """Contiguous buffers as large as a bucket, to which every gradient is copied as soon as it is computed
    (`contiguous_gradients` of DeepSpeed's ZeRO), and from there to a single tensor of all that a rank updates; 0:
    gradients are reduced where they are."""
    doubled: bool = False
    """With `overlap.dp` there is another, unless weights are sharded (`overlap_comm`)."""
    copies: int = Field(default=0, ge=0, le=10)
    """Flat copies of a bucket while it is reduced (`flatten` in `allreduce_bucket`, `torch.cat` in
    `reduce_scatter_coalesced` of DeepSpeed; `bucket.flatten` of InternEvo, that of the bucket before, too)."""
    flat: bool = False
    """Autograd copies the gradients of a unit into that of its flat parameter (the backward pass of `split` in FSDP1),
    which is divided in place before its reduce-scatter (`_div_if_needed` of torch/distributed/fsdp/_runtime_utils.py),
    in kernels that `rates.memory_bound` does not stand for."""
    shard_launches: float = Field(default=0.0, ge=0, le=1e6)
    """Time of the host for each rank of a collective over a list of shards (ZeRO-3 of DeepSpeed until 2021), in
    launches of ops; 0: collectives take whole tensors."""
    sequence_format: Format | Literal[""] = ""
    """Format of the reduction where sequences are sharded (`seq_parallel_communication_data_type`), in which the bucket
    is held once more; empty: that of the gradients."""


class LossKernels(FrameworkPart):
    """Bytes per logit of the cross-entropy kernels.

    forward: bytes moved in the forward pass.
    backward: bytes moved in the backward pass.
    kept: bytes saved for the backward pass.
    peak: bytes held at most in the backward pass: `kept`, the gradient of the logits and temporaries; 0: without
        temporaries.
    sharded_peak: the same where the vocabulary is sharded, by other kernels; 0: as `peak`.
    chunk_count: parts of the tokens of a rank, whose logits exist in turn.
    chunk_tokens: tokens of such a part, instead of `chunk_count`; ``liger``: as many as make its logits as large as the
        hidden states of all (linear_cross_entropy_forward in liger_kernel/ops/fused_linear_cross_entropy.py).
    recomputed: the backward pass computes the logits of a part again; otherwise their gradients follow at once.
    kept_of_all: what is saved is saved of all parts, and gradients follow in the backward pass.
    whole_vocabulary: every tensor rank gathers the logits, and computes the loss over the whole vocabulary
        (`disable_loss_parallel` of torchtitan); otherwise over its shard of it. tensor/transformers always does.
    """

    forward: int = Field(ge=0)
    backward: int = Field(ge=0)
    kept: int = Field(ge=0)
    peak: int = Field(default=0, ge=0)
    sharded_peak: int = Field(default=0, ge=0)
    chunk_count: int = Field(default=1, ge=1, le=1_000_000)
    chunk_tokens: int | Literal["liger"] = 0
    recomputed: bool = False
    kept_of_all: bool = False
    whole_vocabulary: bool = False

    @model_validator(mode="after")
    def _check_chunks(self) -> LossKernels:
        if self.chunk_count > 1 and self.chunk_tokens:
            raise ValueError("chunk_count and chunk_tokens say the same. Leave one of them out")
        return self

    def shape_of(self, tokens: int, vocab: int, hidden: int) -> LossShape:
        """Returns what the loss does with the logits of the tokens of a rank. vocab: of the whole vocabulary."""
        peaks = self.peak, self.sharded_peak or self.peak
        pieces = self.count_chunks(tokens, vocab, hidden)
        traffic = self.forward, self.backward
        return LossShape(traffic, self.kept, peaks, self.kept_of_all, pieces, self.recomputed, self.whole_vocabulary)

    def count_chunks(self, tokens: int, vocab: int, hidden: int) -> int:
        """Returns the parts into which the tokens of a rank are cut. vocab: of the whole vocabulary."""
        size = self.chunk_tokens
        if size == "liger":
            size = 2 ** math.ceil(math.log2(math.ceil(tokens / math.ceil(vocab / hidden))))
        return math.ceil(tokens / size) if size else self.chunk_count


class UpdateMemory(FrameworkPart):
    """GPU memory of gradients and moments around the update of the optimizer."""

    optimizer: OptimizerName = "adam"
    """The optimizer; a job sets it with `optimizer`."""
    matrices: MatrixOptions = MatrixOptions()
    """How Muon updates the matrices of linear layers."""
    quantised_weights: bool = False
    """Updated weights of linear layers that a recipe quantises are gathered, and stay where they are whole, in the
    format of the recipe (`--fp8-param-gather` of Megatron-LM, `enable_fsdp_float8_all_gather` of torchao)."""

    moments_as_weights: bool = False
    """The moments have the format of the main weights, whichever that is (optimizers of PyTorch make them by
    `zeros_like`), unless the job states another."""
    gradients_to_none: bool = False
    """After the update gradients are set to None (`zero_grad` of torch/optim/optimizer.py, by default since 2.0): they
    have no memory until the first backward pass of a step makes them."""
    gradient_buckets: bool = False
    """Buckets in which DDP reduces gradients stay beside the gradients (`gradient_as_bucket_view=False`, the default of
    torch/nn/parallel/distributed.py); otherwise gradients are views of the buckets."""
    bf16_gradients: Literal["fp32", ""] = ""
    """Format in which gradients of bf16 weights are accumulated where none are sharded (BF16_Optimizer of DeepSpeed);
    empty: that of the framework's gradients."""
    adds_apart: bool = False
    """Sharded gradients of a micro-batch are whole before they are added to those of the ones before, where weights are
    not sharded (`grads_in_partition` of DeepSpeed's stage 2)."""
    stale_gradients: bool = False
    """Gradients that are accumulated in another format stay in the compute format, too, until the next backward pass
    begins (`clear_lp_grads` of DeepSpeed's BF16_Optimizer)."""
    fresh_gradients: bool = False
    """Gradients that are accumulated in another format are added at the end of a backward pass: until then all that it
    makes stay in the compute format (`FP32GradientAccumulator.backward` of nanotron)."""
    converts: bool = False
    """The gradients of what is updated at once are held in the format of the main weights, beside those that were
    accumulated (`single_grad_partition` of DeepSpeed's ZeRO, `_copy_model_grads_to_main_grads` of Megatron-Core).
    Optimizers whose states have several formats read gradients as they are."""
    flattens: bool = False
    """With `converts`: they are copied into a single tensor first, and freed unless weights are sharded (`flatten` in
    the `step` of DeepSpeed's ZeRO; without ZeRO, FP16_Optimizer converts each before it copies all)."""
    norm: int = Field(default=0, ge=0, le=100)
    """Bytes for each element of a gradient at a time that are held while its norm is taken, or infinities are looked
    for in it (`double` in `get_grad_norm_direct` of DeepSpeed's ZeRO: 8; `_has_inf_or_nan` of its stages 1 and 2: two
    copies in fp32 and two masks, 10)."""
    scan: int = Field(default=0, ge=0, le=100)
    """The same for all gradients at once of sharded weights in fp16 (`has_overflow` of stage3.py: `isinf` makes a copy
    and a mask)."""
    moment_copies: int = Field(default=0, ge=0, le=10)
    """Temporaries as large as a moment: 1 for the ``foreach`` implementation of PyTorch's AdamW, the root of the
    second moment (`_multi_tensor_adam` in torch/optim/adam.py); none for fused ones."""
    moments_at_start: bool = False
    """The optimizer makes its moments before the first step; otherwise its first update makes them (PyTorch, Apex)."""
    sub_group: float = Field(default=0.0, ge=0, le=1e15)
    """Where weights are sharded, the elements that are updated at once (`sub_group_size` of DeepSpeed's ZeRO-3);
    0: all of a rank."""

    def make_workspace(self, framework: Framework, sharded: bool, apart: bool, grouped: bool) -> UpdateWorkspace:
        """Returns what the update holds beside the states.

        framework: whose formats they have.
        sharded: whether optimizer states are.
        apart: whether gradients of the last micro-batch were whole beside those of the ones before.
        grouped: whether both matrices and vectors are trained, which are separate groups, as vectors do not decay.
            Contiguous gradients of all groups lie in a single tensor (`copy_grads_in_partition` of DeepSpeed's
            stage_1_and_2.py), of which the later group still has views while the first is updated.
        """
        main, gradients = framework.main_weights, framework.gradients
        reads_any = framework.moments != main or framework.weight_remainders
        converted = BYTES[main] if self.converts and gradients != main and not reads_any else 0
        flat = BYTES[gradients if sharded else main] if self.flattens and converted else 0
        copies, scan = self.moment_copies * BYTES[framework.moments], self.scan * (framework.weights == "fp16")
        last, shared = int(BYTES[gradients]) * apart, grouped and framework.bucket.buffers > 0
        return UpdateWorkspace(int(flat), int(converted), int(copies), self.norm, scan, last, shared)

    @property
    def states(self) -> OptimizerStates:
        """The states that the optimizer keeps."""
        return OPTIMIZER_STATES[self.optimizer]


class ProcessMemory(FrameworkPart):
    """GPU memory beyond the tensors of fused operators, and of the process beyond the tensors of a step."""

    reserved_share: float = Field(ge=1, le=100)
    """Memory reserved by the caching allocator over allocated memory, at the peak: blocks cached for other streams or
    sizes, and fragmentation. Where the memory of the GPU ends, the allocator returns cached blocks. In segments that
    grow, of what passes allocate alone."""
    states: Literal["apart", "buffers", "flat"] = "apart"
    """Which tensors hold the states: ``apart``: a tensor for each state and parameter; ``buffers``: weights and
    gradients have a buffer each, into which separate weights were copied, and a rank of a sharded optimizer has the
    states of a contiguous part of it; ``flat``: every state has a buffer."""
    expandable: bool = False
    """The caching allocator has segments that grow (``expandable_segments`` of PYTORCH_CUDA_ALLOC_CONF), in which
    states leave no gaps."""
    context_gib: float = Field(ge=0, le=1e6)
    """CUDA context, NCCL and library buffers outside the allocator [GiB]."""
    each_rank_loads: bool = False
    """Every rank reads the whole model into host memory before weights go to the GPU."""
    loads: Literal["shards", "compute", "fp32"] = "shards"
    """What a rank holds of the weights before the first step: its shards; ``compute``: the weights of its stage and
    tensor rank whole, in the compute format, until data-parallel ranks have divided them; ``fp32``: trained ones in
    fp32, which the engine then converts (`init_adapter` of LLaMA-Factory's model/adapter.py, on the GPU)."""
    saves: Literal["shards", "modules", "units"] = "shards"
    """Which sharded weights are whole while a checkpoint is saved: none; ``modules``: of a module, in the compute
    format (`_zero3_consolidated_16bit_state_dict` of DeepSpeed's runtime/engine.py, asked for by
    ``stage3_gather_16bit_weights_on_model_save``); ``units``: of a unit, in the format of the main weights (FSDP's
    FULL_STATE_DICT, which goes to the host unit by unit)."""
    frees_behind: bool = False
    """Weights are gathered on a separate stream, where their places are free again only once the GPU has used them,
    while the host, which nothing holds back, asks for all of a pass before (`free_param` of DeepSpeed's
    runtime/zero/partition_parameters.py; `limit_all_gathers` makes that of FSDP wait)."""
    hooks_hold_inputs: bool = False
    """Hooks of PyTorch's FSDP1 on units whose weights are frozen hold the inputs of these units, which reentrant
    checkpoints detach, and the gradients of the inputs to the end of the backward pass
    (`_register_post_backward_reshard_only_hook` of torch/distributed/fsdp/_runtime_utils.py: `register_multi_grad_hook`
    keeps the node that accumulates the gradient). Non-reentrant checkpoints have no such nodes."""
    composed: tuple[ComposedOperation, ...] = ()
    """Operations that are several operations of PyTorch, each of which saves what its derivative reads
    (`simulator.ir.saved`): RMS norms in fp32, activation functions with their gate, attention (the softmax in fp32, or
    the copy of a fused result), routing and weighing of experts, clamps before the activation of experts, the addition
    of their biases, casts to 4 bits (`CAST_APART` of `simulator.ir.operators`); ``views``: queries, keys and values of
    a single product are saved as views, which keep all of it. Not with `compile`."""

    def reserve(self, total: float, states: float) -> float:
        """Returns the bytes that the caching allocator reserves for `total` bytes of tensors, of which `states` stay
        from step to step."""
        apart = states if self.expandable else 0.0
        return apart + (total - apart) * self.reserved_share


@dataclass(frozen=True)
class SchemeTraits:
    """What schemes read of a framework, with the names that its fields have: a plan has the same schemes in frameworks
    that differ in nothing else.

    states: those that the optimizer keeps.
    adapter_units: `Framework.adapters.units`.
    """

    weights: Format
    gradients: Format
    main_weights: Format
    moments: Format
    overlap: CommunicationOverlap
    bucket: Bucket
    states: OptimizerStates
    gradient_buckets: bool
    fused_gradients: bool
    quantised_weights: bool
    gathers_apart: bool
    root_stays_gathered: bool
    reentrant_units: bool
    hooks_hold_inputs: bool
    adapter_units: bool
    compile: bool

    @classmethod
    def of(cls, framework: Framework) -> SchemeTraits:
        """Returns what schemes read of a framework."""
        formats = framework.weights, framework.gradients, framework.main_weights, framework.moments
        update = framework.update.states, framework.update.gradient_buckets, framework.fused_gradients
        sharded = (
            framework.update.quantised_weights,
            framework.gathers_apart,
            framework.root_stays_gathered,
            framework.reentrant_units,
        )
        units = framework.memory.hooks_hold_inputs, framework.adapters.units, framework.compile
        return cls(*formats, framework.overlap, framework.bucket, *update, *sharded, *units)


class Framework(FrameworkPart):
    """The traits of a code base."""

    name: str
    title: str
    source: str
    weights: Format
    """Format of weights and activations in computation."""
    quantised: QuantisedRecipe | Literal[""] = ""
    """Quantisation recipe of the GEMMs of linear layers; empty: the format of the weights."""
    gradients: Format
    """Format in which gradients are accumulated and reduced."""
    main_weights: Format
    """Format of the main weights, the optimizer's copy."""
    moments: Format
    """Format of the two moments of Adam."""
    weight_remainders: bool = False
    """Of fp32 main weights the optimizer keeps the 16 bits that bf16 weights lack, and no copy
    (`store_param_remainders` of Apex's DistributedFusedAdam)."""
    attention: Literal["flash", "unfused"]
    """``flash``: a fused kernel that writes no scores to memory."""
    attention_since: float = Field(default=0.0, ge=0, le=100)
    """Least compute capability of NVIDIA's GPUs that run the fused attention; on older ones attention is unfused,
    unless the job states otherwise. 0: any (``scaled_dot_product_attention`` of PyTorch, whose memory-efficient
    kernel runs from 5.0 on)."""
    attention_library: AttentionLibrary | Literal[""] = ""
    """Library of the fused attention; empty: that which training programs of today use on the GPU's architecture."""
    gemm_decomposition: Decomposition | Literal[""] = ""
    """How the output tiles of dense GEMMs are divided among multiprocessors; empty: as the measured library does."""
    gathers_apart: bool = False
    """FSDP all-gathers the weights of a unit into a buffer and copies them out of it, and copies gradients into another
    buffer; forward a buffer is freed when that of the next unit has arrived, backward at once (FSDP2). Otherwise
    weights are used in place."""
    root_stays_gathered: bool = False
    """FSDP keeps the weights outside of the layers, those of its root unit, gathered from the forward pass to the end
    of the backward pass (`_post_forward_reshard` of FSDP1, `_lazy_init` of FSDP2)."""
    reentrant_units: bool = False
    """Reentrant checkpoints lie around the units of FSDP1. Their forward pass, without gradients, registers no hooks,
    so nothing is prefetched backward (`_register_pre_backward_hooks` and `_get_handle_to_prefetch` of
    torch/distributed/fsdp/_runtime_utils.py): a unit is gathered for its recomputation behind the reduce-scatter of the
    unit before, freed after it, and gathered again for its backward pass."""
    fused_gradients: bool
    """Gradient accumulation is fused into the GEMMs of weight gradients; otherwise a separate kernel adds them."""
    dummy_gradients: bool = False
    """Where GEMMs accumulate weight gradients in their buffers, autograd is given a dummy tensor for each shape of
    a weight, which stays (`get_dummy_wgrad` in transformer_engine/pytorch/module/base.py, from 2.3 on)."""
    fp8_activation_inputs: bool = False
    """Inputs of the activation between the linear layers of MLPs and experts are saved in 8 bits for the backward pass
    (`activation_func_fp8_input_store` of Megatron-Core; DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
    regather: bool
    """All-gathered inputs of linear layers are saved as shards, and gathered again for the weight gradient."""
    scatter_gather_tensors_in_pipeline: bool = False
    """Of a pipeline message that all tensor-parallel ranks hold, each sends a share, and the receivers all-gather
    them. Otherwise each sends the whole message."""
    recompute_early_stop: bool | Literal["compiled"] = False
    """Recomputation of a layer ends with the last tensor that its backward pass reads (non-reentrant checkpoints of
    PyTorch from 2.1 on, XLA); otherwise the layer's output is computed again, too. ``compiled``: with `compile`, which
    leaves out what nothing reads."""
    vocab_multiple: int = Field(ge=1)
    """The vocabulary is padded to a multiple of this times tp."""
    tensor_overlap: Literal["tensor/async-tp", "tensor/userbuffers"] = "tensor/async-tp"
    """Scheme that a plan gets with `overlap.tp`: the framework's way to overlap tensor-parallel communication."""
    overlap: CommunicationOverlap
    bucket: Bucket
    loss: LossKernels
    update: UpdateMemory = UpdateMemory()
    adapters: AdapterKernels = AdapterKernels()
    memory: ProcessMemory
    rates: dict[str, float]
    """Factors on the calibrated rates and times of kernels and links: see `simulator.costs`."""
    eager: dict[EagerOperation, EagerPasses] = {}
    """Memory-bound operations that run as several kernels of PyTorch on a GPU, with the number of these and their bytes
    (`simulator.costs.kernels.eager`); operations without an entry, and those that are `fused`, are a single fused
    kernel. Not with `compile`."""
    converts_apart: bool = False
    """Separate kernels convert gradients to the format of the main weights before Adam, and main weights to that of
    the weights after it; otherwise Adam reads and writes both formats."""
    sustained: float | None = Field(default=None, gt=0, le=1)
    """Rate of GEMMs and attention on a GPU in a step against the same kernels alone, where nothing is calibrated on the
    machine itself; default: that of the GPU's architecture in published runs, most of them on many nodes."""
    launch_s: float = Field(ge=0, le=1)
    """Time of the host to launch an op [s]: a faster GPU waits for the host. A profile states it for hosts of H100,
    and those of other GPUs have another pace (`simulator.job.host_launches`); a job states that of its host."""
    calls: dict[CallKind, PassCalls] = {}
    """Calls of the host for each kind of ops (`simulator.ir.host_calls`): forward, for the gradients of inputs, and for
    those of weights. Each is as long as that for a kernel of an operation that runs as several (`eager`). Models with
    experts have `launch_s`, the time of the calls of an `op`, for all ops; empty: so have all."""
    deterministic: bool = False
    """What adds in a fixed order: the backward pass of fused attention, and what the program sets besides (the key
    `when_deterministic` of its file). For example ``--deterministic-mode`` of Megatron-LM."""
    cuda_graphs: CudaGraphs
    """CUDA graphs, whose ops take no time of the host. true: the whole step is a single graph; a list: each layer has
    graphs of these modules (`simulator.ir.graph_parts`), and the host launches them and all other ops."""
    launch_blocking: bool = False
    """The host waits for the end of every op before it launches the next (CUDA_LAUNCH_BLOCKING=1): the time of a launch
    is added to every op, and nothing overlaps."""
    compile: bool = False
    """A graph compiler fuses the kernels between GEMMs: memory-bound kernels take at most `FUSED_KERNEL_TIME` times the
    calibrated time."""
    step_overhead_s: float = Field(ge=0, le=1e6)
    """Constant time per step: data loading, logging, start of the step [s]."""
    regime: Regime
    """How well the profile is known; with that of the GPU it decides the interval, see `simulator.costs.regimes`."""
    fitted: dict[str, str] = {}
    """Fields that were fitted to measurements, and to which; what has no entry was read or assumed."""
    sigmas: dict[str, Annotated[float, Field(ge=0, le=3)]] = {}
    """Further standard deviations of log(measured / forecast) of the step time, by their cause: they widen the interval
    as independent errors do."""

    @model_validator(mode="after")
    def _check_launch_blocking(self) -> Framework:
        overlap = self.overlap
        overlapped = [name for name in OVERLAPS if getattr(overlap, name)]
        if self.launch_blocking and (self.cuda_graphs or overlapped):
            on = ["cuda_graphs"] * bool(self.cuda_graphs) + [f"overlap.{name}" for name in overlapped]
            raise ValueError(f"with launch_blocking nothing overlaps, and {on[0]} is set. Write {', '.join(on)}: false")
        return self

    @model_validator(mode="after")
    def _check_launches(self) -> Framework:
        if missing := [kind for kind in get_args(CallKind) if self.calls and kind not in self.calls]:
            raise ValueError(f"calls are of all kinds of ops or of none, and {missing[0]} has none. Add it")
        if self.cuda_graphs == ():
            raise ValueError("cuda_graphs names no modules. Write false for none, or those of all layers: [attn, mlp]")
        return self

    @property
    def main_copy_bytes(self) -> int:
        """Bytes per parameter of the optimizer's main weights beside the weights of the computation."""
        if self.main_weights == (self.adapters.weights or self.weights):
            return 0
        main = int(BYTES[self.main_weights])
        return main - int(BYTES[self.weights]) if self._keeps_remainders else main

    @property
    def _keeps_remainders(self) -> bool:
        """Whether main weights are weights and remainders: only bf16 is the upper half of fp32."""
        return self.weight_remainders and (self.weights, self.main_weights) == ("bf16", "fp32")

    @property
    def _effective_rates(self) -> dict[str, float]:
        """The factors of `rates`, with those of compiled kernels."""
        fused = {"memory_bound": min(FUSED_KERNEL_TIME, self.rates.get("memory_bound", 1.0))} if self.compile else {}
        return self.rates | fused

    @property
    def kernel_traits(self) -> KernelTraits:
        """Which kernels this framework runs, and at which rates."""
        eager = {what: passes for what, passes in self.eager.items() if not (self.compile or passes.fused)}
        library, decomposition = self.attention_library, self.gemm_decomposition or None
        return KernelTraits(
            self._effective_rates,
            library,
            decomposition,
            eager,
            self.sustained,
            deterministic=self.deterministic,
            rings_alone=self.deterministic and bool(_when_deterministic(self.name).get("rings_alone")),
        )

    def __hash__(self) -> int:  # dictionaries have no hash; of all that sweeps vary, or a look-up compares every row
        formats = self.weights, self.gradients, self.main_weights, self.moments, self.attention
        numbers = self.launch_s, self.step_overhead_s, self.sustained, frozenset(self.rates.items())
        parts = self.overlap, self.bucket, self.loss, self.update, self.adapters, self.memory
        return hash((self.name, *formats, *numbers, *parts))


FILES = Path(__file__).parent / "frameworks"

RENAMED = {
    **dict.fromkeys(("spread", "sigma"), "sigmas: {other: 0.1}, which widens the interval of the regime"),
    "stale_gradients": "update: {stale_gradients: true}",
    "fp8_frozen_weights": "frozen_weights: fp8 under train",
    **dict.fromkeys(("spread_experts", "sigma_experts"), "regime: source, program, family or unknown"),
}
"""Keys of an older release, and what to write now."""


BESIDE_TRAITS = ("versions", "generations", "rules", "recipe", "when_deterministic")
"""Keys of a profile's file that date its releases, or say what its program runs, its recipes set, or its deterministic
mode changes; all others are traits."""


@remember_names
def framework_names() -> tuple[str, ...]:
    """Returns the names of all frameworks, those of plug-ins among them."""
    return tuple(sorted((*_list_shipped(), *_find_added())))


@cache
def _list_shipped() -> tuple[str, ...]:
    return tuple(f.name[:-5] for f in FILES.iterdir() if f.name.endswith(".yaml"))


@remember_names
def _find_added() -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of their frameworks."""
    return find_files("frameworks", ".yaml", _list_shipped())


def _read_profile(name: str) -> Fields:
    """Returns the content of the file of a framework."""
    added = _find_added().get(name)
    return dict((read_shipped(FILES / f"{name}.yaml") if added is None else read_yaml(added, error=PlanError)).data)


@cache
def _file(name: str) -> dict[str, Any]:
    """Returns the content of a profile's file, on top of the traits of its `base`."""
    content = _read_profile(name)
    if "base" not in content:
        return content
    base = {key: value for key, value in _file(content.pop("base")).items() if key not in BESIDE_TRAITS}
    return merge_fields(base, content)


def framework_base(name: str) -> str | None:
    """Returns the name of the profile on whose traits that of a framework stands; None if it states all of them."""
    return _read_profile(name).get("base")


@cache
def framework_versions(name: str) -> dict[str, str]:
    """Returns the months of a framework's versions, by "major.minor"; empty where its profile dates none."""
    return dict(_file(name).get("versions", {}))


@cache
def framework_generations(name: str) -> tuple[dict[str, Any], ...]:
    """Returns the generations of a framework, as its file states them."""
    return tuple(_file(name).get("generations", ()))


@cache
def framework_rules(name: str) -> dict[str, Any]:
    """Returns what the program of a framework has and refuses, as its file states it, on top of the rules of their
    `base`; empty where none are known."""
    stated = dict(_file(name).get("rules", {}))
    base = framework_rules(stated.pop("base")) if "base" in stated else {}
    has = base.get("has", {}) | stated.get("has", {})
    refuses = [*base.get("refuses", ()), *stated.get("refuses", ())]
    return {**base, **stated, "has": has, "refuses": refuses} if base or stated else {}


@cache
def framework_recipe(name: str) -> tuple[dict[str, Any], ...]:
    """Returns what the published recipes of a framework set, as its file states it (`simulator.job.recipe`), behind
    those of its `base`."""
    base = framework_base(name)
    return (*(framework_recipe(base) if base else ()), *_file(name).get("recipe", ()))


def _when_deterministic(name: str) -> dict[str, Any]:
    """Returns what a framework has in its deterministic mode: traits under `set`, and whether all-reduces run over
    rings alone (`rings_alone`); that of its `base` where its file says nothing."""
    base, stated = framework_base(name), _file(name).get("when_deterministic", {})
    return stated or (_when_deterministic(base) if base else {})


def load_framework(
    name: str, changes: dict[str, Any] | None = None, release: str | None = None, where: str = "framework"
) -> Framework:
    """Returns the framework `name` with changed fields; equal frameworks are the same object.

    changes: fields to set, nested as in the file.
    release: the release whose traits it has; None: the newest that the profile describes.
    where: place of the framework in the job, for error messages.
    Raises PlanError for an unknown name, release, field or value.
    """
    changes = changes or {}
    return shared_instance((Framework, name, release), changes, lambda: _load(name, changes, release, where))


def _load(name: str, changes: dict[str, Any], release: str | None, where: str) -> Framework:
    if name not in framework_names():
        raise PlanError(f"{where}.name", "no such framework", nearest(name, framework_names()), name)
    for key in RENAMED.keys() & changes.keys():
        raise PlanError(f"{where}.set.{key}", "this key is of an older release", f"Write {RENAMED[key]}", changes[key])
    if (graphs := changes.get("cuda_graphs")) == "outside-experts":
        remedy = "Write the modules: [attn, mlp, moe_router, moe_preprocess]"
        raise PlanError(f"{where}.set.cuda_graphs", "this word is of an older release", remedy, graphs)
    fields = {key: value for key, value in _file(name).items() if key not in BESIDE_TRAITS}
    if release is not None:
        month = find_month(release, framework_versions(name), f"{where}.release")
        for generation in generations_of(framework_generations(name), month):
            fields = merge_fields(fields, generation.set)
    if changes.get("deterministic"):
        fields = merge_fields(fields, _when_deterministic(name).get("set", {}))
    fields = merge_fields(fields, changes)
    return shared_instance(Framework, fields, lambda: validate_data(Framework, fields, f"{where}.set", PlanError))


def merge_fields(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested fields with changes, which win."""
    both = {
        key: merge_fields(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **both}

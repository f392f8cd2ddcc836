"""Bytes that layers keep for the backward pass, by torch's own tracker, under four policies of recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from tests.validation.activations.layers import TABLES, Decoder, Layer, attend

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
KEPT = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def every_second_product(router: int) -> Callable[[], Any]:
    """The policy of torchtitan's per-op selective checkpoints: results of fused attention, of reduce-scatters, and of
    every second matrix product but the router's, whose weight has `router` columns."""
    products = 0

    def choose(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        nonlocal products
        if op in PRODUCTS and args[-1].shape[-1] != router:
            products += 1
            if products % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)


def core_again(*given: Any) -> Tensor:
    """The core of attention, computed again in the backward pass."""
    result: Tensor = checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=False)
    return result


def divide(layer: Layer, mesh: DeviceMesh) -> None:
    """Divides a layer among the ranks of `mesh` as torchtitan does, with sequence parallelism."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = RowwiseParallel(output_layouts=Shard(1))
    plan = {"attention": gathered, "attention.out": scattered, "mlp": gathered, "mlp.down": scattered}
    plan |= dict.fromkeys(("attention.qkv.*", "mlp.ups.*"), ColwiseParallel())
    plan |= {"attention.norms.*": SequenceParallel(sequence_dim=1, use_local_output=True), "norm*": SequenceParallel()}
    parallelize_module(
        layer, mesh, {key: style for key, style in plan.items() if "norms" not in key or layer.attention.norms}
    )


def kept_by_layers(model: Model, fused: bool, policy: str, layers: int, mesh: DeviceMesh | None) -> int:
    """Bytes that live after the forward pass of so many layers."""
    stack = nn.ModuleList(Layer(model, fused, core_again if policy == "selective" else attend) for _ in range(layers))
    for layer in stack if mesh else ():
        divide(layer, mesh)
    x = torch.ones(2, model.seq // (mesh.size() if mesh else 1), model.hidden, requires_grad=True)
    router = model.moe.experts if model.moe else 0
    y, tracker = x, MemTracker()
    tracker.track_external(stack, x)
    with tracker:
        for layer in stack:
            again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if policy == "operators":
                again["context_fn"] = every_second_product(router)
            y = checkpoint(layer, y, **again) if policy in ("full", "operators") else layer(y)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert y.grad_fn is not None
    return sum(held[kind] for kind in (_MemRefType.ACT, _MemRefType.TEMP, _MemRefType.OTH))


def kept_by_a_layer(model: Model, fused: bool, policy: str, dtype: torch.dtype, ranks: int = 1) -> int:
    """Bytes that every further layer keeps on one of so many ranks, whose collectives do nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    TABLES.clear()
    mesh = None
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,))
    try:
        _, first, second = (kept_by_layers(model, fused, policy, layers, mesh) for layers in (1, 1, 2))
    finally:
        torch.set_default_dtype(before)
        if mesh:
            torch.distributed.destroy_process_group()
    return second - first


def track_gradients(shape: dict[str, Any], views: bool) -> int:
    """Bytes that a backward pass of one rank leaves beside the parameters."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = Decoder(load_model(shape))
        ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        tracker = MemTracker()
        tracker.track_external(model)
        ids = torch.zeros(1, 8, dtype=torch.long)
        with tracker:
            ddp(ids).sum().backward()
            held: dict[Any, int] = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    return held["Total"] - sum(param.untyped_storage().nbytes() for param in model.parameters())


def tracked_peak(shape: dict[str, Any], ranks: int) -> int:
    """The largest sum of bytes in the second step, whose optimizer has its states, of ranks whose collectives do
    nothing."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    model_shape = load_model(shape)
    TABLES[model_shape.seq, model_shape.rope_width] = torch.ones(
        model_shape.seq, model_shape.rope_width, dtype=torch.bfloat16
    )
    model = Decoder(model_shape)
    formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=formats)
    adam = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(1, model_shape.seq, dtype=torch.long)
    tracker = FSDPMemTracker(model, adam)
    tracker.track_inputs((ids,))
    with tracker:
        for step in range(2):
            if step:
                tracker.reset_mod_stats()
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
            adam.step()
            adam.zero_grad()
        peak = int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    torch.distributed.destroy_process_group()
    TABLES.clear()
    return peak

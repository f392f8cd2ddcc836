"""Defaults of training programs, for what a published run does not state, and the uncertainty that each adds.

A field that a run leaves open gets the default of its program, is listed as assumed, and widens the interval by its
`SIGMA`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.regimes import Regime, least_known
from meshcast.simulator.job.framework import Framework, framework_names
from meshcast.simulator.job.open_settings import SIGMA as OPEN
from meshcast.simulator.job.plan_keys import PLAN_KEYS


@dataclass(frozen=True)
class Stack:
    """Defaults of a training program, beside what its recipes set (`simulator.job.recipe`).

    near: frameworks that come closest to it, the closest first.
    plan: keys of a plan in short form that its recipes set and those of its framework do not.
    attention: its default attention.
    overlap: whether communication overlaps computation, if the program has no framework profile of its own.
    dropout: of the models that were trained with it.
    step_overhead_s: constant part of its steps, if it differs from that of its framework profile [s].
    cuda_graphs: whether its steps are CUDA graphs, if that differs from its framework profile.
    fp8_adapters: whether runs in 8 bits with adapters keep frozen weights and inputs of activations in 8 bits.
    never_compiles: whether it has no graph compiler for its layers, only fused kernels.
    """

    near: tuple[str, ...] = ()
    plan: Mapping[str, object] = field(default_factory=dict)
    attention: Literal["flash", "unfused"] = "flash"
    overlap: bool | None = None
    dropout: float | None = None
    step_overhead_s: float | None = None
    cuda_graphs: bool | None = None
    fp8_adapters: bool = False
    never_compiles: bool = False


FALLBACK = "megatron-core"
"""Framework of programs that have no nearer profile."""

KEPT = {
    "save_qkv_out_proj": ("qkv", "proj"),
    "save_qkv_proj": ("qkv",),
    "save_out_proj": ("proj",),
    "save_dot_only": ("linear",),
    "save_alternate": ("attention", "alternate_linear", "reduce_scatter", "all_to_all"),
}
"""Policies of recomputation that name what is saved, in words of `memory/recompute-operators`."""

STACKS = {
    # Code based on Megatron-LM compiles functions between GEMMs (jit_fuser), and has no option to compile layers.
    "megatron-core": Stack(never_compiles=True),
    "nemo": Stack(never_compiles=True),
    "megatron-bridge": Stack(never_compiles=True),
    # Nothing is logged: least mean error on 141 runs with equal weight of their GPUs. Steps are CUDA graphs where a run
    # does not say: assumed, with its LoRA runs on 16 to 64 GPUs in view, whose launches alone would take longer.
    # Its Llama 2 70B LoRA sets FP8_ACTIVATION and takes 8-bit primary weights: 16-bit weights alone fill a GPU.
    "mlperf-nemo": Stack(
        near=("nemo",), step_overhead_s=0.016, cuda_graphs=True, fp8_adapters=True, never_compiles=True
    ),
    # Its arguments of 2021 and 2022: dropout 0.1, gradients reduced after the last pass.
    "megatron-lm-2021": Stack(attention="unfused", overlap=False, dropout=0.1, never_compiles=True),
    "megatron-deepspeed": Stack(
        near=("megatron-lm-2021",), attention="unfused", overlap=False, dropout=0.1, never_compiles=True
    ),
    "gpt-neox": Stack(overlap=False, never_compiles=True),
    **dict.fromkeys(("llm-foundry", "fms-fsdp", "hf-trainer", "torchtitan"), Stack(near=("llm-foundry",))),
    **dict.fromkeys(("axolotl", "llama-factory"), Stack(near=("hf-trainer",))),
    # Names under which the same program is published.
    "accelerate": Stack(near=("hf-trainer",)),
    "internlm": Stack(near=("internevo",)),
    # NVIDIA's recipe of MaxText keeps queries, keys and values (NVIDIA/dgxc-benchmarking v25.02.02, maxtext; v24.11.1
    # also the output of attention). MaxText's own default, `full`, keeps nothing.
    "jax": Stack(near=("maxtext",), plan={"recompute": ["save_qkv_proj"]}),
    "paxml": Stack(near=("maxtext",)),
}
"""Programs with defaults of their own; all others have those of Megatron-Core."""


def stack(name: str) -> Stack:
    """Returns the defaults of a program."""
    return STACKS.get(name, Stack())


def framework(name: str) -> str:
    """Returns the framework profile of a program, or the nearest profile."""
    known = framework_names()
    return next((choice for choice in (name, *stack(name).near) if choice in known), FALLBACK)


FLAGS = (
    "grad_dtype", "sequence_parallel", "shard_group", "cuda_graphs", "recompute.modules",
    "overlap.dp", "overlap.tp", "overlap.pp", "overlap.ep",
)  # fmt: skip
"""Fields of a spec that jobs leave to their program."""

UNPRINTED = ("recompute.kind", "recompute.layers", "sharding", "schedule", "optimizer", "compile", "pipeline_split")
"""Fields of a spec that a stranger states only where the source prints them."""

SPLITS_ACTIVATIONS = "sequence_parallel"
"""Field of a spec by which tensor ranks keep a part of each activation."""

SIGMA = {
    "stack": 0.0,  # whose regime says it
    "batch.documents": 0.02,  # samples of 200 or 1,000 tokens, of sequences of 4,096
    "class": 0.10,  # packed samples attend within themselves only: attention's share of a step
    "recompute.kind": PLAN_KEYS["recompute"].sigma,
    "recompute.modules": 0.03,  # cores of fused attention are cheap; a program's own list may hold linears
    "schedule": 0.02,  # chunks against none is 6 % (2 to 17) where they are known to exist; they are known here
    "mesh.vpp": 0.01,
    "pipeline_split": 0.04,  # a layer more or less in the slowest stage of a few layers
    "batch.micro": 0.01,
    "batch.micro, chosen": OPEN["batch.micro"],
    "mesh.vpp, chosen": 0.03,
    "mesh.cp": 0.02,  # a ring hides more: half of a small share
    "sharding": 0.01,  # ZeRO-1 against none is 0.3 % (0 to 2)
    "shard_group": 0.01,
    "overlap.dp": 0.02,  # the whole reduction is 1 to 5 % of a step
    "overlap.tp": 0.04,  # hiding it is worth 5 to 9 %
    "overlap.pp": 0.01,  # all hops together are at most 4 % of a step
    "overlap.ep": 0.10,  # all-to-all between nodes is 10 to 40 % of a step
    "token dispatcher": 0.02,  # HybridEP against all-to-all in one NVLink domain is -1 to -2 %
    "grad_dtype": 0.01,  # where the memory of a run contradicts the usual format
    "sequence_parallel": PLAN_KEYS["sequence_parallel"].sigma,
    "optimizer": 0.005,  # the update is 0.1 to 3 % of a step
    "model.attention": 0.08,  # kernel generations differ by 3 to 40 %, with the sequence
    "model.positions": 0.005,
    "model.dropout": 0.02,
    "model.vocab": 0.002,
    "cuda_graphs": OPEN["framework.set.cuda_graphs"],
    "offload.kind": 0.01,
    "lora.rank": 0.002,
    "lora.targets": 0.04,  # adapters at all four linears of a layer against queries, keys and values: 7 to 12 %
    "memory_kind": 0.0,  # says nothing about time
}
"""Standard deviation of log(step time) that assuming a field adds, by field; those that a job shows to be open have
theirs in its forecast (`simulator.report.open_effects`).

The comments give how the forecasts of some 600 published dense runs change when only this field changes, 10th to 90th
percentile in parentheses; half of such a range is 1.3 standard deviations.
"""

FITTED_SOURCES = frozenset(
    {
        "bloom", "deepseek", "dgxc", "foundry", "korthikanti", "llama3", "mbridge", "megatron", "megatronlm", "mlperf",
        "mtnlg", "nemo", "ptdp", "simumax", "torchtitan", "vtrain-multi",
    }
)  # fmt: skip
"""Sources of published runs to whose steps coefficients were fitted."""


def regime_of(name: str, profile: Framework, source: str = "") -> Regime:
    """Returns how well a program is known by the profile that stands for it, in runs of a source."""
    if name == profile.name:
        return "source" if profile.regime == "program" and source in FITTED_SOURCES else profile.regime
    return least_known("family" if stack(name).near else "unknown", profile.regime)

"""The jobs of the races: plans of GPT-3 175B on 1,024 A100s, for meshcast, Calculon and SimuMax."""

from __future__ import annotations

from itertools import product
from typing import Any

GRID = list(product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 3)))
"""tp, pp, micro-batch and chunks of 240 plans."""

VARIANTS = list(product((0, 1), ("none", "selective", "full"), (False, True)))
"""ZeRO, recomputation and sequence parallelism: with each of them the grid has 2,880 plans."""

RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
"""Words of Calculon for what is recomputed."""


def job(tp: int, pp: int, micro: int, chunks: int, **more: Any) -> dict[str, Any]:
    """Returns a job of the grid. more: further keys of its plan."""
    return {
        "model": "gpt3-175b",
        "cluster": "dgx-a100:128",
        "batch": {"global": 1536, "micro": micro, "sequence": 2048},
        "plan": {"tp": tp, "pp": pp, "chunks": chunks, **more},
    }


def execution(
    tp: int, pp: int, micro: int, chunks: int, zero: int = 0, recompute: str = "none", sequence_parallel: bool = False
) -> dict[str, Any]:
    """Returns the same plan for Calculon."""
    return {
        **{"num_procs": 1024, "tensor_par": tp, "pipeline_par": pp, "data_par": 1024 // (tp * pp)},
        **{"tensor_par_net": 0, "pipeline_par_net": int(tp * pp > 8), "data_par_net": 1, "batch_size": 1536},
        **{"microbatch_size": micro, "datatype": "float16", "fused_activation": True, "attention_type": "multihead"},
        **{"activation_recompute": RECOMPUTE[recompute], "pipeline_interleaving": chunks},
        **{"optimizer_sharding": bool(zero), "tensor_par_comm_type": "rs_ag" if sequence_parallel else "ar"},
        **{"tensor_par_overlap": "none", "seq_par_ag_redo": False, "data_par_overlap": False},
        **{"weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True},
    }


def strategy(tp: int, pp: int, micro: int) -> dict[str, Any]:
    """Returns the same plan without chunks for SimuMax, whose interleaved schedule is a preview that fails on many
    plans: ZeRO-1, sequence parallelism, nothing recomputed."""
    data_ranks = 1024 // (tp * pp)
    return {
        **{"world_size": 1024, "tp_size": tp, "pp_size": pp, "seq_len": 2048, "dtype": "bf16"},
        **{"micro_batch_size": micro, "micro_batch_num": 1536 // (data_ranks * micro)},
        **{"zero_state": 1, "enable_sequence_parallel": tp > 1, "enable_recompute": False},
    }


def every_plan() -> list[tuple[tuple[int, int, int, int], dict[str, Any]]]:
    """Returns the 2,880 plans: degrees, and further keys."""
    keys = "zero", "recompute", "sequence_parallel"
    return [(degrees, dict(zip(keys, variant, strict=True))) for variant in VARIANTS for degrees in GRID]


def plans_without_chunks() -> list[tuple[int, int, int, int]]:
    """Returns the plans whose replicas divide the batch, of one chunk a device: SimuMax answers all of them."""
    return [plan for plan in GRID if plan[3] == 1 and 1536 % (1024 // (plan[0] * plan[1]) * plan[2]) == 0]

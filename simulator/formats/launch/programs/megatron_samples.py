"""Samples of different lengths in settings of Megatron-Core: hybrid context parallelism.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/training/arguments.py and megatron/core/model_parallel_config.py. The
lengths are those of the data, which no launch file has: a change of the job states them.
"""

from __future__ import annotations

from meshcast.simulator.formats.launch.reading import Reading

SAMPLES = "batch.samples."
LENGTHS = "batch.samples.distribution={kind: lognormal, mean: 4096, sigma: 1.2},batch.samples.count=1024"


def read_hybrid_context(reading: Reading) -> None:
    """Reads context-parallel groups by sample, whose lengths a change of the job states."""
    keys, most = reading.keys, "max_seqlen_per_dp_cp_rank"
    if not reading.take_switch("hybrid_context_parallel"):
        reading.ignore(reading.take(most), "no scheduler of samples reads it")
        return
    stated = reading.take("hybrid_context_parallel")
    rank_tokens = reading.take_count(most)
    if not any(key.startswith(SAMPLES) for key in reading.answers):
        why = "every sample gets as many ranks as its length needs, and the lengths of samples are in the data"
        reading.ask(stated, why, LENGTHS)
        return
    if keys["plan.cp"] == 1:  # groups are of the dp x cp ranks, however the plan divides them
        reading.set_key("plan.cp", 2, "hybrid_context_parallel")
    reading.set_key("batch.samples.join", "hybrid-cp", "hybrid_context_parallel")
    reading.ignore(reading.take("sft"), "a change of the job states the lengths of samples")
    if rank_tokens:
        reading.set_key("batch.samples.rank_tokens", rank_tokens, most)

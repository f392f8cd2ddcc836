"""Samples of different lengths in settings of Megatron-Core: hybrid context parallelism, and schedulers that pack.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/training/arguments.py and megatron/core/model_parallel_config.py. The
lengths are those of the data, which no launch file has: a change of the job states them.
"""

from __future__ import annotations

from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, is_null

SAMPLES = "batch.samples."
LENGTHS = "batch.samples.distribution={kind: lognormal, mean: 4096, sigma: 1.2},batch.samples.count=1024"


MOST = "max_seqlen_per_dp_cp_rank"
PACKING = "sequence_packing_scheduler"


def read_samples(reading: Reading) -> None:
    """Reads what becomes of samples whose lengths a change of the job states: context-parallel groups by sample, or
    packed sequences."""
    if reading.take_switch("hybrid_context_parallel"):
        _read_hybrid_context(reading)
    elif (stated := reading.take(PACKING)) is not None and not is_null(stated.value):
        _read_packing(reading, stated)
    else:
        reading.ignore(reading.take(MOST), "no scheduler of samples reads it")


def _has_lengths(reading: Reading, stated: Stated | None, why: str) -> bool:
    """Says whether a change of the job states the lengths of samples, and asks for them if none does."""
    if any(key.startswith(SAMPLES) for key in reading.answers):
        reading.ignore(reading.take("sft"), "a change of the job states the lengths of samples")
        return True
    reading.ask(stated, f"{why}, and the lengths of samples are in the data", LENGTHS)
    return False


def _read_packing(reading: Reading, stated: Stated) -> None:
    rank_tokens, name = reading.take_count(MOST), str(stated.value)
    if name != "dp_balanced":
        reading.ask(stated, f"meshcast does not know the scheduler {name!r}", "batch.samples.join=packing")
    elif _has_lengths(reading, stated, "samples are packed in their order"):
        reading.set_key("batch.samples.join", "dp-balanced", PACKING)
        if rank_tokens:
            reading.set_key("batch.samples.tokens", rank_tokens * reading.keys["plan.cp"], MOST)


def _read_hybrid_context(reading: Reading) -> None:
    keys, stated = reading.keys, reading.take("hybrid_context_parallel")
    rank_tokens = reading.take_count(MOST)
    if not _has_lengths(reading, stated, "every sample gets as many ranks as its length needs"):
        return
    if keys["plan.cp"] == 1:  # groups are of the dp x cp ranks, however the plan divides them
        reading.set_key("plan.cp", 2, "hybrid_context_parallel")
    reading.set_key("batch.samples.join", "hybrid-cp", "hybrid_context_parallel")
    if rank_tokens:
        reading.set_key("batch.samples.rank_tokens", rank_tokens, MOST)

"""Garbage collections of Python, for which all ranks wait where one of them collects."""

from __future__ import annotations

from meshcast.experiments.diagnosis.causes.pauses.pause import Pause
from meshcast.experiments.diagnosis.detector import ANY
from meshcast.simulator.formats.logs.training_log import COLLECTION


class GarbageCollection(Pause):
    """Steps in which garbage is collected."""

    name = "garbage collection"
    event = COLLECTION
    settings = ("manual_gc_interval", "training.gc_freq", "torch_empty_cache_steps")
    words = {
        "megatron": "a longer --manual-gc-interval: all ranks collect at the same step, so it is rare work for all",
        "torchtitan": "a longer training.gc_freq",
        ANY: "disable automatic collection (gc.disable) and collect on all ranks at the same step, seldom",
    }

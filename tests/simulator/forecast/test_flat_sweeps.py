"""A sweep of any length holds no more than its first rows: every cache that rows share is bounded."""

from __future__ import annotations

import functools
import gc
import random
from types import FunctionType, ModuleType
from typing import Any

import pytest

from meshcast.simulator import SharedWork
from meshcast.simulator.forecast import shared_work
from meshcast.simulator.forecast.step import forecast_step

ROWS = 25
"""Rows of each half of a drawn sweep."""


def draw_job(draw: random.Random) -> dict[str, Any]:
    """A small job in which every key has many values, so that hardly a row repeats another."""
    gpu = {"gpu": "h100-sxm", "gpus": 8, "inter": {"kind": "infiniband", "gbps_per_gpu": draw.randint(10, 800)}}
    pp = draw.choice([1, 2, 4])
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 64 * draw.randint(1, 20)} if draw.random() < 0.4 else None
    model = {"layers": 4, "hidden": 64 * draw.randint(1, 40), "heads": 4, "seq": 512, "vocab": 1024, "moe": moe}
    return {
        "model": {key: value for key, value in model.items() if value is not None},
        "cluster": gpu,
        "batch": {
            "global": 16 * draw.randint(1, 6),
            "micro": draw.choice([1, 2]),
            "sequence": 128 * draw.randint(1, 8),
        },
        "plan": {
            "pp": pp,
            "tp": draw.choice([1, 2]),
            **({"schedule": draw.choice(["1f1b", "gpipe"])} if pp > 1 else {}),
        },
        "framework": {"set": {"rates": {"kernel": draw.uniform(0.5, 2)}}},
    }


def count_held(root: object) -> int:
    """The number of objects that are kept alive by one, types, functions and modules left out."""
    seen, left = {id(root)}, [root]
    while left:
        for item in gc.get_referents(left.pop()):
            if id(item) not in seen and not isinstance(item, type | FunctionType | ModuleType):
                seen.add(id(item))
                left.append(item)
    return len(seen)


def unbounded_caches() -> dict[str, int]:
    """The entries of all caches without a bound, by the name of their function."""
    caches = (one for one in gc.get_objects() if isinstance(one, functools._lru_cache_wrapper))
    return {
        f"{one.__module__}.{one.__qualname__}": one.cache_info().currsize
        for one in caches
        if one.__module__.startswith("meshcast") and one.cache_info().maxsize is None
    }


def test_the_second_half_of_a_sweep_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_KEPT", 4), ("MAX_PRICES", 400), ("MAX_ACTIONS", 1_000)):
        monkeypatch.setattr(shared_work, name, most)
    shared, draw, held = SharedWork(), random.Random(51), ([0], [0])
    before: dict[str, int] = {}
    for row in range(2 * ROWS):
        forecast_step(draw_job(draw), shared)
        if row % 5 == 4:
            held[row // ROWS].append(count_held(shared))
        before = before or (unbounded_caches() if row == ROWS else {})
    assert max(held[1]) <= 1.25 * max(held[0])
    assert {name: count for name, count in unbounded_caches().items() if count > before.get(name, count)} == {}


def test_prices_on_one_cluster_and_timetables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "MAX_PRICES", 300)
    monkeypatch.setattr(shared_work, "MAX_ACTIONS", 1_000)
    shared, hardware, most = SharedWork(), draw_job(random.Random(0)), 0
    for row in range(16):
        job = hardware | {"batch": {"global": 64 + row, "micro": 1, "sequence": 64 + 2 * row}}
        forecast_step(job | {"cluster": "dgx-h100:1", "plan": {"pp": 4, "tp": 2}}, shared)
        most = max(most, shared.price_count)
        assert sum(len(table.slot) for table in shared._timetables.values()) <= 1_000 + 16 * (64 + row)
    assert 200 < most < 300 + 100

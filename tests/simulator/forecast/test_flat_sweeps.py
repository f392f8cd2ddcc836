"""A sweep of any length holds no more than its first rows: every cache that rows share is bounded."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from meshcast.simulator import SharedWork, simulate
from meshcast.simulator.forecast import shared_work
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.ir.ops import Op

ROWS = 8
"""Rows of each half of a drawn sweep."""


def draw_job(draw: random.Random) -> dict[str, Any]:
    """A small job in which every key has many values, so that hardly a row repeats another."""
    gpu = {"gpu": "h100-sxm", "gpus": 8, "inter": {"kind": "infiniband", "gbps_per_gpu": draw.randint(10, 800)}}
    pp = draw.choice([1, 2, 4])
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 64 * draw.randint(1, 20)} if draw.random() < 0.4 else None
    model = {"layers": 4, "hidden": 64 * draw.randint(1, 40), "heads": 4, "seq": 512, "vocab": 1024, "moe": moe}
    batch = {"global": 16 * draw.randint(1, 6), "micro": draw.choice([1, 2]), "sequence": 128 * draw.randint(1, 8)}
    schedule = {"schedule": draw.choice(["1f1b", "gpipe"])} if pp > 1 else {}
    return {
        "model": {key: value for key, value in model.items() if value is not None},
        "cluster": gpu,
        "batch": batch,
        "plan": {"pp": pp, "tp": draw.choice([1, 2]), **schedule},
        "framework": {"set": {"rates": {"kernel": draw.uniform(0.5, 2)}}},
    }


def walk(root: object, seen: set[int]) -> Iterator[object]:
    """Yields the objects that are kept alive by one, but types, functions, modules and those that were seen."""
    left = [root] if id(root) not in seen else []
    seen.add(id(root))
    while left:
        yield (item := left.pop())
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, type | FunctionType | ModuleType):
                seen.add(id(other))
                left.append(other)


def count_held(root: object) -> int:
    """The number of objects that are kept alive by one."""
    return sum(1 for _ in walk(root, set()))


def unbounded_caches() -> dict[str, int]:
    """The entries of all caches without a bound, by the name of their function."""
    caches = (one for one in gc.get_objects() if isinstance(one, functools._lru_cache_wrapper))
    return {
        f"{one.__module__}.{one.__qualname__}": one.cache_info().currsize
        for one in caches
        if one.__module__.startswith("meshcast") and one.cache_info().maxsize is None
    }


def test_the_second_half_of_a_sweep_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_CLUSTERS", 3), ("MAX_PRICES", 200), ("MAX_BYTES", 500_000)):
        monkeypatch.setattr(shared_work, name, most)
    shared, draw, held = SharedWork(), random.Random(51), ([0], [0])
    before: dict[str, int] = {}
    for row in range(2 * ROWS):
        forecast_step(draw_job(draw), shared)
        if row % 4 == 3:
            held[row // ROWS].append(count_held(shared))
        before = before or (unbounded_caches() if row == ROWS else {})
    assert max(held[1]) <= 1.25 * max(held[0])
    assert {name: count for name, count in unbounded_caches().items() if count > before.get(name, count)} == {}


def test_what_is_held_is_as_large_as_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is of bytes: no kind of result takes much more than the estimate that counts it."""
    monkeypatch.setattr(shared_work, "MAX_BYTES", 10**12)
    shared, draw = SharedWork(), random.Random(3)
    for _ in range(6):
        forecast_step(draw_job(draw), shared)
    seen = {id(shared.calibration)}
    for store in (*shared._costs.values(), *shared.stores):
        counted, held = getattr(store, "nbytes", 0.0), sum(map(sys.getsizeof, walk(store, seen)))
        assert not isinstance(store, dict) or held <= 1.5 * counted + 20_000, (list(store)[:1], held, counted)


def test_prices_on_one_cluster_and_timetables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "MAX_PRICES", 300)
    monkeypatch.setattr(shared_work, "MAX_BYTES", 2_000_000)
    shared, hardware, most = SharedWork(), draw_job(random.Random(0)), 0
    for row in range(8):
        job = hardware | {"batch": {"global": 64 + row, "micro": 1, "sequence": 64 + 2 * row}}
        forecast_step(job | {"cluster": "dgx-h100:1", "plan": {"pp": 4, "tp": 2}}, shared)
        most = max(most, shared.price_count)
        assert shared._timetables.nbytes <= 1_000_000 + shared_work.ACTION_BYTES * 16 * (64 + row)
    assert 200 < most < 300 + 100


def test_a_grid_that_is_forecast_again_finds_all_that_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass over a grid needs is not dropped within the pass, as all of it was once there were 300 of a kind."""
    shared, grid = SharedWork(), [draw_job(random.Random(number)) for number in range(4)]
    first = [forecast_step(job, shared) for job in grid]
    made = [len(store) for store in shared.stores]
    assert [forecast_step(job, shared) for job in grid] == first
    assert [len(store) for store in shared.stores] == made


def test_prices_of_every_kind_count() -> None:
    shared, job = SharedWork(), draw_job(random.Random(0)) | {"plan": {"tp": 2, "pp": 2}}
    simulate(job, engine="shared", shared_work=shared)
    for prices in (shared._kernels, shared._communication, shared._uses, shared._pairs):
        before = shared.price_count
        prices.clear()
        assert shared.price_count < before
    assert shared.price_count == 0


def test_arrays_and_ops_of_a_forecast_are_freed_without_a_search_for_garbage() -> None:
    """Sweeps look for garbage in cycles rarely: the tables of a timetable would pile up, tens of megabytes each."""
    shared, job = SharedWork(), draw_job(random.Random(0)) | {"plan": {"tp": 2, "pp": 2}}
    forecast_step(job, shared)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        forecast_step(job | {"batch": {"global": 48, "micro": 1, "sequence": 640}}, shared)
        gc.collect()
        held = [*gc.garbage, *gc.get_referents(*gc.garbage)]
        assert [item for item in held if isinstance(item, np.ndarray | Op)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

"""A GPU that is not there: every call to CUDA that measurements make, on tensors of the CPU, counted.

What a stream does is done at once by the host, so work takes the time that the host needs. States follow `clocks`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from meshcast.validation.measurements.cuda import Cuda


class FakeStream:
    """A stream that remembers which streams it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeGraph:
    """A captured graph; replaying it does nothing."""

    def __init__(self, pool: Any) -> None:
        self.of_pool, self.replays = pool, 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> FakeGraph:
        return self


class FakeCuda(Cuda):
    """One of `gpus` GPUs that are not there. Its counts are those of all of them since `begin`."""

    backend = "gloo"
    gpus = 1
    calls: Counter[str] = Counter()
    spins: list[float] = []
    graphs: list[FakeGraph] = []
    clocks: Sequence[float] = (1980.0,)
    compute_capability = (9, 0)

    @classmethod
    def begin(cls) -> None:
        """Forgets all calls."""
        cls.calls, cls.spins, cls.graphs = Counter(), [], []
        cls.gpus, cls.clocks, cls.compute_capability = 1, (1980.0,), (9, 0)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.compute = self.current = FakeStream("compute")

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def count() -> int:
        return FakeCuda.gpus

    @staticmethod
    def versions() -> dict[str, str]:
        return {"cuda": "fake"}

    def select(self) -> None:
        self.calls["select"] += 1

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def process_group_options(self) -> dict[str, Any]:
        return {}

    @property
    def properties(self) -> Any:  # type: ignore[override]
        major, minor = self.compute_capability
        return SimpleNamespace(
            name="NVIDIA H200",
            total_memory=141 * 10**9,
            L2_cache_size=50 * 2**20,
            multi_processor_count=132,
            major=major,
            minor=minor,
            uuid="1234",
        )

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls["pin"] += 1
        return tensor

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def record_event(self) -> Any:
        self.calls["record_event"] += 1
        return time.perf_counter()

    def seconds_between(self, first: Any, last: Any) -> float:
        return float(last - first)

    def spin(self, seconds: float) -> None:
        self.spins.append(seconds)

    def new_stream(self) -> Any:
        self.calls["new_stream"] += 1
        return FakeStream(f"stream {self.calls['new_stream']}")

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        before, self.current = self.current, stream
        try:
            yield stream
        finally:
            self.current = before

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.calls["record_stream"] += 1

    def capture_graph(self, work: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
        graph = FakeGraph(pool)
        self.graphs.append(graph)
        return graph, work()

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def reset_peaks(self) -> None:
        self.calls["reset_peaks"] += 1

    def peak_allocated(self) -> int:
        return 1000

    def peak_reserved(self) -> int:
        """What was cached before counts until the cache is emptied."""
        return 2000 if self.calls["empty_cache"] else 9000

    def memory_in_use(self) -> int:
        return 3000

    def query(self, fields: Sequence[str]) -> list[str] | None:
        """The clocks one after another, then the last of them."""
        if fields == ["driver_version"]:
            return ["595.1"]
        if fields == ["name", "memory.total"]:
            return ["NVIDIA H200", "143771"]
        place = self.calls["query"]
        self.calls["query"] += 1
        answers = {"clocks.sm": str(self.clocks[min(place, len(self.clocks) - 1)]), "power.draw": "650.1"}
        return [answers.get(field, "0x4" if "reasons" in field else "[N/A]") for field in fields]

"""The device under measurement: a GPU, or one CPU core that stands in for a GPU.

The same measuring code runs on both. A GPU is timed with CUDA events and its memory is counted by torch's caching
allocator; a CPU core is timed with the host's clock and its memory is counted by torch's profiler.
"""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from hardware.errors import PlanError
from validation.measurements.measurement import Machine

Kind = Literal["cpu", "cuda"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's types by meshcast's names of number formats."""

FLUSH_BYTES = 256 * 2**20
"""Bytes written between samples to evict the operands from a GPU's L2: more than any L2 holds."""

FLUSH_GEMM, FLUSH_WEIGHTS = (256, 512, 1408), 16
"""Rows, depth and columns of the GEMM that a CPU core computes between samples, and the number of weights that it uses
in turn. As in a training step it evicts operands and code from the core's private caches but not from the shared
one."""


@dataclass
class MemoryPeak:
    """Peak memory during the block of `Device.peak`.

    instrument: counter that it was read from.
    allocated: memory of tensors [bytes].
    reserved: memory reserved by the caching allocator [bytes]; None on a CPU.
    """

    instrument: str
    allocated: int = 0
    reserved: int | None = None


@dataclass(frozen=True)
class Device:
    """A device, and how to measure time and memory on it.

    index: number of the GPU.
    """

    kind: Kind
    index: int = 0
    _flush: list[Any] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, kind: str, index: int = 0) -> Device:
        """Selects the device of a kind (``cpu`` or ``cuda``). Raises PlanError if this machine does not have it."""
        if kind not in ("cpu", "cuda"):
            raise PlanError("--device", "the device is cpu or cuda", "Write one of them", kind)
        if kind == "cuda" and not torch.cuda.is_available():
            rule = "torch finds no CUDA device" + (
                "" if torch.version.cuda else ", and this build of torch has no CUDA"
            )
            raise PlanError(
                "--device", rule, "Write cpu, or install a CUDA build of torch on a machine with a GPU", kind
            )
        if kind == "cuda" and index >= torch.cuda.device_count():
            rule = f"this machine has {torch.cuda.device_count()} GPUs"
            raise PlanError("--device", rule, "Use one process for each GPU", f"cuda:{index}")
        found = cls("cuda" if kind == "cuda" else "cpu", index)
        if kind == "cuda":
            torch.cuda.set_device(index)
        else:
            torch.set_num_threads(1)
        return found

    @property
    def torch(self) -> Any:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend of torch.distributed."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def dtype(self, name: str) -> Any:
        """Returns torch's type of a number format. Raises PlanError for formats not in `DTYPES` (fp8, fp4)."""
        if name not in DTYPES:
            raise PlanError("precision", f"tensors are {', '.join(DTYPES)}", "Use one of them", name)
        return DTYPES[name]

    def sync(self) -> None:
        """Waits until all issued work is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def seconds(self, work: Callable[[], Any], warmup: int = 3, repeat: int = 20, cold: bool = False) -> list[float]:
        """Times `repeat` calls of `work` and returns their durations [s].

        warmup: number of untimed calls before.
        cold: evict the operands of the previous call from the caches first (`FLUSH_BYTES`, `FLUSH_GEMM`).
        On a GPU a spinning kernel keeps the host ahead of the stream, so launch latency is not part of the durations.
        """
        for _ in range(warmup):
            work()
        self.sync()
        return [self._time_once(work, cold) for _ in range(repeat)]

    def _time_once(self, work: Callable[[], Any], cold: bool) -> float:
        if cold:
            self._flush_caches()
        if self.kind == "cpu":
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # about 0.5 ms, in which the host issues the timed work
        first.record()
        work()
        last.record()
        torch.cuda.synchronize(self.index)
        return float(first.elapsed_time(last)) * 1e-3

    def _flush_caches(self) -> None:
        """Evicts the operands of earlier work from the caches."""
        if self.kind == "cuda":
            if not self._flush:
                self._flush.append(torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.torch))
            self._flush[0].zero_()
            return
        rows, depth, columns = FLUSH_GEMM
        if not self._flush:
            self._flush.extend([torch.ones(rows, depth), *(torch.ones(depth, columns) for _ in range(FLUSH_WEIGHTS))])
        self._flush.append(self._flush.pop(1))
        torch.mm(self._flush[0], self._flush[1])

    @contextmanager
    def peak(self) -> Iterator[MemoryPeak]:
        """Measures peak memory inside the block, including what was allocated before it."""
        gc.collect()
        self.sync()
        if self.kind == "cuda":
            found = MemoryPeak("torch.cuda.max_memory_allocated, max_memory_reserved")
            torch.cuda.reset_peak_memory_stats(self.index)
            yield found
            self.sync()
            found.allocated = torch.cuda.max_memory_allocated(self.index)
            found.reserved = torch.cuda.max_memory_reserved(self.index)
            return
        found = MemoryPeak("torch.profiler (profile_memory) over storages alive before")
        before = live_tensor_bytes()
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            yield found
        found.allocated = before + _highest_level(profile)

    def machine(self, count: int = 1) -> Machine:
        """Describes this machine. count: number of devices that take part."""
        common: dict[str, Any] = {"device": self.kind, "count": count, "processors": len(os.sched_getaffinity(0))}
        common["system"] = f"{platform.system()} {platform.release()}"
        if self.kind == "cpu":
            return Machine(name=_processor_name(), memory=_host_memory(), **common)
        properties = torch.cuda.get_device_properties(self.index)
        return Machine(
            name=properties.name,
            memory=properties.total_memory,
            driver=_query_nvidia_smi("driver_version", self.index),
            clocks=self.clocks("now"),
            **common,
        )

    def clocks(self, when: str) -> dict[str, float]:
        """Reads the clocks of a GPU's SMs and memory [MHz], as ``sm <when>`` and ``memory <when>``; {} on a CPU."""
        clocks = {}
        for name, query in (("sm", "clocks.sm"), ("memory", "clocks.mem")):
            answer = _query_nvidia_smi(query, self.index) if self.kind == "cuda" else None
            if answer and answer.split()[0].replace(".", "").isdigit():
                clocks[f"{name} {when}"] = float(answer.split()[0])
        return clocks


def versions() -> dict[str, str]:
    """Versions of the software that a measurement depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        found["meshcast"] = version("meshcast")
    except PackageNotFoundError:
        found["meshcast"] = "unknown"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def live_tensor_bytes() -> int:
    """Sums the bytes of all tensors in host memory; a shared storage counts once."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        try:
            if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):  # freed meanwhile, or without a storage
            continue
    return sum(found.values())


def _highest_level(profile: Any) -> int:
    """Returns the peak of allocated memory above its level at the start of the profile [bytes]."""
    level = highest = 0
    events = profile.profiler.kineto_results.events()
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        level += nbytes
        highest = max(highest, level)
    return highest


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def _host_memory() -> int:
    """Memory of this machine [bytes]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _query_nvidia_smi(query: str, index: int) -> str | None:
    """Returns the answer of nvidia-smi to one query; None if it has none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

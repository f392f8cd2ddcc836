"""Devices that real work runs on: a GPU, or one core of a processor that stands in for one.

The same measuring code runs on both. A GPU is timed by its own events, a core by the clock; memory is counted by
torch's allocator on a GPU and by torch's profiler, which sees every allocation of the host's, on a core.
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
"""By meshcast's words."""

CACHE = 256 * 2**20
"""Bytes written between samples to leave nothing of the operands in the last-level cache: more than any GPU's L2."""

BETWEEN, WEIGHTS = (256, 512, 1408), 16
"""Rows, depth and columns of a product that a core computes between samples, each time with another of so many weights:
as in a step, it leaves neither operands nor program in the core's own caches, and what cores share it leaves."""


@dataclass
class Peak:
    """What was allocated (and, on a GPU, reserved) at most [bytes], by which instrument."""

    instrument: str
    allocated: int = 0
    reserved: int | None = None


@dataclass(frozen=True)
class Device:
    """A device and how to measure on it."""

    kind: Kind
    index: int = 0
    _flush: list[Any] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, kind: str, index: int = 0) -> Device:
        """Raises PlanError where there is no such device."""
        if kind not in ("cpu", "cuda"):
            raise PlanError("--device", "a device is cpu or cuda", "Write one of them", kind)
        if kind == "cuda" and not torch.cuda.is_available():
            rule = "torch finds no CUDA device" + (
                "" if torch.version.cuda else ", and this build of torch has no CUDA"
            )
            raise PlanError(
                "--device", rule, "Write cpu, or install a CUDA build of torch on a machine with a GPU", kind
            )
        if kind == "cuda" and index >= torch.cuda.device_count():
            rule = f"this machine has {torch.cuda.device_count()} GPUs"
            raise PlanError("--device", rule, "Ask for as many processes as it has GPUs", f"cuda:{index}")
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
        """What torch.distributed talks through."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def dtype(self, name: str) -> Any:
        """Torch's type of a format of meshcast's. Raises PlanError for one that no tensor of the trainer has."""
        if name not in DTYPES:
            raise PlanError("precision", f"tensors are of {', '.join(DTYPES)}", "Use one of them", name)
        return DTYPES[name]

    def sync(self) -> None:
        """Returns when all that was issued is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def seconds(self, work: Callable[[], Any], warmup: int = 3, repeat: int = 20, cold: bool = False) -> list[float]:
        """How long `work` takes, so many times [s].

        cold: what it read and wrote the time before is driven out of the caches first: on a GPU out of its L2, on a
        core as far as another product does it. On a GPU the host is kept ahead by a kernel that spins, so that launches
        are not part of the time.
        """
        for _ in range(warmup):
            work()
        self.sync()
        return [self._once(work, cold) for _ in range(repeat)]

    def _once(self, work: Callable[[], Any], cold: bool) -> float:
        if cold:
            self._flushed()
        if self.kind == "cpu":
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # about half a millisecond: enough for the host to issue what is timed
        first.record()
        work()
        last.record()
        torch.cuda.synchronize(self.index)
        return float(first.elapsed_time(last)) * 1e-3

    def _flushed(self) -> None:
        if self.kind == "cuda":
            if not self._flush:
                self._flush.append(torch.empty(CACHE, dtype=torch.int8, device=self.torch))
            self._flush[0].zero_()
            return
        rows, depth, columns = BETWEEN
        if not self._flush:
            self._flush.extend([torch.ones(rows, depth), *(torch.ones(depth, columns) for _ in range(WEIGHTS))])
        self._flush.append(self._flush.pop(1))
        torch.mm(self._flush[0], self._flush[1])

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Counts memory while it lasts, what lived before it included."""
        gc.collect()
        self.sync()
        if self.kind == "cuda":
            found = Peak("torch.cuda.max_memory_allocated, max_memory_reserved")
            torch.cuda.reset_peak_memory_stats(self.index)
            yield found
            self.sync()
            found.allocated = torch.cuda.max_memory_allocated(self.index)
            found.reserved = torch.cuda.max_memory_reserved(self.index)
            return
        found = Peak("torch.profiler (profile_memory) over storages alive before")
        before = alive()
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            yield found
        found.allocated = before + _most(profile)

    def machine(self, count: int = 1) -> Machine:
        """What the measurements are made on."""
        told: dict[str, Any] = {"device": self.kind, "count": count, "processors": len(os.sched_getaffinity(0))}
        told["system"] = f"{platform.system()} {platform.release()}"
        if self.kind == "cpu":
            return Machine(name=_processor(), memory=_memory(), **told)
        properties = torch.cuda.get_device_properties(self.index)
        return Machine(
            name=properties.name,
            memory=properties.total_memory,
            driver=_nvidia("driver_version", self.index),
            clocks=self.clocks("now"),
            **told,
        )

    def clocks(self, when: str) -> dict[str, float]:
        """The clocks of a GPU's multiprocessors and memory [MHz], as `when`; nothing of a core."""
        found = {}
        for name, query in (("sm", "clocks.sm"), ("memory", "clocks.mem")):
            told = _nvidia(query, self.index) if self.kind == "cuda" else None
            if told and told.split()[0].replace(".", "").isdigit():
                found[f"{name} {when}"] = float(told.split()[0])
        return found


def versions() -> dict[str, str]:
    """Of what a measurement depends on."""
    told = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        told["meshcast"] = version("meshcast")
    except PackageNotFoundError:
        told["meshcast"] = "unknown"
    if torch.version.cuda:
        told["cuda"] = torch.version.cuda
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return told


def alive() -> int:
    """Bytes of all tensors of the host's, each storage once."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        try:
            if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):  # gone meanwhile, or without a storage
            continue
    return sum(found.values())


def _most(profile: Any) -> int:
    """The highest level of allocated memory above that of the begin [bytes]."""
    level = highest = 0
    events = profile.profiler.kineto_results.events()
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        level += nbytes
        highest = max(highest, level)
    return highest


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _nvidia(query: str, index: int) -> str | None:
    """One answer of nvidia-smi, None where there is none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

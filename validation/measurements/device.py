"""The device under measurement: a GPU, or a CPU core that stands in for a GPU.

The same measuring code runs on both. A GPU is timed with CUDA events and its memory is counted by torch's caching
allocator and by the driver; a CPU core is timed with the host's clock and its memory is counted by torch's profiler.
All calls to CUDA are those of `validation.measurements.cuda.Cuda`.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import field
from typing import Any, Literal, TypeVar

import torch

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.validation.measurements.cuda import Cuda
from meshcast.validation.measurements.gpu_state import StateMonitor, read_state, warm_up
from meshcast.validation.measurements.measurement import GPUState, Machine

Kind = Literal["cpu", "cuda"]

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's types by meshcast's names of number formats."""

FLUSH_BYTES = 256 * 2**20
"""Bytes written between samples to evict the operands from a GPU's L2: more than any L2 holds."""

FLUSH_GEMM, FLUSH_WEIGHTS = (256, 512, 1408), 16
"""Rows, depth and columns of the GEMM that a CPU core computes between samples, and the number of weights that it uses
in turn. As in a training step it evicts operands and code from the core's private caches but not from the shared
caches."""


MIN_SPIN, MAX_SPIN = 0.5e-3, 0.5
"""Shortest and longest time for which a spinning kernel holds the stream back while the host issues timed work [s]."""

SPIN_MARGIN = 1.5
"""Time of the spinning kernel over the time in which the host has issued the same work before."""

COUNTERS = ("allocated", "reserved", "device")
"""Counters of a GPU's memory: of tensors, of the caching allocator, and of the driver (all that is not free)."""


@dataclass
class MemoryPeak:
    """Peak memory during the block of `Device.peak`.

    instrument: counters that it was read from.
    allocated: memory of tensors [bytes].
    reserved: memory reserved by the caching allocator [bytes]; None on a CPU.
    device: memory of the GPU that is not free at the end of the block, in which the allocator keeps what it has
        reserved [bytes]: it decides whether a plan fits. None on a CPU.
    """

    instrument: str
    allocated: int = 0
    reserved: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class Device:
    """A device, and how to measure time and memory on it.

    cuda: the GPU; None on a CPU.
    """

    kind: Kind
    cuda: Cuda | None = None
    _flush: list[Any] = field(default_factory=list, repr=False)
    _monitors: list[StateMonitor] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, kind: str, index: int = 0, select: bool = True) -> Device:
        """Selects the device of a kind (``cpu`` or ``cuda``) and, of a GPU, number.

        select: this process is going to use the GPU; otherwise it takes no memory of it.
        Raises PlanError if this machine does not have it.
        """
        if kind not in ("cpu", "cuda"):
            raise PlanError("--device", "the device is cpu or cuda", "Write one of them", kind)
        if kind == "cpu":
            torch.set_num_threads(1)
            return cls("cpu")
        if not Cuda.is_available():
            rule = "torch finds no CUDA device" + ("" if Cuda.versions() else ", and this build of torch has no CUDA")
            raise PlanError(
                "--device", rule, "Write cpu, or install a CUDA build of torch on a machine with a GPU", kind
            )
        if index >= Cuda.count():
            rule = f"this machine has {Cuda.count()} GPUs"
            raise PlanError("--device", rule, "Use one process for each GPU", f"cuda:{index}")
        cuda = Cuda(index)
        if select:
            cuda.select()
        return cls("cuda", cuda)

    @property
    def torch(self) -> Any:
        return self.cuda.device if self.cuda else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend of torch.distributed."""
        return self.cuda.backend if self.cuda else "gloo"

    @property
    def memory_counters(self) -> tuple[str, ...]:
        """Counters of memory that this device has: attributes of `MemoryPeak`."""
        return COUNTERS if self.cuda else COUNTERS[:1]

    def dtype(self, name: str) -> Any:
        """Returns torch's type of a number format. Raises PlanError for formats not in `DTYPES` (fp8, fp4)."""
        if name not in DTYPES:
            raise PlanError("precision", f"tensors are {', '.join(DTYPES)}", "Use one of them", name)
        return DTYPES[name]

    def sync(self) -> None:
        """Waits until all issued work is done."""
        if self.cuda:
            self.cuda.synchronize()

    def run_timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Runs work on an idle device until it is idle again; returns what the work returns, and the time on the host's
        clock [s]."""
        self.sync()
        begin = time.perf_counter()
        answer = work()
        self.sync()
        return answer, time.perf_counter() - begin

    def pin_memory(self, tensor: Any) -> Any:
        """Copies a tensor of the host to pinned memory, from which a GPU copies without the host."""
        return self.cuda.pin(tensor) if self.cuda else tensor

    # --------------------------------------------------------------------------------------------- time

    def seconds(self, work: Callable[[], Any], warmup: int = 3, repeat: int = 20, cold: bool = False) -> list[float]:
        """Times `repeat` calls of `work` and returns their durations [s]; see `seconds_after`."""
        return self.seconds_after(lambda: work, warmup, repeat, cold)

    def seconds_after(
        self, prepare: Callable[[], Callable[[], Any]], warmup: int = 3, repeat: int = 20, cold: bool = False
    ) -> list[float]:
        """Times `repeat` times the work that `prepare` returns, without `prepare`, and returns its durations
        [s].

        warmup: number of untimed calls before.
        cold: evict the operands of the previous call from the caches first (`FLUSH_BYTES`, `FLUSH_GEMM`).

        On a GPU a spinning kernel holds the stream back until the host has issued all of the work, so launch latency is
        not part of the durations. A sample whose work took the host longer to issue is taken again behind a longer
        kernel.
        """
        spin = MIN_SPIN
        for _ in range(warmup):
            work = prepare()
            self.sync()
            begin = time.perf_counter()
            work()
            spin = min(max(spin, SPIN_MARGIN * (time.perf_counter() - begin)), MAX_SPIN)
        self.sync()
        durations = []
        for _ in range(repeat):
            seconds, issued = self.time_once(prepare(), spin, cold)
            while self.cuda and issued > spin and spin < MAX_SPIN:
                spin = min(SPIN_MARGIN * issued, MAX_SPIN)
                seconds, issued = self.time_once(prepare(), spin, cold)
            durations.append(seconds)
        return durations

    def time_once(self, work: Callable[[], Any], spin: float = MIN_SPIN, cold: bool = False) -> tuple[float, float]:
        """Times work once; returns its duration and the time in which the host issued it [s].

        spin: time for which a GPU's stream is held back [s]. cold: see `seconds_after`.
        """
        if cold:
            self._flush_caches()
        if not self.cuda:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin, 0.0
        self.cuda.spin(spin)
        begin = time.perf_counter()
        first = self.cuda.record_event()
        work()
        last = self.cuda.record_event()
        issued = time.perf_counter() - begin
        self.cuda.synchronize()
        return self.cuda.seconds_between(first, last), issued

    def warm_up(self, runs: int, agree: Callable[[bool], bool] = lambda go_on: go_on) -> Iterator[int]:
        """Yields the numbers of warm-up runs: at least `runs` and, while the GPU is monitored, until its clock is
        steady. See `validation.measurements.gpu_state.warm_up`."""
        return warm_up(runs, self._monitors[-1] if self._monitors else None, agree)

    def _flush_caches(self) -> None:
        """Evicts the operands of earlier work from the caches."""
        if self.cuda:
            if not self._flush:
                self._flush.append(torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.torch))
            self._flush[0].zero_()
            return
        rows, depth, columns = FLUSH_GEMM
        if not self._flush:
            self._flush.extend([torch.ones(rows, depth), *(torch.ones(depth, columns) for _ in range(FLUSH_WEIGHTS))])
        self._flush.append(self._flush.pop(1))
        torch.mm(self._flush[0], self._flush[1])

    # ------------------------------------------------------------------------------------------- memory

    def release_cache(self) -> None:
        """Frees what is no longer used, also in the caching allocator: what comes next reserves its memory."""
        gc.collect()
        if self.cuda:
            self.cuda.synchronize()
            self.cuda.empty_cache()

    @contextmanager
    def peak(self) -> Iterator[MemoryPeak]:
        """Measures peak memory inside the block, including what was allocated before it."""
        gc.collect()
        self.sync()
        if self.cuda:
            peak = MemoryPeak("torch.cuda.max_memory_allocated, max_memory_reserved, mem_get_info")
            self.cuda.reset_peaks()
            yield peak
            self.sync()
            peak.allocated, peak.reserved = self.cuda.peak_allocated(), self.cuda.peak_reserved()
            peak.device = self.cuda.memory_in_use()
            return
        peak = MemoryPeak("torch.profiler (profile_memory), and the storages alive before")
        before = live_tensor_bytes()
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            yield peak
        peak.allocated = before + _highest_level(profile)

    # ------------------------------------------------------------------------------------------ machine

    def machine(self, count: int = 1) -> Machine:
        """Describes this machine. count: number of devices that take part."""
        common: dict[str, Any] = {"device": self.kind, "count": count, "processors": len(os.sched_getaffinity(0))}
        common["system"] = f"{platform.system()} {platform.release()}"
        if not self.cuda:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Machine(name=_processor_name(), memory=memory, **common)
        driver = self.cuda.query(["driver_version"])
        name, memory = self.cuda.name_and_memory()
        return Machine(name=name, memory=memory, driver=driver[0] if driver else None, **common)

    @contextmanager
    def monitor(self) -> Iterator[Callable[[Machine], Machine]]:
        """Monitors clocks, power and throttling of a GPU inside the block; nothing on a CPU.

        Yields a function that adds to a machine the states before the block, inside it, and at the time of the call.
        """
        states: dict[str, GPUState | None] = {"before": read_state(self.cuda) if self.cuda else None}

        def add_states(machine: Machine) -> Machine:
            if self._monitors:
                states["during"] = self._monitors[-1].summary()
            if self.cuda:
                states["after"] = read_state(self.cuda)
            return machine.model_copy(
                update={"states": {key: state for key, state in states.items() if state is not None}}
            )

        with StateMonitor(self.cuda) if self.cuda else nullcontext() as monitor:
            self._monitors.extend([monitor] if monitor is not None else [])
            try:
                yield add_states
            finally:
                del self._monitors[-1:]


def live_tensor_bytes() -> int:
    """Sums the bytes of all tensors in host memory; a shared storage counts once."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        try:
            if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
                storage = candidate.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):  # freed meanwhile, or without a storage
            continue
    return sum(storages.values())


def _highest_level(profile: Any) -> int:
    """Returns the peak of allocated memory above its level at the start of the profile [bytes]."""
    level = highest = 0
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
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

"""CUDA as measurements use it: an object with every call to torch.cuda and nvidia-smi.

Nothing else in `validation` calls torch.cuda. A test replaces `Cuda` by a fake on CPU tensors that counts the calls, so
that the code of a GPU measurement runs, and can be checked, on a machine without a GPU.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

SPIN_CYCLES = 20_000_000
"""Cycles of the spinning kernel that measures how many cycles a second has: about 10 ms."""


class Cuda:
    """One GPU.

    index: its number among the GPUs that torch sees.
    """

    backend = "nccl"
    """Backend of torch.distributed."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    # ------------------------------------------------------------------------------------------ devices

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def count() -> int:
        """Counts the GPUs that torch sees."""
        return torch.cuda.device_count()

    @staticmethod
    def versions() -> dict[str, str]:
        """Returns the versions of CUDA and NCCL; {} for a build of torch without CUDA."""
        versions = {}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
            if torch.cuda.is_available() and torch.distributed.is_nccl_available():
                versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return versions

    def select(self) -> None:
        """Makes this GPU the current GPU."""
        torch.cuda.set_device(self.index)

    @property
    def device(self) -> torch.device:
        """Device of tensors on this GPU."""
        return torch.device("cuda", self.index)

    @property
    def process_group_options(self) -> dict[str, Any]:
        """Options of ``init_process_group``: NCCL's communicators are created at once, not with the first
        collective."""
        return {"device_id": self.device}

    @cached_property
    def properties(self) -> Any:
        """Name, total_memory, L2_cache_size, multi_processor_count, major, minor, uuid."""
        return torch.cuda.get_device_properties(self.index)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return self.properties.major, self.properties.minor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the host in pinned memory."""
        return tensor.pin_memory()

    # --------------------------------------------------------------------------------- time and streams

    def synchronize(self) -> None:
        """Waits until all issued work of all streams is done."""
        torch.cuda.synchronize(self.index)

    def record_event(self) -> Any:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        """Returns the time between two recorded events that have happened [s]."""
        return float(first.elapsed_time(last)) * 1e-3

    @cached_property
    def cycles_per_second(self) -> float:
        """Rate at which a spinning kernel counts its cycles [1/s]."""
        torch.cuda._sleep(SPIN_CYCLES)
        self.synchronize()
        first = self.record_event()
        torch.cuda._sleep(SPIN_CYCLES)
        last = self.record_event()
        self.synchronize()
        return SPIN_CYCLES / self.seconds_between(first, last)

    def spin(self, seconds: float) -> None:
        """Occupies the current stream for some time, in which the host can issue the work that follows."""
        torch.cuda._sleep(int(seconds * self.cycles_per_second))

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Sends work issued inside the block to `stream`."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor from being reused until `stream` has reached the point at which it is freed."""
        tensor.record_stream(stream)

    def capture_graph(self, work: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
        """Captures `work` as a CUDA graph; returns the graph and what `work` has returned. pool: memory of an earlier
        graph that this shares."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            returned = work()
        return graph, returned

    # ------------------------------------------------------------------------------------------- memory

    def empty_cache(self) -> None:
        """Returns cached memory that no tensor uses to the GPU."""
        torch.cuda.empty_cache()

    def reset_peaks(self) -> None:
        """Starts the measurement of peak memory anew."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def peak_allocated(self) -> int:
        """Returns the peak memory of tensors since `reset_peaks` [bytes]."""
        return torch.cuda.max_memory_allocated(self.index)

    def peak_reserved(self) -> int:
        """Returns the peak memory reserved by the caching allocator since `reset_peaks` [bytes]."""
        return torch.cuda.max_memory_reserved(self.index)

    def memory_in_use(self) -> int:
        """Returns the memory of the GPU that is not free, for all processes [bytes]: also contexts, libraries and
        NCCL."""
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free

    # --------------------------------------------------------------------------------------- nvidia-smi

    @cached_property
    def uuid(self) -> str:
        """Name of this GPU for nvidia-smi, which numbers GPUs otherwise than torch under CUDA_VISIBLE_DEVICES.

        A process that has not used CUDA yet is not forced to: its context would take memory of the GPU.
        """
        if torch.cuda.is_initialized() and (uuid := getattr(self.properties, "uuid", None)):
            return f"GPU-{uuid}"
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        return visible[self.index] if self.index < len(visible) else str(self.index)

    def name_and_memory(self) -> tuple[str, int]:
        """Returns the name of this GPU and its memory [bytes]: from nvidia-smi, which takes no memory, or else from
        torch."""
        answer = self.query(["name", "memory.total"])
        if answer is not None and len(answer) == 2 and answer[1].isdigit():
            return answer[0], int(answer[1]) * 2**20
        return self.properties.name, self.properties.total_memory

    def query(self, fields: Sequence[str]) -> list[str] | None:
        """Asks nvidia-smi for `fields` of this GPU, such as ``clocks.sm``; None if it has no answer."""
        command = ["nvidia-smi", f"--id={self.uuid}", f"--query-gpu={','.join(fields)}"]
        command.append("--format=csv,noheader,nounits")
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        return [value.strip() for value in answer.strip().split(",")] if answer.strip() else None

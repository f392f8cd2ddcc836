"""Events of a profiler trace, as torch writes them."""

from __future__ import annotations

from typing import Any

START = 4458676983543.25
"""A moment as traces have it [us]."""


def event(name: str, category: str, begin: float, seconds: float, **more: Any) -> dict[str, Any]:
    """A slice; times in microseconds from the begin."""
    args, lane = more.pop("args", {}), more.pop("tid", 20453)
    found = {"ph": "X", "cat": category, "name": name, "pid": 20446, "tid": lane}
    return found | {"ts": START + begin, "dur": seconds, "args": args} | more


def kernel(name: str, begin: float, seconds: float, correlation: int, stream: int = 7, **args: Any) -> dict[str, Any]:
    fields = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return event(name, "kernel", begin, seconds, pid=0, tid=stream, args=fields)


def launch(begin: float, correlation: int) -> dict[str, Any]:
    return event("cudaLaunchKernel", "cuda_runtime", begin, 2.0, args={"correlation": correlation})

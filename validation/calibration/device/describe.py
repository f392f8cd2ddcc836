"""Describes the device at hand as a file of the catalog describes a GPU."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import torch

from meshcast.hardware import gpus, load
from meshcast.validation.measurements.device import Device, Machine
from meshcast.validation.measurements.measurement import utc_now

LARGE = 128 * 2**20
"""Bytes that are scaled in place to measure the memory bandwidth: far more than any cache holds."""

KNOWN = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H800": "h800-sxm",
    "NVIDIA H20": "h20",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40",
    "NVIDIA A800-SXM4-80GB": "a800-sxm-80",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300": "b300-sxm",
    "NVIDIA GB300": "gb300",
    "NVIDIA L40S": "l40s",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32",
}
"""Names in the catalog by those of torch.cuda.get_device_name; recalled, not checked on each GPU."""

ARCHITECTURES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
"""By the first number of the compute capability; 8.9 is ada."""


def catalog_name(machine: Machine) -> str:
    """Returns the name of a GPU in the catalog, "" if it has none."""
    name = KNOWN.get(machine.name, "")
    assert not name or name in gpus()
    return name


def core(machine: Machine, flops: float, stream: float) -> dict[str, Any]:
    """Returns a core as a GPU of the catalog.

    flops: the most FLOP/s in fp32 that a product reached. stream: bytes/s of a long tensor scaled in place, read and
    written.
    """
    count = machine.processors or 1
    stated = {"kind": "measured", "source": f"meshcast calibrate --device cpu on {machine.name}, {utc_now()[:10]}"}
    cache = _cache()
    generic = load("gpus", "cpu-core")
    clock = _clock() or float(generic.clock)
    return {
        "name": "this-core",
        "title": f"one core of {machine.name}",
        "architecture": "cpu",
        "memory": {"value": f"{(machine.memory or 0) // count} B", **stated},
        "memory_bandwidth": {"value": f"{stream / 1e9:.4g} GB/s", **stated},
        "l2": {"value": f"{cache or int(generic.l2)} B", **stated},
        "multiprocessors": {"value": 1, "per": "gpu", **stated},
        "clock": {"value": f"{clock / 1e6:.4g} MHz", **stated},
        "peak": {"fp32": {"value": f"{flops / 1e9:.4g} GFLOP/s", **stated}},
        "power": {"value": generic.power.text, "kind": "assumed", "source": generic.power.source},
        "host": "loopback",
        "usual_node": "cpu-host",
    }


def gpu(device: Device, flops: float, stream: float) -> dict[str, Any]:
    """Returns the description of a GPU that is in no catalog. Its peaks are the rates that it reached."""
    assert device.cuda is not None
    machine, properties = device.machine(), device.cuda.properties
    stated = {"kind": "measured", "source": f"meshcast calibrate --device cuda on {machine.name}, {utc_now()[:10]}"}
    major, minor = properties.major, properties.minor
    return {
        "name": "this-gpu",
        "title": machine.name,
        "architecture": "ada" if (major, minor) == (8, 9) else ARCHITECTURES.get(major, "hopper"),
        "memory": {"value": f"{properties.total_memory} B", **stated},
        "memory_bandwidth": {"value": f"{stream / 1e9:.4g} GB/s", **stated},
        "l2": {"value": f"{properties.L2_cache_size} B", **stated},
        "multiprocessors": {"value": properties.multi_processor_count, "per": "gpu", **stated},
        "peak": {name: {"value": f"{flops / 1e9:.4g} GFLOP/s", **stated} for name in ("bf16", "fp16")},
        "power": {"value": "400 W", "kind": "assumed", "source": "not asked for"},
        "host": "pcie4",
    }


def measure_stream(device: Device) -> float:
    """Measures the rate of scaling a long tensor in place, reads and writes in sum [bytes/s]: no write allocates."""
    tensor = torch.ones(LARGE // 4, device=device.torch)
    return 2 * LARGE / statistics.median(device.seconds(lambda: tensor.mul_(1.0), 3, 15))


def _cache() -> int:
    """Returns the size of the last-level cache that a core reaches [bytes]; 0 if the system does not say."""
    places = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    sizes = [file.read_text().strip() for file in places]
    units = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * units.get(size[-1], 1) for size in sizes if size[:-1].isdigit()), default=0)


def _clock() -> float:
    """Returns the clock of the first core now [Hz]; 0 if the system does not say."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    clocks = [line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")]
    return float(clocks[0]) * 1e6 if clocks and os.name == "posix" else 0.0

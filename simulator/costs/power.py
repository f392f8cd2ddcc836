"""Electric power of a GPU while it computes, communicates and waits, and of what its node and data centre add.

A GPU draws its idle power all the time. A running kernel adds a part for multiprocessors that are busy at all (clocks,
instruction issue) and a part in proportion to what it does: FLOPs of tensor cores against their peak, bytes against the
memory bandwidth::

    P = idle + limit x (busy + kind x utilisation)

The board holds the mean over tens of milliseconds at its limit, so kernels together add `limit` - `idle` at most while
they run. The coefficients are shares of the limit, so that they carry over to GPUs that were not measured. They are in
``simulator/costs/power.yaml`` with their sources and errors; ``python -m tools.data.power``
fits those of the measured GPUs.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import ARCHITECTURES, LATEST
from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work

COEFFICIENTS = ("idle", "busy", "gemm", "attention", "memory", "communication", "waiting")
"""Shares of the power limit, see `PowerModel`."""

FILE = "power.yaml"


@dataclass(frozen=True)
class PowerModel:
    """Power of a GPU; the coefficients are shares of its power limit.

    gpu: its peaks, bandwidth and limit.
    idle: of a GPU that holds a program and runs nothing.
    busy: added while any kernel computes.
    gemm, attention, memory: added at full use of the tensor cores, and of the memory bandwidth.
    communication: added while a collective or a message is on its way.
    waiting: added while a kernel of the communication library waits for other GPUs.
    sigma: standard deviation of log(measured / forecast) of the power of a training step.
    assumed: what was not measured on this GPU, a sentence each.
    """

    gpu: GPU
    idle: float
    busy: float
    gemm: float
    attention: float
    memory: float
    communication: float
    waiting: float
    sigma: float
    assumed: tuple[str, ...] = ()

    @cached_property
    def limit(self) -> float:
        """Power limit of the board [W]."""
        return float(self.gpu.power)

    @property
    def idle_watts(self) -> float:
        """Power of a GPU that runs nothing [W]."""
        return self.idle * self.limit

    def utilisation(self, work: Work, seconds: float) -> tuple[str, float]:
        """Returns what a kernel of `seconds` uses most, gemm, attention or memory, and its share of the peak."""
        if isinstance(work, Memory):
            return "memory", work.bytes / seconds / self.gpu.memory_bandwidth
        peak = self.gpu.peak.get(work.dtype) or max(self.gpu.peak.values())  # type: ignore[union-attr,arg-type]
        return ("gemm" if isinstance(work, Gemm) else "attention"), work.flops / seconds / float(peak)

    def kernel_joules(self, work: Work | None, seconds: float) -> float:
        """Returns the energy of a kernel beyond the idle power, before the limit [J]."""
        if seconds <= 0 or not isinstance(work, Gemm | Attention | Memory):
            return 0.0
        kind, share = self.utilisation(work, seconds)
        return float((self.busy + getattr(self, kind) * min(share, 1.0)) * self.limit * seconds)

    def most_joules(self, seconds: float) -> float:
        """Returns the energy that the limit leaves to kernels which run for `seconds`, beyond the idle power [J]."""
        return (1 - self.idle) * self.limit * seconds

    def least_joules_per_flop(self, dtype: str) -> float:
        """Returns the least energy of a FLOP of GEMMs or attention in a number format, beyond the idle power [J]."""
        added = self.busy + min(self.gemm, self.attention)
        return float(min(added, 1 - self.idle) * self.limit / self.gpu.peak[dtype])  # type: ignore[index]


@lru_cache(maxsize=256)
def power_model(gpu: GPU) -> PowerModel:
    """Returns the power model of a GPU: its coefficients or, named as assumed, those of the nearest measured GPU."""
    data = read_shipped(Path(__file__).parent / FILE, FILE).data
    order = (gpu.architecture, *ARCHITECTURES.get(gpu.architecture, LATEST), *LATEST)
    if gpu.name in data:
        lender, distance = gpu.name, ""
    else:
        lender = next(
            name for architecture in order for name, entry in data.items() if entry["architecture"] == architecture
        )
        distance = "generation" if data[lender]["architecture"] == gpu.architecture else "other"
    entry = data[lender]
    coefficients = {name: float(entry["coefficients"][name]["value"]) for name in COEFFICIENTS}
    unmeasured = [name for name in COEFFICIENTS if entry["coefficients"][name].get("assumed")]
    assumed = []
    if distance:
        shares = f"shares of its {float(gpu.power):.4g} W as measured on {lender}"
        assumed.append(f"power of {gpu.name}: not measured; {shares}")
    if unmeasured:
        assumed.append(f"power of {gpu.name} in {' and '.join(unmeasured)}: {entry['unmeasured']}")
    sigma = float(entry["sigma"][distance or "own"])
    return PowerModel(gpu, **coefficients, sigma=sigma, assumed=tuple(assumed))


@dataclass(frozen=True)
class Overhead:
    """What is added to the power of GPUs: by their nodes, and by the data centre.

    node: power of CPUs, memory, network ports, switches and fans for each GPU [W].
    pue: power of the data centre over that of its computers.
    assumed: which of them the job does not state, a sentence each.
    """

    node: float
    pue: float
    assumed: tuple[str, ...] = ()


NODE_SHARE = 0.5
"""Power of a node beside its GPUs over the power limit of these: 8.4 kW at most of a node of eight H100 in training
(Latif et al. 2025, "Single-Node Power Demand During AI Training", IEEE Access 13, arXiv 2412.08602), less 8 x 700 W.
A node of Jean Zay with eight A100 drew 1.9 kW idle (256,646 kWh in 118 days of 48 nodes, Luccioni et al. 2023, JMLR 24
(253), table 3): 0.4 of 400 W beside idle GPUs."""

PUE = 1.2
"""Power usage effectiveness where the job states none: that of Jean Zay (Luccioni et al. 2023). Large operators report
1.1; the mean of 2023 over all is 1.58 (Uptime Institute, Global Data Center Survey 2023)."""


def overhead(gpu: GPU, node_watts: float | None, pue: float | None) -> Overhead:
    """Returns the overhead of a GPU. node_watts, pue: as the job states them, None: assumed."""
    assumed = []
    if node_watts is None:
        node_watts = NODE_SHARE * float(gpu.power)
        assumed.append(f"{node_watts:.4g} W a GPU for CPUs, network, switches and fans (run.node_watts_per_gpu)")
    if pue is None:
        pue = PUE
        assumed.append(f"a PUE of {PUE:g} (run.pue)")
    return Overhead(float(node_watts), float(pue), tuple(assumed))

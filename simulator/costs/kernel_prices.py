"""Prices of kernels: GEMMs, attention and memory-bound operations on a GPU, as a framework runs them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.estimate import FULL, Estimate, Use
from meshcast.simulator.costs.kernels.decomposition import Decomposition
from meshcast.simulator.costs.kernels.eager import EagerKernels, EagerPasses, make_eager_kernels
from meshcast.simulator.costs.kernels.fixed_tiles import with_tile_of_training
from meshcast.simulator.costs.kernels.gemm import uses_tensor_cores
from meshcast.simulator.costs.kernels.grouped import price_group_by_group, take_group
from meshcast.simulator.costs.kernels.libraries import (
    Relative,
    attention_format,
    attention_library,
    launches_each_group,
    slow_down_in_order,
    training_library,
)
from meshcast.simulator.costs.kernels.sections import DENSE, SECTIONS, section_of, section_on
from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work

RATES = {
    "kernel": "rate of GEMMs and attention against the calibrated one (power, sustained clocks, launch gaps)",
    "unaligned": "further factor on the rate of GEMMs whose rows are too unaligned for tensor cores",
    "attention": "further factor on the rate of attention (an older generation of kernels)",
    "memory_bound": "time of memory-bound kernels against the calibrated one (less fused than the work says)",
    "communication": "rate of all links against the calibrated one",
}
"""Factors that a framework may set for its kernels, 1 by default; none makes work faster than the hardware's peak."""


@dataclass(frozen=True)
class KernelTraits:
    """Which kernels run, and at which rates.

    Attributes:
        rates: factors by the names of `RATES`; those left out are 1.
        attention: library of fused attention; empty: that of today's training programs.
        decomposition: of the output tiles of dense GEMMs; None: that of the measured library.
        eager: memory-bound operations that are several kernels on a GPU, see `Framework`.
        sustained: rate in a step against the same kernel alone, see `Framework`; None: that of the GPU's architecture.
        alone: kernels run alone, in turn, not at the lower sustained rate of a long training step.
        pace: time of GEMMs and attention on the slowest GPU over the calibrated time, see `simulator.costs.stragglers`.
        deterministic: the backward pass of attention adds in a fixed order.
        rings_alone: all-reduces run over rings, neither trees nor sums in switches.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    attention: str = ""
    decomposition: Decomposition | None = None
    eager: Mapping[Any, EagerPasses] = field(default_factory=dict)
    sustained: float | None = None
    alone: bool = False
    pace: float = 1.0
    deterministic: bool = False
    rings_alone: bool = False

    def __hash__(self) -> int:  # of equal traits; dictionaries have none
        rates, eager = tuple(self.rates.items()), tuple(self.eager)
        switches = self.alone, self.deterministic, self.rings_alone
        return hash((rates, self.attention, self.decomposition, eager, self.sustained, self.pace, *switches))

    def all_rates(self) -> dict[str, float]:
        """Returns the factors by all names of `RATES`.

        Raises PlanError for an unknown name or a value out of range.
        """
        for name, value in self.rates.items():
            if name not in RATES:
                raise PlanError(f"framework.set.rates.{name}", "no such rate", nearest(name, RATES), value)
            if not 1e-3 <= value <= 1e3:
                rule = "a rate lies between 0.001 and 1000"
                raise PlanError(f"framework.set.rates.{name}", rule, "Write 1 for the calibrated one", value)
        return {name: float(self.rates.get(name, 1.0)) for name in RATES}


class KernelPrices:
    """Prices of kernels on a GPU."""

    def __init__(self, gpu: GPU, traits: KernelTraits, calibration: Calibration) -> None:
        self._gpu, self._traits, self._calibration = gpu, traits, calibration
        self._rates = traits.all_rates()
        self._eager = traits.eager if gpu.architecture != "cpu" else {}
        self._attention_library = attention_library(traits.attention, gpu.architecture)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the calibration had to borrow from other hardware, a sentence each."""
        sections = ("gemm", "attention", "memory")
        return tuple(dict.fromkeys(text for name in sections for text in self._find_assumed(name)))

    @property
    def assumed_experts(self) -> tuple[str, ...]:
        """What it had to borrow for the GEMMs of experts."""
        return self._find_assumed("grouped")

    def price(self, work: Gemm | Attention | Memory) -> Estimate:
        """Returns how long a kernel takes."""
        if isinstance(work, Gemm):
            return self._price_gemm(work)
        return self._price_attention(work) if isinstance(work, Attention) else self._price_memory(work)

    def use(self, work: Gemm | Attention) -> Use:
        """Returns the share of multiprocessors without which a kernel slows down."""
        return Use(multiprocessors=1 - work.reserved / self._gpu.multiprocessors) if work.reserved else FULL

    def sustained_rate(self, dtype: str = "bf16") -> float:
        """Returns the rate of GEMMs and attention in a step against the same kernel alone.

        That measured on the machine itself, else that of the framework, else that of the GPU's architecture.
        """
        if self._traits.alone:
            return 1.0
        measured = self._calibration.measures_steps or self._gpu.architecture == "cpu"
        stated = None if measured else self._traits.sustained
        return self._calibration.sustained_rate(self._gpu, dtype) if stated is None else stated

    def assumed_eager(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """Returns what the calibration had to borrow for operations among `works` that run as several kernels."""
        several = (isinstance(work, Memory) and make_eager_kernels(work, self._eager) for work in works)
        return self._find_assumed("eager") if any(several) else ()

    def _find_assumed(self, section: str) -> tuple[str, ...]:
        """Returns what the calibration had to borrow for a section."""
        return self._calibration.kernel_model(self._gpu, section_on(section, self._gpu)).assumed

    def _price_gemm(self, work: Gemm) -> Estimate:
        """Returns the price of a GEMM, some of whose multiprocessors may communicate."""
        share = work.part
        if share != 1:
            groups = tuple((number, tokens / share) for number, tokens in work.groups)
            work = replace(work, m=work.m / share, groups=groups, part=1.0)
        if len(work.groups) == 1 and work.groups[0][0] == 1:
            work = take_group(work, work.groups[0][1])
        by_group = work.groups and launches_each_group(work.dtype, self._gpu.architecture)
        price = price_group_by_group(work, self._price_whole_gemm) if by_group else self._price_whole_gemm(work)
        return self._on_fewer(price._replace(seconds=price.seconds * share), work.sms + work.reserved)

    def _price_whole_gemm(self, work: Gemm) -> Estimate:
        """Returns the price of a GEMM, or of a grouped GEMM, in a single kernel on all multiprocessors."""
        unaligned = 1.0 if uses_tensor_cores(work) else self._rates["unaligned"]
        work = with_tile_of_training(work, self._gpu)
        return self._price_kernel(work, self._step_rate(work) * unaligned)

    def _price_attention(self, work: Attention) -> Estimate:
        """Returns the price of attention in the number format of its library."""
        dtype = attention_format(self._traits.attention)
        in_format = replace(work, dtype=dtype) if dtype else work
        price = self._price_kernel(in_format, self._step_rate(in_format) * self._rates["attention"])
        if self._traits.deterministic and work.backward:
            slower = slow_down_in_order(self._attention_library.library, work, self._gpu)
            price = price._replace(seconds=price.seconds * slower)
        return self._on_fewer(price, work.reserved)

    def _price_memory(self, work: Memory) -> Estimate:
        """Returns the price of a memory-bound operation, of a single kernel or of several, which are counted."""
        kernels = make_eager_kernels(work, self._eager) if self._eager else None
        if kernels:
            return self._price_kernel(kernels, 1.0)
        return self._price_kernel(work, self._rates["memory_bound"])

    def _step_rate(self, work: Gemm | Attention) -> float:
        """Returns the rate of a kernel in a step against the calibrated rate."""
        return self._rates["kernel"] * self.sustained_rate(work.dtype) / self._traits.pace

    def _price_kernel(self, work: Gemm | Attention | Memory | EagerKernels, rate: float) -> Estimate:
        """Returns the price of a kernel. rate: factor on the calibration's; of memory-bound kernels on traffic."""
        name, dtype = section_of(work, self._gpu), getattr(work, "dtype", "bf16")
        library = self._attention_library
        if name != "attention":
            scaling = getattr(work, "scaling", "")
            library = Relative(training_library(name, self._gpu.architecture, scaling), 1.0, 0.0)
        model = self._training_model(name, library.library, dtype)
        decomposition = (self._traits.decomposition,) if name in DENSE else ()
        price = SECTIONS[name].price(work, self._gpu, model, rate * library.rate, *decomposition)
        return price._replace(sigma=math.hypot(price.sigma, library.sigma))

    @remembered
    def _training_model(self, name: str, library: str, dtype: str) -> Any:
        """Returns the cost model of the kernels of a section in a training step."""
        return SECTIONS[name].in_training(self._calibration.kernel_model(self._gpu, name, library, dtype).model)

    def _on_fewer(self, price: Estimate, taken: int) -> Estimate:
        """Returns the price of a kernel from whose multiprocessors some are taken."""
        count = self._gpu.multiprocessors
        return price._replace(seconds=price.seconds * count / (count - taken)) if taken else price

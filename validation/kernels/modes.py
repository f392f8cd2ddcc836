"""Ways to run a module: as PyTorch issues it, replayed from a CUDA graph, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardware.errors import PlanError, nearest
from simulator.plan.plan import Plan
from validation.kernels.modules import Modules, ShardedModule
from validation.kernels.operators import OperatorOfRank
from validation.measurements.device import Device

Work = Callable[[], Any]

REHEARSALS = 3
"""Runs before a graph is captured, in which libraries choose their kernels and take their workspaces."""


@dataclass(frozen=True)
class Passes:
    """How both passes are run.

    forward: all of it. before: readies a backward pass, which it hands back. Where kernels write over what the forward
    pass has kept, each backward pass needs a forward pass of its own in front of it, which is not timed.
    """

    forward: Work
    before: Callable[[], Work]


def eager(module: ShardedModule, device: Device) -> Passes:
    """Kernel by kernel, under autograd."""
    return _call_directly(module, module.forward)


def compile_module(module: ShardedModule, device: Device) -> Passes:
    """Through torch.compile, for these sizes only."""
    # Modules of one kind share their code, and of one code only a few versions are compiled.
    torch.compiler.reset()
    return _call_directly(module, torch.compile(module.forward, dynamic=False))


def _call_directly(module: ShardedModule, forward: Callable[..., Any]) -> Passes:
    given: list[Tensor] = []

    def before() -> Work:
        outs = _as_list(forward(*module.inputs))
        if not given:
            given.extend(map(torch.randn_like, outs))
        return lambda: torch.autograd.grad(outs, module.wanted, given, allow_unused=True)

    return Passes(lambda: forward(*module.inputs), before)


def capture_graph(module: ShardedModule, device: Device) -> Passes:
    """Each pass captured once and replayed: the host issues one call.

    Raises PlanError on a device without CUDA graphs.
    """
    if device.kind != "cuda":
        raise PlanError("--mode", "only CUDA devices have graphs", "Write eager or compile", "cuda-graph")
    aside = torch.cuda.Stream(device.torch)
    aside.wait_stream(torch.cuda.current_stream(device.torch))
    passes = eager(module, device)
    with torch.cuda.stream(aside):
        for _ in range(REHEARSALS):
            passes.before()()
    torch.cuda.current_stream(device.torch).wait_stream(aside)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        outs = _as_list(module.forward(*module.inputs))
    grads = [torch.randn_like(one) for one in outs]
    with torch.cuda.graph(second, pool=first.pool()):
        made = torch.autograd.grad(outs, module.wanted, grads, allow_unused=True)
    # The graphs read and write these tensors, so they live as long.
    held = outs, grads, made

    def replay(graph: torch.cuda.CUDAGraph) -> Any:
        graph.replay()
        return held

    return Passes(lambda: replay(first), lambda: lambda: replay(second))


def _as_list(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


MODES: dict[str, Callable[[ShardedModule, Device], Passes]] = {
    "eager": eager,
    "cuda-graph": capture_graph,
    "compile": compile_module,
}
"""By the words of ``--mode``."""


def check_modes(modes: Sequence[str], device: Device) -> tuple[str, ...]:
    """Raises PlanError for a mode that there is not, or not on this device."""
    for mode in modes:
        if mode not in MODES:
            raise PlanError("--mode", "there is no such way to run kernels", nearest(mode, MODES), mode)
        if mode == "cuda-graph" and device.kind != "cuda":
            raise PlanError("--mode", "only CUDA devices have graphs", "Write eager or compile", mode)
    return tuple(modes)


class Bench(Modules):
    """The modules of a plan, ready to run."""

    def __init__(self, plan: Plan, device: Device) -> None:
        super().__init__(plan, device)
        self._last: tuple[tuple[str, str], Passes] | None = None

    def passes(self, part: OperatorOfRank, mode: str) -> Passes:
        """Both passes of a leaf in a mode; the latest are kept, for their making may take long."""
        if self._last is None or self._last[0] != (part.name, mode):
            # What was there goes first: it may fill the memory that the next one needs.
            self._last = None
            self._last = (part.name, mode), MODES[mode](self.module(part), self.device)
        return self._last[1]


def check_times(warmup: int, repeat: int) -> None:
    """Raises PlanError where nothing would be measured."""
    if repeat < 1:
        raise PlanError("--repeat", "there is at least one sample of each thing", "Write 1 or more", repeat)
    if warmup < 0:
        raise PlanError("--warmup", "it is a number of times", "Write 0 or more", warmup)


def sample(device: Device, passes: Passes, backward: bool, warmup: int, repeat: int, cold: bool) -> list[float]:
    """Seconds of one pass, so many times. cold: see `Device.seconds`."""
    if not backward:
        return device.seconds(passes.forward, warmup, repeat, cold)
    for _ in range(warmup):
        passes.before()()
    return [device.seconds(passes.before(), 0, 1, cold)[0] for _ in range(repeat)]

"""Modes of running a module: eagerly, replayed from a CUDA graph, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.kernels.modules import Modules, ShardedModule
from meshcast.validation.kernels.operators import LocalOperator
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.recording import check_names

Work = Callable[[], Any]

REHEARSALS = 3
"""Runs before a graph is captured: libraries choose their kernels and allocate their workspaces."""


@dataclass(frozen=True)
class Passes:
    """Functions that run both passes of a module.

    Attributes:
        forward: runs the forward pass.
        before: prepares a backward pass and returns the function that runs it. Where kernels overwrite the activations
            that the forward pass saved, each backward pass needs a forward pass before it, which is not timed.
    """

    forward: Work
    before: Callable[[], Work]


def eager(module: ShardedModule, device: Device) -> Passes:
    """Runs the module kernel by kernel, under autograd."""
    return _call_directly(module, module.forward)


def compile_module(module: ShardedModule, device: Device) -> Passes:
    """Runs the module through torch.compile, for these sizes only."""
    # Modules of a kind share their code, of which torch compiles only a few versions.
    torch.compiler.reset()
    return _call_directly(module, torch.compile(module.forward, dynamic=False))


def _call_directly(module: ShardedModule, forward: Callable[..., Any]) -> Passes:
    grads: list[Tensor] = []

    def before() -> Work:
        outs = _as_list(forward(*module.inputs))
        if not grads:
            grads.extend(map(torch.randn_like, outs))
        return lambda: torch.autograd.grad(outs, module.wanted, grads, allow_unused=True)

    return Passes(lambda: forward(*module.inputs), before)


def capture_graph(module: ShardedModule, device: Device) -> Passes:
    """Captures each pass once and replays it: the host makes one call.

    Raises PlanError on a device without CUDA graphs.
    """
    cuda = device.cuda
    if cuda is None:
        raise PlanError("--mode", "only CUDA devices have graphs", "Write eager or compile", "cuda-graph")
    side_stream = cuda.new_stream()
    side_stream.wait_stream(cuda.current_stream())
    passes = eager(module, device)
    with cuda.use_stream(side_stream):
        for _ in range(REHEARSALS):
            passes.before()()
    cuda.current_stream().wait_stream(side_stream)
    first, outs = cuda.capture_graph(lambda: _as_list(module.forward(*module.inputs)))
    grads = [torch.randn_like(out) for out in outs]
    backward = partial(torch.autograd.grad, outs, module.wanted, grads, allow_unused=True)
    second, results = cuda.capture_graph(backward, first.pool())
    # The graphs read and write these tensors: they must live as long.
    held = outs, grads, results

    def replay(graph: Any) -> Any:
        graph.replay()
        return held

    return Passes(lambda: replay(first), lambda: lambda: replay(second))


def _as_list(outs: Any) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)


MODES: dict[str, Callable[[ShardedModule, Device], Passes]] = {
    "eager": eager,
    "cuda-graph": capture_graph,
    "compile": compile_module,
}
"""Modes by their names in ``--mode``."""


def check_modes(modes: Sequence[str], device: Device) -> tuple[str, ...]:
    """Returns the modes. Raises PlanError for a mode that does not exist, or not on this device."""
    check_names("--mode", modes, MODES, "mode")
    if "cuda-graph" in modes and not device.cuda:
        raise PlanError("--mode", "only CUDA devices have graphs", "Write eager or compile", "cuda-graph")
    return tuple(modes)


class Bench(Modules):
    """Runs the modules of a plan."""

    def __init__(self, plan: Plan, device: Device) -> None:
        super().__init__(plan, device)
        self._last: tuple[tuple[str, str], Passes] | None = None

    def passes(self, local: LocalOperator, mode: str) -> Passes:
        """Returns both passes of an operator in a mode. The latest are kept: making them may take long."""
        if self._last is None or self._last[0] != (local.name, mode):
            # The previous ones are freed first: they may fill the memory that the next ones need.
            self._last = None
            self._last = (local.name, mode), MODES[mode](self.module(local), self.device)
        return self._last[1]


def sample(device: Device, passes: Passes, backward: bool, warmup: int, repeat: int, cold: bool) -> list[float]:
    """Takes `repeat` samples of the duration of a pass [s]. cold: see `Device.seconds`."""
    if not backward:
        return device.seconds(passes.forward, warmup, repeat, cold)
    return device.seconds_after(passes.before, warmup, repeat, cold)

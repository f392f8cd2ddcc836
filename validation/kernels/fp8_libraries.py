"""Linear layers in fp8 by the libraries that train with it: Transformer Engine and torchao, where they are installed.

Unlike the bare GEMMs of `validation.kernels.fp8`, a pass includes the casts to fp8 and the search for their scales, as
in training; the forecast is that of the recipe which the library uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.operators import Cast, Linear
from meshcast.simulator.ir.ops import Gemm, Work
from meshcast.validation.kernels.fp8 import MULTIPLE
from meshcast.validation.kernels.modes import Passes
from meshcast.validation.kernels.operators import local_operators
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.forecasts import Forecaster

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Library:
    """A library with fp8 linear layers.

    name: for rows and notes.
    module: Python module that must be installed.
    recipe: number format of a job in which it is forecast (`precision.compute`).
    make: makes the layer from its input and output size and device; returns its forward pass and its weight.
    """

    name: str
    module: str
    recipe: str
    make: Callable[[int, int, Any], tuple[Forward, nn.Parameter]]

    def why_missing(self) -> str:
        """Returns the reason why it cannot be measured, "" if it can."""
        return "" if find_spec(self.module.partition(".")[0]) else f"fp8 by {self.name}: not measured, not installed"


def _transformer_engine(size: int, columns: int, device: Any) -> tuple[Forward, nn.Parameter]:
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common.recipe import DelayedScaling  # type: ignore[import-not-found]

    layer, recipe = te.Linear(size, columns, bias=False, params_dtype=torch.bfloat16, device=device), DelayedScaling()

    def forward(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            out: Tensor = layer(x)
        return out

    return forward, layer.weight


def _torchao(size: int, columns: int, device: Any) -> tuple[Forward, nn.Parameter]:
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

    layer = nn.Sequential(nn.Linear(size, columns, bias=False, device=device, dtype=torch.bfloat16))
    convert_to_float8_training(layer)
    return layer, layer[0].weight  # type: ignore[return-value]


LIBRARIES = (
    Library("Transformer Engine", "transformer_engine.pytorch", "fp8-delayed", _transformer_engine),
    Library("torchao", "torchao.float8", "fp8-tensorwise", _torchao),
)


@dataclass(frozen=True)
class QuantisedLinear:
    """A linear layer with the casts of its operands.

    gemm: of its forward pass.
    forward, backward: kernels of both passes.
    """

    name: str
    gemm: Gemm
    forward: Sequence[Work]
    backward: Sequence[Work]
    shape: dict[str, Any]


def in_recipe(forecasters: Sequence[Forecaster], recipe: str) -> list[Forecaster]:
    """Makes forecasters of the same job with linear layers in a recipe."""
    stated = forecasters[0].job.get("precision")
    precision = {**(stated if isinstance(stated, dict) else {}), "compute": recipe}
    return [replace(forecaster, job={**forecaster.job, "precision": precision}) for forecaster in forecasters]


def quantised_linears(forecaster: Forecaster) -> Iterator[QuantisedLinear]:
    """Yields linear layers of a rank in fp8, with sizes of multiples of `MULTIPLE`, and the casts of their inputs."""
    cast: Sequence[Work] = ()
    for local in local_operators(forecaster.plan):
        if isinstance(local.operator, Cast):
            cast = local.forward
        elif isinstance(local.operator, Linear) and not local.operator.view and cast:
            (gemm,) = (work for work in local.forward if isinstance(work, Gemm))
            if not any(size % MULTIPLE for size in (gemm.m, gemm.n, gemm.k)):
                yield QuantisedLinear(local.name, gemm, [*cast, *local.forward], local.backward, local.shape)
            cast = ()


def make_passes(library: Library, linear: QuantisedLinear, device: Device) -> Passes:
    """Returns both passes of a layer, with random operands in bf16."""
    rows, columns, size = int(linear.gemm.m), linear.gemm.n, int(linear.gemm.k)
    forward, weight = library.make(size, columns, device.torch)
    x = torch.randn(rows, size, dtype=torch.bfloat16, device=device.torch, requires_grad=True)
    grad = torch.randn(rows, columns, dtype=torch.bfloat16, device=device.torch)

    def before() -> Callable[[], Any]:
        out = forward(x)
        return lambda: torch.autograd.grad(out, (x, weight), grad)

    return Passes(lambda: forward(x), before)

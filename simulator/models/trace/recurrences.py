"""Describes the recurrences of a traced layer: the scan of a Mamba-2 block, and a gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

from meshcast.simulator.models.trace.record import Step
from meshcast.simulator.models.trace.steps import LayerBlock, LayerSteps


class RecurrenceSizes(NamedTuple):
    """Sizes of a recurrence behind a causal convolution.

    Attributes:
        heads: of values.
        width: of a head of values.
        taps: positions that the convolution reads.
        channels: of the convolution.
        projected: width of what is projected from the input.
    """

    heads: int
    width: int
    taps: int
    channels: int
    projected: int

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.width


def read_recurrence(layer: LayerSteps, place: int, step: Step) -> LayerBlock | None:
    """Returns the block of a recurrence with its projections; None if it is no known one."""
    scope = f"{step.module}."
    shapes = {name.removeprefix(scope): shape for name, shape in layer.parameters.items() if name.startswith(scope)}
    convolutions = [shape for name, shape in shapes.items() if "conv" in name and len(shape) == 3 and shape[1] == 1]
    rates = next((shape for name, shape in shapes.items() if name.endswith(("A_log", "dt_bias"))), ())
    steps = [each for _, each in layer.products(module=scope)]
    last = next((each for each in steps if each.outer == layer.hidden), None)
    if len(convolutions) != 1 or last is None or len(rates) != 1 or last.inner % rates[0]:
        return None
    channels, _, taps = convolutions[0]
    reading = [each for each in steps if each.inner == layer.hidden and each.rows == layer.tokens and each is not last]
    projected = sum(each.outer for each in reading)
    sizes = RecurrenceSizes(rates[0], last.inner // rates[0], taps, channels, projected)
    products = [each for _, each in layer.products(module=step.module)]  # the convolution is one, too
    if "D" in shapes and projected == sizes.inner + channels + sizes.heads:
        return _read_scan(sizes, step, products, place)
    return _read_delta_rule(layer, sizes, step, products, place)


def _read_scan(sizes: RecurrenceSizes, step: Step, products: list[Step], place: int) -> LayerBlock | None:
    """Returns a Mamba-2 block."""
    shared, odd = divmod(sizes.channels - sizes.inner, 2)
    groups = next((step.numbers[key] for key in ("n_groups", "ngroups", "num_groups") if key in step.numbers), 1)
    if odd or shared % groups or sizes.heads % groups:
        return None
    shape = {"heads": sizes.heads, "head_dim": sizes.width, "state": shared // groups, "groups": groups}
    shape |= {"conv": sizes.taps} | ({"chunk": step.numbers["chunk_size"]} if "chunk_size" in step.numbers else {})
    return LayerBlock("M", {"ssm": shape}, products, place, step.module)


def _read_delta_rule(
    layer: LayerSteps, sizes: RecurrenceSizes, step: Step, products: list[Step], place: int
) -> LayerBlock | None:
    """Returns a Gated DeltaNet; the first matmul in it is over the width of a head of keys."""
    keys, odd = divmod(sizes.channels - sizes.inner, 2)
    width = next((each.sizes[3] for _, each in layer.of_kind("matmul") if each.module.startswith(step.module)), 0)
    if odd or not width or keys % width or sizes.heads % (keys // width):
        return None
    if sizes.projected != 2 * (keys + sizes.inner + sizes.heads):
        return None
    shape = {"heads": sizes.heads, "key_heads": keys // width, "key_dim": width, "value_dim": sizes.width}
    fields = {"linear_attention": {"kind": "gated-delta-net", **shape, "conv": sizes.taps}}
    return LayerBlock("D", fields, products, place, step.module)

"""Builds Mamba-2 blocks: input projection, convolution and scan, gated norm, output projection.

Sources: Dao and Gu 2024 (arXiv 2405.21060), section 7 and figure 6; MambaMixer of Megatron-Core
(megatron/core/ssm/mamba_mixer.py).
"""

from __future__ import annotations

from simulator.ir.layout import Dim, Tensor
from simulator.ir.mamba_operators import Mamba, SSDScan
from simulator.ir.operators import Norm
from simulator.models.parts import StateSpace
from simulator.models.shapes import Shapes


def mamba_block(shapes: Shapes, ssm: StateSpace, x: Tensor, y: Tensor) -> Mamba:
    """Builds a Mamba-2 block from its input `x` [b, s, h] to its output `y` [b, s, h].

    Heads and groups are sharded together: a rank has whole groups, with B and C of its own.
    """
    heads = Dim(ssm.heads)
    inner = Dim(ssm.inner, unit=ssm.head_dim)
    shared = Dim(ssm.shared, unit=ssm.state)
    widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
    projected = tuple(shapes.act(f"ssm.{name}", a=width) for name, width in widths.items())
    weights = [shapes.weight(f"wssm.{name}", h=shapes.hidden_dim, a=width) for name, width in widths.items()]
    convolved = {name: widths[name] for name in ("x", "B", "C")}
    convolution = [
        *(shapes.weight(f"conv.{name}.weight", a=width, taps=Dim(ssm.conv)) for name, width in convolved.items()),
        *(shapes.weight(f"conv.{name}.bias", a=width) for name, width in convolved.items()),
    ]
    of_heads = [shapes.weight(name, a=heads) for name in ("A", "D", "dt.bias")]
    scanned, normed = shapes.act("ssm.y", a=inner), shapes.act("ssm.norm", a=inner)
    scales = (shapes.weight("ssm.norm.weight", a=inner),)
    return Mamba(
        "mamba",
        (
            *shapes.linear("in_proj", x, projected, *weights),
            SSDScan("scan", projected, (scanned,), (*convolution, *of_heads), ssm.chunk, ssm.state),
            Norm("gated_norm", (scanned,), (normed,), scales, modules=("norm",)),
            *shapes.linear("out_proj", normed, (y,), shapes.weight("wssm.out", a=inner, h=shapes.hidden_dim)),
        ),
    )

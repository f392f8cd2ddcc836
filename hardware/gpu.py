"""The GPU of the catalog: memory, caches, peak rates, power and links by its datasheet."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.link import Link
from meshcast.hardware.load import (
    Bandwidth,
    BooleanFact,
    Bytes,
    Count,
    Fact,
    Flops,
    Frequency,
    Power,
    Strict,
    by_name,
    catalog_model,
)

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]


class ComputeCapability(Fact):
    """The version of a GPU's instructions by NVIDIA."""

    value: float


@catalog_model("gpus")
class GPU(Strict):
    """One accelerator.

    Attributes:
        architecture: generation, in the words of the vendor (``hopper``).
        compute_capability: version of its instructions by NVIDIA (9.0), equal for equal multiprocessors; None: unknown.
        memory: device memory [bytes] that programs, the framework's reserve and the driver share.
        usable: what the driver leaves of it to programs [bytes] ("total capacity" in messages of PyTorch); None: all.
        memory_bandwidth: nominal bandwidth of device memory [bytes/s].
        l2: size of the last-level cache [bytes].
        multiprocessors: streaming multiprocessors or compute units.
        clock: clock for which the datasheet computes `peak`; if it states none, the highest that devices report
            [Hz]; None if unknown.
        peak: dense FLOP/s by number format, without structured sparsity; formats that are not listed are not supported.
        power: board power limit [W].
        scale_up: catalog name of its scale-up link; None without any.
        host: its link to the host, over which it also reaches GPUs that no scale-up link joins.
        peer_access: whether its driver lets others read and write its memory over PCIe; None: as its node says.
        usual_node: catalog name of the node that it is mostly sold in, for clusters that do not state their node.
    """

    name: str
    title: str = ""
    architecture: str
    compute_capability: ComputeCapability | None = None
    memory: Bytes
    usable: Bytes | None = None
    memory_bandwidth: Bandwidth
    l2: Bytes
    multiprocessors: Count
    clock: Frequency | None = None
    peak: dict[Precision, Flops]
    power: Power
    scale_up: str | None = None
    host: Annotated[Link, by_name("links", Link)]
    peer_access: BooleanFact | None = None
    usual_node: str | None = None
    note: str = ""

    @property
    def program_memory(self) -> float:
        """Memory that programs can have [bytes]."""
        return float(self.memory if self.usable is None else self.usable)

    def __hash__(self) -> int:  # `peak` is a dict; of all that sweeps vary, or a look-up compares every row
        return hash((self.name, float(self.memory), float(self.memory_bandwidth), *map(float, self.peak.values())))

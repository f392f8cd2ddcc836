"""BytePS: machines push gradients to summation servers and pull the sums; CPU machines and GPU machines both serve.

`over: [across, within]` names the axes across and within machines: n machines of G ranks. Ranks of a machine
reduce-scatter a bucket, and each copies its 1/G to the host, which pushes it to servers, pulls the sums and copies them
back; the ranks all-gather. GPUs update the weights. Servers run on k = `servers` machines without GPUs and, where
`colocated`, on the hosts of all GPU machines; each of the latter sums a part M_g of the M bytes of gradients, each of
the former M_c, such that all ports are busy equally long:

    M_c = 2 (n-1) / D M       M_g = (n-k) / D M       D = n^2 + k n - 2 k       for k <= n
    bytes through the port of a machine, each way: M + (n-2) M_g = n M_c = 2 n (n-1) / D M

k = 0: 2 (n-1)/n M, as an all-reduce; k = n: M. More than n servers do not help. A plain parameter server (`colocated:
false`): max(M, n M / k). Inside a machine a rank sends 2 (G-1)/G M. 18 bytes per parameter with bf16 weights and fp32
gradients on the GPU, and the gradients of a machine once more in host memory.

    data-within    reduce-scatter 1 | reduce-scatter 2 | ...
    memory-out                      | copy 1           | copy 2 ...
    data                                               | push, pull 1 ...
    memory-in, data-returns                                               | copy, all-gather 1 ...

Not modelled: partitions of 4 MB and their priorities (buckets are those of the framework); summation on CPUs, which is
faster than the network; topologies inside a machine that need other orders.

References: Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU
Clusters, OSDI 2020, https://www.usenix.org/conference/osdi20/presentation/jiang, section 4, theorem 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import KeepsOwnStates
from meshcast.simulator.ir.ops import BYTES, Collective, HostCopy, Op, Param, Work
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, Sizes, split_axes


class BytePS(DataScheme, KeepsOwnStates):
    paper = Paper(
        "https://www.usenix.org/conference/osdi20/presentation/jiang",
        "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters",
        2020,
    )
    least_axes = most_axes = 2

    class Options(SchemeOptions):
        servers: int | None = Field(default=None, ge=0, strict=True)
        """Machines without GPUs that sum gradients, each with the ports of a GPU machine. Default: none, or one for
        each GPU machine where their hosts do not serve."""
        colocated: bool = True
        """Whether the hosts of the GPU machines also sum gradients."""

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        return [(ranks // near, near)]

    def assumptions(self, model: Any) -> Iterable[str]:
        if self.options.servers:
            yield f"{self.options.servers} machines without GPUs serve, each with the ports of a GPU machine"

    def check_job(self, job: Any) -> None:
        if self.options.servers == 0 and not self.options.colocated:
            rule = "gradients are summed by machines without GPUs, by the hosts of GPU machines, or by both"
            raise PlanError(f"{self.use}.servers", rule, "Set servers to 1 or more, or colocated to true", 0)

    def pushed_bytes(self, nbytes: int, machines: int) -> int:
        """Counts the bytes through the busiest port, each way, for so many bytes of gradients on each of the GPU
        machines."""
        n, k = machines, self.options.servers
        if not self.options.colocated:
            return round(nbytes * max(1.0, n / (k or n)))
        k = min(k or 0, n)
        return round(nbytes * 2 * n * (n - 1) / (n * n + k * n - 2 * k))

    def own_states(self, param: Param) -> Mapping[str, float]:
        """Returns the gradients of a machine in its memory, of which each rank has brought its part."""
        axes = self.axes_reduced_once(param)
        within, across = (self.mesh.size(part) for part in split_axes(axes, self.node_axes))
        return {"cpu": param.size * BYTES[self.framework.gradients] / within} if across > 1 else {}

    def reduce_bucket(self, axes: tuple[str, ...], sizes: Sizes, phase: str, when: str) -> Sequence[Op]:
        within, across = split_axes(axes, self.node_axes)
        nbytes = sizes[0] * BYTES[self.framework.gradients]
        if not across:
            return super().reduce_bucket(axes, sizes, phase, when)
        part = nbytes // self.mesh.size(within)
        pushed = self.pushed_bytes(part, self.mesh.size(across))
        steps: list[tuple[str, str, Work]] = [
            ("copy gradients", OUT, HostCopy(part)),
            ("push and pull", "data", Collective("push_pull", pushed, across)),
            ("copy sums", IN, HostCopy(part, True)),
        ]
        if within:
            steps.insert(0, ("reduce grads", "data-within", Collective("reduce_scatter", nbytes, within)))
            steps.append(("gather grads", "data-returns", Collective("all_gather", nbytes, within)))
        ops = list[Op]()
        for name, stream, work in steps:
            ops.append(Op(name, stream, work, ops[-1:], phase, when))
        return ops

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        moved, near = setting.grad_bytes, setting.n // setting.across
        pushed = self.pushed_bytes(moved // near, setting.across) if setting.across > 1 else 0
        yield ClosedForm("sent_across_nodes", near * pushed, "theorem 1: bytes through the port of a machine, each way")
        inside = 2 * (near - 1) / near * moved
        yield ClosedForm("sent_per_step", inside + pushed, "section 4.2: reduce-scatter, push, all-gather")
        yield ClosedForm("state_bytes_per_parameter", 18, "section 5: GPUs hold and update all weights")

"""1-bit Adam: once the variance has settled it is frozen, and the ranks' momenta are averaged with one bit an element.

In the compression stage a rank adds its gradient to the momentum, adds the error of its last compression, and keeps
the sign of each element and one scale; what is lost is the next error. Each rank is the server of 1/N of the elements:
an all-to-all brings it the bits of all ranks for these, it averages, compresses once more with an error that it keeps,
and an all-gather returns the averages. The weights are updated by the averaged momentum over the frozen variance. The
warm-up stage before is plain Adam with an all-reduce of gradients. Neither runs beside the backward pass.

    backward | momentum, compress | all-to-all of bits | average, compress | all-gather of bits | decompress | update

A rank sends 2 (N-1)/N Psi/8 bytes per step for Psi parameters and N ranks, 1/16 of an all-reduce of 16-bit gradients
and 1/32 of fp32 ones. The errors are further states: 4 bytes per parameter for those of a rank, and 4/N for those
of a server, on top of 18 with bf16 weights and fp32 gradients.

Not modelled: the scales, 4 bytes a rank; buffers on the host of the MPI backend; loss and length of the stages.

References: Tang et al. 2021, arXiv 2102.02888, algorithm 1 and section 5; DeepSpeed, runtime/comm/nccl.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from meshcast.simulator.ir.capabilities import KeepsOwnStates
from meshcast.simulator.ir.ops import BYTES, COMPUTE, Collective, Memory, Op, Param, Work
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, Sizes

ERROR = BYTES["fp32"]
"""Bytes of the error of an element."""


class OneBitAdam(DataScheme, KeepsOwnStates):
    paper = Paper(
        "arXiv:2102.02888",
        "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
        2021,
    )

    class Options(SchemeOptions):
        stage: Literal["compression", "warm-up"] = "compression"
        """The stage of the run that the step is from."""

    def assumptions(self, model: Any) -> Iterable[str]:
        yield f"a step of the {self.options.stage} stage of 1-bit Adam"

    @property
    def overlaps_backward(self) -> bool:
        return False

    def own_states(self, param: Param) -> Mapping[str, float]:
        ranks = self.mesh.size(self.axes_reduced_once(param))
        return {"gpu": ERROR * param.size * (1 + 1 / ranks)} if ranks > 1 else {}

    def reduce_bucket(self, axes: tuple[str, ...], sizes: Sizes, phase: str, when: str) -> Sequence[Op]:
        if self.options.stage == "warm-up":
            return super().reduce_bucket(axes, sizes, phase, when)
        (elements,) = sizes
        bits, served = -(-elements // 8), -(-elements // self.mesh.size(axes))
        grads, momentum = (elements * BYTES[each] for each in (self.framework.gradients, self.framework.moments))
        error, own_bits, own_error = elements * ERROR, -(-served // 8), served * ERROR
        steps: list[tuple[str, str, Work]] = [
            ("add to momentum", COMPUTE, Memory("add", grads + momentum, momentum)),
            # Read once for the scale, and once more for the signs.
            ("compress momentum", COMPUTE, Memory("cast", 2 * (momentum + error), error + bits)),
            ("exchange bits", "data", Collective("all_to_all", bits, axes)),
            ("average bits", COMPUTE, Memory("cast", bits + own_error, own_error + own_bits)),
            ("gather bits", "data", Collective("all_gather", bits, axes)),
            ("decompress momentum", COMPUTE, Memory("cast", bits, momentum)),
        ]
        ops = list[Op]()
        for name, stream, work in steps:
            ops.append(Op(name, stream, work, ops[-1:], phase, when))
        return ops

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, warm = setting.n, self.options.stage == "warm-up"
        moved = setting.grad_bytes if warm else -(-sum(setting.unit_elements) // 8)
        yield ClosedForm("sent_per_step", 2 * (n - 1) / n * moved, "section 5: all-to-all and all-gather of bits")
        errors = 4 + 4 / n if n > 1 else 0
        yield ClosedForm("state_bytes_per_parameter", 18 + errors, "algorithm 1: errors of a worker and of a server")

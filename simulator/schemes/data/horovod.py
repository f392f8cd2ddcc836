"""Horovod: at every clock tick the gradients that are ready on all ranks are fused and summed by one all-reduce.

A background thread looks every `cycle` seconds at the gradients that the backward pass has produced. Ranks agree which
of them all have (a small all-reduce of a bit per gradient); those are packed into a buffer of at most `fusion` bytes,
all-reduced and unpacked. Buckets follow from the clock, not from a fixed list as in PyTorch's DDP.

    backward   g9 g8 . g7 | g6 g5 . . | g4 . . g3 |
    ticks                 |           |           |
    data                    g9 g8 g7    g6 g5       g4 g3

As many bytes as DDP, 2 (N-1)/N g, and a bit per gradient; every fused byte is copied twice. States are not sharded;
a buffer of `fusion` bytes is added. With `compression: fp16` gradients of 32 bits are cast to 16, summed and cast back.
The clock is assumed to start with the backward pass whose gradients are reduced.

Not modelled: hierarchical all-reduces (HOROVOD_HIERARCHICAL_ALLREDUCE), over which MPI sums between nodes; autotuning
of `cycle` and `fusion`; `backward_passes_per_step`, as gradients are reduced once a step.

References: Sergeev and Del Balso 2018, arXiv 1802.05799, sections 3 and 4; defaults: docs/tensor-fusion.rst of Horovod;
compression: horovod/torch/compression.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Literal

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import HoldsBuffers
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import BYTES, Collective, Memory, Op, SideOps, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting


class Horovod(DataScheme, HoldsBuffers):
    paper = Paper("arXiv:1802.05799", "Horovod: fast and easy distributed deep learning in TensorFlow", 2018)

    class Options(SchemeOptions):
        cycle: float = Field(default=1e-3, gt=0, le=10)
        """Time between ticks [s]."""
        fusion: int = Field(default=128 * 2**20, ge=0, strict=True)
        """Bytes of the fusion buffer; 0: nothing is fused."""
        compression: Literal["none", "fp16"] = "none"
        """Format in which gradients are summed (Compression): that of the gradients, or 16 bits."""

    @property
    def overlaps_backward(self) -> bool:
        return True

    def buffer_bytes(self, job: Any) -> int:
        return self.options.fusion if self.mesh.size(self.over) > 1 and not job.forward_only else 0

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = inner(stage)
        # Before the times are known, all gradients count as ready at once.
        at_once = self._reduce_at_ticks(stage_ops, np.zeros(sum(count for _, count in stage_ops.params())))
        formed = partial(self._reduce_at_ticks, stage_ops)
        stage_ops.behind += [replace(sums, after=None, formed=formed) for sums in at_once[1:]]
        return stage_ops

    def _reduce_at_ticks(self, stage_ops: StageOps, ready: np.ndarray) -> list[SideOps]:
        """Returns the agreements at every tick, and the all-reduces that follow. ready: when every gradient is complete
        [s]."""
        groups = [self._reduction_group(param) if param.trained else ((), (0,)) for param, _ in stage_ops.params()]
        sets = list(dict.fromkeys(axes for axes, _ in groups))
        over = stage_ops.of_params([sets.index(axes) for axes, _ in groups])
        nbytes = stage_ops.of_params([elements for _, (elements,) in groups]) * self._width
        # The backward pass goes through the parameters in descending order.
        order = len(ready) - 1 - np.argsort(ready[::-1], kind="stable")
        order = order[[bool(sets[i]) for i in over[order]]]
        ticks = np.ceil(ready[order] / self.options.cycle)
        agreed, sums = list[tuple[Op, np.ndarray]](), list[tuple[Op, np.ndarray]]()
        waits, places = list[float](), list[int]()
        for tick in np.unique(ticks):
            ready_now = order[ticks == tick]
            bits = Collective("all_reduce", ceil(len(ready) / 8), sets[over[ready_now[0]]])
            agreed.append((Op("agree", "data-control", bits, [], "W", "last"), ready_now))
            waits.append(tick * self.options.cycle - ready[ready_now].max())
            for i in np.unique(over[ready_now]):
                for group in self._fuse_gradients(ready_now[over[ready_now] == i], nbytes):
                    reduction = list(self._all_reduce_ops(int(nbytes[group].sum()), sets[i], len(group) > 1))
                    sums += [(op, group) for op in reduction]
                    places += [len(agreed) - 1] * len(reduction)
        if not agreed:
            return []
        control = replace(_side_ops(agreed), waits=waits)
        return [control, replace(_side_ops(sums), after=(control, np.array(places)))]

    def _fuse_gradients(self, numbers: np.ndarray, nbytes: np.ndarray) -> Iterator[np.ndarray]:
        """Groups of gradients that fit into the buffer together."""
        begin, held = 0, 0
        for at, size in enumerate(nbytes[numbers]):
            if at > begin and held + size > self.options.fusion:
                yield numbers[begin:at]
                begin, held = at, 0
            held += size
        yield numbers[begin:]

    @property
    def _width(self) -> int:
        """Bytes of an element while gradients are summed."""
        width = int(BYTES[self.framework.gradients])
        return min(width, 2) if self.options.compression == "fp16" else width

    def _all_reduce_ops(self, nbytes: int, axes: tuple[str, ...], fused: bool) -> Iterator[Op]:
        copy, whole = Memory("concat", nbytes, nbytes), nbytes // self._width * int(BYTES[self.framework.gradients])
        if whole > nbytes:
            yield Op("compress grads", "data", Memory("cast", whole, nbytes), [], "W", "last")
        if fused:
            yield Op("pack grads", "data", copy, [], "W", "last")
        yield Op("reduce grads", "data", Collective("all_reduce", nbytes, axes), [], "W", "last")
        if fused:
            yield Op("unpack grads", "data", copy, [], "W", "last")
        if whole > nbytes:
            yield Op("decompress grads", "data", Memory("cast", nbytes, whole), [], "W", "last")

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        summed = setting.grad_bytes / (2 if self.options.compression == "fp16" else 1)  # of fp32
        yield ClosedForm("sent_per_step", 2 * (n - 1) / n * summed, "section 3: one ring all-reduce of all gradients")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + 12, "bf16 weights, fp32 gradients, fp32 master weights, two moments"
        )


def _side_ops(pairs: list[tuple[Op, np.ndarray]]) -> SideOps:
    ops, numbers = zip(*pairs, strict=True)
    return SideOps(list(ops), np.concatenate(numbers), np.cumsum([0, *map(len, numbers[:-1])]))

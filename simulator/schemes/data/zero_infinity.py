"""ZeRO-Infinity: every state is sharded over the ranks, and the shards lie in host memory or on disks.

Before the all-gather of a module every rank copies its 1/N of the weights from its host; after the reduction of
the gradients it copies its 1/N back, where gradients are accumulated over micro-batches and the host's processors
update the shard. As each rank copies a part of every weight, the links of all ranks to their hosts work at once: a
module arrives N times as fast as from a single owner that would broadcast it. How far ahead modules are asked for, and
the limit of elements in memory, are those of ZeRO stage 3 (`parameter_coordinator`).

    memory-in     shard 2   shard 3                     shard 2   shard 1
    data                 gather 2   gather 3                  gather 2   gather 1        reduce-scatter 3 ...
    compute       unit 1 .......... unit 2 ....         unit 3 ......... unit 2 ....
    memory-out                                                                   shard of gradients 3 ...

The network carries the bytes of ZeRO stage 3: 3 a (N-1)/N M for M bytes of weights and of gradients, a micro-batches. A
rank's link to its host carries 2 M/N in and M/N out per micro-batch. The GPU holds the modules that compute, and no
states. Without overlap the efficiency of a step is ait bw / (ait bw + peak), with ait = sequence x micro-batch
FLOP/byte, bw of all links together, and the peak of a GPU.

One rank offloads everything, without collectives.

A linear layer that is too large for a GPU runs as `tiles` smaller ones (memory-centric tiling). Every tile has a part
of the rows of the weights, so of the output: it is gathered, used and freed by itself, and its gradient is reduced
before that of the next tile is computed. Outputs of tiles are joined by a copy, their gradients of the input are added.

With `ratio` r (Twin-Flow of ZeRO-Offload++) the hosts have r of gradients and optimizer states, and the GPUs update
the others at the same time: a GPU keeps 16 (1 - r) / N bytes per parameter, with fp32 gradients.

Not modelled: the host's accumulation over micro-batches; that `ratio` counts whole sub-groups (`sub_group_size`).

References: Rajbhandari et al. 2021, arXiv 2104.07857, sections 4, 5 and 6; DeepSpeed runtime/zero/tiling.py; `ratio`:
https://github.com/deepspeedai/DeepSpeed/tree/master/blogs/deepspeed-offloadpp and runtime/zero/stage3.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from meshcast.hardware.schemas import Field, model_validator
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import BYTES, Fragment, Gemm, Memory, Op, Param, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper
from meshcast.simulator.lowering.rewrite import Rewrite, working_predecessors
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.parameter_coordinator import CoordinatedScheme, CoordinatorOptions


class ZeroInfinity(CoordinatedScheme):
    paper = Paper("arXiv:2104.07857", "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Training", 2021)
    updates_weights = False
    divides_while_loading = True

    class Options(CoordinatorOptions):
        parameters: Literal["gpu", "cpu", "nvme"] = "cpu"
        """Where shards of the weights lie."""
        optimizer: Literal["cpu", "nvme"] = "cpu"
        """Where gradients and optimizer states lie."""
        ratio: float = Field(default=1.0, ge=0, le=1)
        """Share of gradients and optimizer states that lies there; the rest stays on the GPU, which updates it."""
        tiles: int = Field(default=1, ge=1)
        """Tiles of a linear layer, each of which is gathered and freed by itself."""

        @model_validator(mode="after")
        def _check_ratio(self) -> "ZeroInfinity.Options":
            if self.ratio < 1 and self.optimizer == "nvme":
                raise ValueError("a ratio divides states between a GPU and the memory of its host: set optimizer: cpu")
            return self

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return super().lower_stage(stage, lambda part: tile_linear_layers(inner(part), self.options.tiles))

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        options, of_weights = self.options, state == "parameters"
        place, share = (options.parameters, 1.0) if of_weights else (options.optimizer, options.ratio)
        return {place: share} if place != "gpu" and share else {}

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "arXiv 1910.02054, section 7.2.2: as ZeRO stage 3")
        kept = 16 * (1 - self.options.ratio) / n
        yield ClosedForm(
            "state_bytes_per_parameter", kept, "section 5.1: all states are off the GPU, or `ratio` of them"
        )


def tile_linear_layers(stage_ops: StageOps, tiles: int) -> StageOps:
    """Returns `stage_ops` in which linear layers are split into so many tiles, but for those of experts and routers."""
    if tiles == 1:
        return stage_ops
    runs = [replace(unit_run, fragment=_tile_fragment(unit_run.fragment, tiles)) for unit_run in stage_ops.unit_runs]
    return replace(stage_ops, unit_runs=runs)


def _tile_fragment(fragment: Fragment, tiles: int) -> Fragment:
    tiled = fragment.copy()
    shared = _joint_makers(tiled)
    rewrite, named = Rewrite(tiled), defaultdict[str, list[Op]](list)
    for op in (*tiled.forward, *tiled.backward):
        if isinstance(op.work, Gemm):
            named[op.name].append(op)
    params: dict[int, list[Param]] = {}
    for used in dict.fromkeys(param.used for param in tiled.params):
        again, inputs, weights = (named[prefix + used.name] for prefix in ("re ", "d", "w"))
        whole = isinstance(used.work, Gemm) and used.work.batch == 1 and not used.work.groups
        if not whole or max(len(ops) for ops in (again, inputs, weights)) > 1 or shared & {*inputs}:
            continue
        places = [_swap_forward(rewrite, op, tiles) for op in (used, *again)]
        sums = _swap_backward(rewrite, tiled, inputs, weights, tiles)
        for param in tiled.params:
            if param.used is used and (not weights or param.ready is weights[0]):
                params[id(param)] = _tile_param(param, places[0], sums or [param.ready] * tiles)
    kept = tiled.params
    tiled.params = [param for param in kept if id(param) not in params]
    rewrite.apply()
    others = iter(tiled.params)
    tiled.params = [tile for param in kept for tile in params.get(id(param)) or [next(others)]]
    return tiled


def _joint_makers(fragment: Fragment) -> set[Op]:
    """Returns the ops that make a tensor together with others."""
    makers = defaultdict[str, set[Op]](set)
    for use in fragment.tensor_uses:
        if use.made:
            makers[use.key].add(use.op)
    return {op for ops in makers.values() if len(ops) > 1 for op in ops}


def _tile_param(param: Param, used: Sequence[Op], ready: Sequence[Op]) -> list[Param]:
    """Returns the parts of a parameter. used, ready: by tile, as in `Param`."""
    tiles = len(used)
    return [
        replace(
            param,
            name=f"{param.name} of tile {i}",
            size=_part(param.size, i, tiles),
            total=_part(param.total, i, tiles),
            used=used[i],
            ready=ready[i],
        )
        for i in range(tiles)
    ]


def _part(whole: int, tile: int, tiles: int) -> int:
    return (tile + 1) * whole // tiles - tile * whole // tiles


def _swap_forward(rewrite: Rewrite, op: Op, tiles: int) -> list[Op]:
    """Replaces the product of a forward pass, or of its repetition, by those of the tiles and a copy."""
    assert isinstance(op.work, Gemm)
    works = [replace(op.work, n=_part(op.work.n, i, tiles)) for i in range(tiles)]
    parts = [replace(op, name=f"{op.name} tile {i}", work=work, after=list(op.after)) for i, work in enumerate(works)]
    nbytes = round(op.work.m * op.work.n * BYTES["bf16"])
    join = Op(f"{op.name} join", work=Memory("concat", nbytes, nbytes), after=parts[-1:], phase=op.phase)
    rewrite.swap(op, [*parts, join])
    return parts


def _swap_backward(rewrite: Rewrite, tiled: Fragment, inputs: list[Op], weights: list[Op], tiles: int) -> list[Op]:
    """Replaces the products of a backward pass. Returns those of the weights' gradients, tile by tile."""
    input_parts = (
        [[] for _ in range(tiles)] if not inputs else [_input_gradient(inputs[0], i, tiles) for i in range(tiles)]
    )
    sums = [] if not weights else [_weight_gradient(weights[0], i, tiles) for i in range(tiles)]
    place = {op: i for i, op in enumerate(tiled.backward)}
    if inputs and weights:
        early = all(place.get(op, -1) < place[inputs[0]] for op in working_predecessors(weights[0]))
        if early:
            mixed = [op for i in range(tiles) for op in (*input_parts[i], sums[i])]
            rewrite.swap(inputs[0], mixed, input_parts[-1][-1:])
            rewrite.swap(weights[0], [], sums[-1:])
            return sums
    if inputs:
        rewrite.swap(inputs[0], [op for ops in input_parts for op in ops])
    if weights:
        rewrite.swap(weights[0], sums)
    return sums


def _input_gradient(op: Op, tile: int, tiles: int) -> list[Op]:
    """Returns the part of the gradient of the input that comes from a tile, and its addition."""
    assert isinstance(op.work, Gemm)
    part = replace(op, name=f"{op.name} tile {tile}", work=replace(op.work, k=op.work.k / tiles), after=list(op.after))
    if not tile:
        return [part]
    nbytes = round(op.work.m * op.work.n * BYTES["bf16"])
    return [part, Op(f"{op.name} add", work=Memory("residual", 2 * nbytes, nbytes), after=[part], phase=op.phase)]


def _weight_gradient(op: Op, tile: int, tiles: int) -> Op:
    assert isinstance(op.work, Gemm)
    return replace(op, name=f"{op.name} tile {tile}", work=replace(op.work, m=op.work.m / tiles), after=list(op.after))

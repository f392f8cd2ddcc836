"""Memory-centric tiling: a linear layer that is too large for a GPU runs as a sequence of smaller ones.

Every tile has a part of the rows of the weights, so of the output: it is gathered, used and freed on its own, and its
gradient is reduced before that of the next tile is computed. Outputs of tiles are joined by a copy, their gradients of
the input are added.

References: Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3; DeepSpeed runtime/zero/tiling.py (`TiledLinear`
with `out_splits`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.ir.ops import BYTES, Fragment, Gemm, Memory, Op, Param, StageOps
from meshcast.simulator.lowering.rewrite import Rewrite, working_predecessors


def tile_linear_layers(stage_ops: StageOps, tiles: int) -> StageOps:
    """`stage_ops` in which linear layers are split into so many tiles, but those of experts and of the router."""
    if tiles == 1:
        return stage_ops
    runs = [replace(unit_run, fragment=_tile_fragment(unit_run.fragment, tiles)) for unit_run in stage_ops.unit_runs]
    return replace(stage_ops, unit_runs=runs)


def _tile_fragment(fragment: Fragment, tiles: int) -> Fragment:
    made = fragment.copy()
    shared = _joint_makers(made)
    rewrite, named = Rewrite(made), defaultdict[str, list[Op]](list)
    for op in (*made.forward, *made.backward):
        if isinstance(op.work, Gemm):
            named[op.name].append(op)
    params: dict[int, list[Param]] = {}
    for used in dict.fromkeys(param.used for param in made.params):
        again, inputs, weights = (named[prefix + used.name] for prefix in ("re ", "d", "w"))
        whole = isinstance(used.work, Gemm) and used.work.batch == 1 and not used.work.groups
        if not whole or max(len(ops) for ops in (again, inputs, weights)) > 1 or shared & {*inputs}:
            continue
        places = [_swap_forward(rewrite, op, tiles) for op in (used, *again)]
        sums = _swap_backward(rewrite, made, inputs, weights, tiles)
        for param in made.params:
            if param.used is used and (not weights or param.ready is weights[0]):
                params[id(param)] = _tile_param(param, places[0], sums or [param.ready] * tiles)
    kept = made.params
    made.params = [param for param in kept if id(param) not in params]
    rewrite.apply()
    others = iter(made.params)
    made.params = [tile for param in kept for tile in params.get(id(param)) or [next(others)]]
    return made


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


def _swap_backward(rewrite: Rewrite, made: Fragment, inputs: list[Op], weights: list[Op], tiles: int) -> list[Op]:
    """Replaces the products of a backward pass. Returns those of the weights' gradients, tile by tile."""
    one = [[] for _ in range(tiles)] if not inputs else [_input_gradient(inputs[0], i, tiles) for i in range(tiles)]
    sums = [] if not weights else [_weight_gradient(weights[0], i, tiles) for i in range(tiles)]
    place = {op: i for i, op in enumerate(made.backward)}
    if inputs and weights:
        early = all(place.get(op, -1) < place[inputs[0]] for op in working_predecessors(weights[0]))
        if early:
            mixed = [op for i in range(tiles) for op in (*one[i], sums[i])]
            rewrite.swap(inputs[0], mixed, one[-1][-1:])
            rewrite.swap(weights[0], [], sums[-1:])
            return sums
    if inputs:
        rewrite.swap(inputs[0], [op for ops in one for op in ops])
    if weights:
        rewrite.swap(weights[0], sums)
    return sums


def _input_gradient(op: Op, tile: int, tiles: int) -> list[Op]:
    """The part of the gradient of the input that comes from one tile, and its addition."""
    assert isinstance(op.work, Gemm)
    part = replace(op, name=f"{op.name} tile {tile}", work=replace(op.work, k=op.work.k / tiles), after=list(op.after))
    if not tile:
        return [part]
    nbytes = round(op.work.m * op.work.n * BYTES["bf16"])
    return [part, Op(f"{op.name} add", work=Memory("residual", 2 * nbytes, nbytes), after=[part], phase=op.phase)]


def _weight_gradient(op: Op, tile: int, tiles: int) -> Op:
    assert isinstance(op.work, Gemm)
    return replace(op, name=f"{op.name} tile {tile}", work=replace(op.work, m=op.work.m / tiles), after=list(op.after))

"""ALST's TiledMLP: an MLP computes its tokens in tiles, one after another, and again in the backward pass.

The forward pass of a tile keeps nothing, its results are joined by a copy, and only the input of the MLP is saved. In
the backward pass every tile is computed again, and then its gradients. So the tensors inside of the MLP are there for a
tile at a time, in both passes; the forward pass runs twice, with full recompute of layers three times. The gradient of
a weight is added up over the tiles, and reduced after the last.

    forward    tile 1 | tile 2 | .. | tile n | join     backward    re tile 1, d tile 1 | re tile 2, d tile 2 | ..

For b s tokens of hidden size h, intermediate size f and n tiles, with a gated MLP in 16 bits, that is at most
2 b s h + 6 b s f / n bytes of the forward pass in place of 2 b s h + 6 b s f. By default n = 4 (`num_shards` of verl);
the example of DeepSpeed takes ceil(s / h), axolotl as many as have 32,768 tokens each.

Not modelled: that tiles of MoE layers are uneven; what ranks do to agree on n.

References: Bekman et al. 2025, arXiv 2506.13996, section 3.1; DeepSpeed runtime/sequence_parallel/ulysses_sp.py
(`TiledMLP`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import ChangesKernels
from meshcast.simulator.ir.modules import MLP, CompositeModule, Module, MoE
from meshcast.simulator.ir.ops import Communication, Fragment, Memory, Op, Param, TensorUse
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, MemoryScheme, Paper, SchemeOptions
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.lowering.rewrite import split_work, working_predecessors
from meshcast.simulator.schemes.memory.shared.recompute import recompute


class TiledMlp(MemoryScheme, ChangesKernels):
    role = "tiled MLP scheme"
    paper = Paper(
        "arXiv:2506.13996",
        "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Tokens",
        2025,
    )

    class Options(SchemeOptions):
        tiles: int = Field(default=4, ge=1, le=4096)
        """Tiles of a micro-batch's tokens on a rank."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, MLP | MoE):
            return inner(module)
        return _Tiling(module, _drop_unread(recompute(module, inner)), self.options.tiles).divide()

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        # A layer of a GPT: of its 24 b s h^2 + 4 b s^2 h FLOPs the MLP has 16 b s h^2.
        h, s = setting.h, setting.s
        yield ClosedForm("recomputed_forward_share", 16 * h / (24 * h + 4 * s), "section 3.1: MLPs run forward twice")


def _drop_unread(whole: Fragment) -> Fragment:
    """Returns a recomputed MLP without communication of the repetition whose result nothing waits for: that behind its
    last product."""
    backward = whole.backward
    while True:
        waited = {other for op in backward for other in working_predecessors(op)}
        unread = {op for op in backward if op.phase == "R" and isinstance(op.work, Communication)} - waited
        if not unread:
            return replace(whole, backward=backward)
        backward = [op for op in backward if op not in unread]
        whole = replace(whole, tensor_uses=[use for use in whole.tensor_uses if use.op not in unread])


class _Tiling:
    """The division of an MLP into tiles.

    whole: its fragment, in which it is computed again in the backward pass.
    """

    def __init__(self, module: CompositeModule, whole: Fragment, tiles: int) -> None:
        self.whole, self.tiles = whole, tiles
        read = {tensor.name for operator in module.operators() for tensor in operator.ins}
        outputs = {tensor.name for operator in module.operators() for tensor in operator.outs}
        self.results = outputs - read
        self.inside = outputs - self.results
        self.operators = {operator.name for operator in module.operators()}
        self.issued = {*whole.forward, *whole.backward}
        of_weights = {use.op for use in whole.tensor_uses if use.key.startswith("w:") or use.category == "gradients"}
        self.undivided = {op for op in of_weights if isinstance(op.work, Memory)}
        self.copies: list[dict[Op, Op]] = [{} for _ in range(tiles)]

    def divide(self) -> Fragment:
        """Returns the fragment of the tiles."""
        whole = self.whole
        forward, backward = (
            [self._copy(op, tile) for tile in range(self.tiles) for op in ops]
            for ops in (whole.forward, whole.backward)
        )
        exits, grad_exits = (
            {name: Op(op.name, after=self._copies_of(op), phase=op.phase) for name, op in ends.items()}
            for ends in (whole.exit, whole.grad_exit)
        )
        uses = [use for tile in range(self.tiles) for use in self._divide_uses(tile)]
        divided = replace(whole, forward=forward, backward=backward, exit=exits, grad_exit=grad_exits, tensor_uses=uses)
        divided.params = [self._move_param(param) for param in whole.params]
        self._join_results(divided)
        return divided

    def _copy(self, op: Op, tile: int) -> Op:
        """Returns the copy of an op, or of a mark behind one, for a tile; others are of all tiles."""
        copies = self.copies[tile]
        if op not in copies:
            if op not in self.issued and not any(self._copy(other, tile) is not other for other in op.after):
                copies[op] = op
                return op
            copies[op] = op.copy()
            copies[op].after = [self._copy(other, tile) for other in op.after]
            copies[op].name = f"{op.name} tile {tile}"
            if op.work is not None and op not in self.undivided and self.tiles > 1:
                copies[op].work = split_work(op.work, self.tiles)[tile]
        return copies[op]

    def _copies_of(self, op: Op) -> list[Op]:
        return list(dict.fromkeys(self._copy(op, tile) for tile in range(self.tiles)))

    def _divide_uses(self, tile: int) -> Iterable[TensorUse]:
        """Yields how a tile uses memory: a part of what is inside, all of what is not."""
        for use in self.whole.tensor_uses:
            op = self._copy(use.op, tile)
            if not self._is_inside(use.key):
                yield replace(use, op=op, made=use.made and not tile)
            elif nbytes := (tile + 1) * use.nbytes // self.tiles - tile * use.nbytes // self.tiles:
                yield replace(use, op=op, key=f"{use.key} of tile {tile}", nbytes=nbytes)

    def _is_inside(self, key: str) -> bool:
        """Returns whether a buffer is there for a tile at a time, as are results that are computed again."""
        key, again = key.removeprefix("d:"), key.endswith("~")
        name = key.partition("@")[0]
        buffers = any(key.startswith(f"{operator}.") for operator in self.operators)
        return buffers or name in self.inside or (again and name in self.results)

    def _move_param(self, param: Param) -> Param:
        ready = self._copies_of(param.ready)
        last = ready[0] if len(ready) == 1 else Op(param.ready.name, after=ready, phase=param.ready.phase)
        return replace(param, used=self._copy(param.used, 0), ready=last)

    def _join_results(self, divided: Fragment) -> None:
        """Adds the copy that joins the results of the tiles. It is repeated with them: autograd saves the input of the
        MLP once it has computed all tiles."""
        uses = [use for use in self.whole.tensor_uses if not use.key.endswith("~")]
        results = {use.key: use.nbytes for use in uses if use.key.partition("@")[0] in self.results}
        if not results:
            return
        ends: Sequence[Op] = [divided.exit[name] for name in sorted(self.results & divided.exit.keys())]
        nbytes = sum(results.values())
        join = Op("join tiles", work=Memory("concat", nbytes, nbytes), after=list(ends))
        divided.forward.append(join)
        for name in self.results & divided.exit.keys():
            divided.exit[name] = join
        forward = set(divided.forward)
        makers = [op for op in divided.forward if op in {use.op for use in divided.tensor_uses if use.key in results}]
        kept = [use for use in divided.tensor_uses if not (use.key in results and use.op in forward)]
        kept += [TensorUse(key, size, join, True) for key, size in results.items()]
        divided.tensor_uses = kept + [
            TensorUse(f"results of {op.name}", nbytes // len(makers), user, user is op)
            for op in makers
            for user in (op, join)
        ]
        if divided.backward:  # so that no recomputation around it ends before
            divided.tensor_uses += [TensorUse("tiles", 1, join, True), TensorUse("tiles", 1, divided.backward[0])]

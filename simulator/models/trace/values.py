"""Values of a traced pass that follow from token ids and sizes alone, such as positions, masks and lengths, and what an
even routing makes of the choices of routers.

Fake tensors have no values, so code that reads some of them (``.item()``, ``nonzero``) would end there. Here such
tensors have a small real one beside them, on which the same operators run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

LARGEST = 1 << 22
"""Most elements of a tensor whose values are followed."""

INDEXING = {"index", "index_put", "index_put_"}
"""Operators that read indices, or masks in their place."""

CHOOSING = {"topk": -1, "sort": -1, "argmax": None}
"""Operators whose last result are places of values, and the dim of these by default."""

ORDERED = ("topk", "sort")
"""Those that choose several places."""


class KnownValues:
    """Runs operators on fake tensors, and on the values of those that have any.

    values: by the identity of a fake tensor itself, so that it is not used twice, and its values.
    spoiled: memory into which something without known values was written.
    """

    def __init__(self) -> None:
        self.values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.spoiled: set[int] = set()

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Notes the values of a fake tensor, and returns it."""
        self.values[id(tensor)] = (tensor, value)
        return tensor

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a tensor; None: they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        _, value = self.values.get(id(tensor), (None, None))
        return None if value is None or value.untyped_storage()._cdata in self.spoiled else value

    def run(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Runs an operator and returns its result, a fake tensor or a number."""
        name = func._overloadpacket.__name__
        args = self._replace_masks(args) if name in INDEXING else args
        ins = list_tensors((args, kwargs))
        known = (
            all(self.find(tensor) is not None for tensor in ins) and torch.Tag.nondeterministic_seeded not in func.tags
        )
        if known and name in ("_local_scalar_dense", "equal"):
            return self._compute(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            if not known:
                raise
            return tree_map(self._imitate, self._compute(func, args, kwargs))
        outs = list_tensors(result)
        if name in CHOOSING and not known:
            self._choose_evenly(name, ins[0], outs[-1], args)
        elif known and outs and all(tensor.numel() <= LARGEST for tensor in outs):
            for tensor, value in zip(outs, list_tensors(self._compute(func, args, kwargs)), strict=True):
                self.add(tensor, value)
        elif func._schema.is_mutable:
            written = [kept for tensor in ins if (kept := self.find(tensor)) is not None]
            self.spoiled |= {kept.untyped_storage()._cdata for kept in written}
        return result

    def _compute(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Returns the result of an operator on the values of its inputs."""
        args, kwargs = tree_map(
            lambda item: self.find(item) if isinstance(item, torch.Tensor) else item, (args, kwargs)
        )
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _imitate(self, value: object) -> object:
        """Returns a fake tensor with a value."""
        return self.add(torch.empty_like(value), value) if isinstance(value, torch.Tensor) else value

    def _replace_masks(self, args: Sequence[object]) -> Sequence[object]:
        """Returns the arguments of an operator that reads indices, with these in place of masks of known values."""
        tensor, indices, *others = args
        places = list[object]()
        for index in indices if isinstance(indices, Sequence) else ():
            mask = self.find(index) if isinstance(index, torch.Tensor) and index.dtype == torch.bool else None
            if mask is None:
                places.append(index)
                continue
            with _disable_current_modes():
                chosen = mask.nonzero().unbind(1)
            places += map(self._imitate, chosen)
        return (tensor, places, *others)

    def _choose_evenly(self, name: str, scores: torch.Tensor, places: torch.Tensor, args: Sequence[object]) -> None:
        """Notes which places an operator chooses: all equally often, which for a router is an even load of experts."""
        numbers = [item for item in args[1:] if isinstance(item, int) and not isinstance(item, bool)]
        numbers = numbers[1:] if name == "topk" else numbers  # the first is k
        dim = numbers[0] if numbers else CHOOSING[name]
        if dim is None or places.numel() > LARGEST:
            return
        with _disable_current_modes():
            chosen = torch.arange(places.numel()) % scores.shape[dim]
            last = places.movedim(dim, -1).shape if name in ORDERED else places.shape
            chosen = chosen.reshape(last)
            self.add(places, chosen.movedim(-1, dim).contiguous() if name in ORDERED else chosen)


def list_tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors in arguments or results."""
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]

"""Mistakes of somebody who writes a scheme: nine in a ring of attention, nine in an overlap of tensor parallelism.

Each mutant is a copy of a module of schemes with one place changed. All of them lower without an error and would give a
forecast; the checks of data flow and placement see each of them, and nothing in the schemes themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import LowerModule, Scheme
from meshcast.simulator.schemes.sequence.shared import attention_steps, ring_attention
from meshcast.simulator.schemes.tensor.shared import pulled_shards
from meshcast.validation.contract.checked import layer_problems
from meshcast.validation.contract.measure import make

RING, OVERLAP = "sequence/ring", "tensor/async-tp"


class Mistake(NamedTuple):
    """A change of a module's text. place: regular expression that matches once; mutant: its replacement; seen: words of
    a violation that the checks must report."""

    place: str
    mutant: str
    seen: str


RING_MISTAKES = {
    "compute does not wait for arriving data": Mistake(
        r"        step\.entry\[k\]\.after \+= came\n        step\.entry\[v\]\.after \+= came\n"
        r"(        arrives = )",
        r"\1",
        "core 1 on compute> reads core.kv1 and does not wait for",
    ),
    "outputs are merged before they are there": Mistake(
        r"(        out\.forward \+= step\.forward\n)"
        r"(        free = .*\n        if i:\n            steps\.merge_output\(.*\n)",
        r"\2\1",
        "reads core.o1 before <F core 1 on compute> writes it",
    ),
    "messages have zero bytes": Mistake(
        r"self\.key_bytes, self\.gradient_bytes = self\.nbytes\(self\.k, self\.v\),",
        "self.key_bytes, self.gradient_bytes = self.nbytes(),",
        "sends zero bytes",
    ),
    "gradients of keys and values are never added": Mistake(
        r"                gradients = self\._add_key_gradients\(.*\n", "", "no kernel reads core.d:part1"
    ),
    "blocks are in the wrong order": Mistake(
        r"rank, \(rank - i\) % ranks", r"rank, (rank + i) % ranks", "pairs of its block"
    ),
    "gradients are sent to the wrong rank": Mistake(
        r'(self\.shift\("ring back", .*), self\.by,', r"\1, -self.by,", "results for dk come to another rank"
    ),
    "gradients are added twice": Mistake(
        r"( +sums = self\.add_gradients\(.*block\.queries, )after(, ends\)\n)",
        r"\1after\2\1[sums[-1], after[-1]]\2",
        "2 times",
    ),
    "the block that arrives is never read": Mistake(
        r"steps\.take_over_memory\(i, \{k: buffer, v: buffer\} if arrives else \{\},",
        "steps.take_over_memory(i, {},",
        "no kernel reads core.kv1",
    ),
    "blocks go round the wrong axis": Mistake(
        r'Collective\("shift", (.*?), self\.ring_axes,',
        r'Collective("shift", \1, ("tp",),',
        "runs along tp, and sequence schemes along ['cp']",
    ),
}
"""Mistakes in what the schemes of ring attention share."""

OVERLAP_MISTAKES = {
    "compute does not wait for arriving data": Mistake(
        r"zip\(pair\.rows\(product, \[1, \*steps\]\), \[local, \*pulls\], strict=True\)",
        "zip(pair.rows(product, [1, *steps]), [local] * pair.ranks, strict=True)",
        "nobody waits for <F all_gather",
    ),
    "results are added before they have come back": Mistake(
        r"sum_shards\(pair, \[\*pulls, parts\[-1\]\]\)", "sum_shards(pair, parts)", "nobody waits for <B reduce_scatter"
    ),
    "buffers of messages have zero bytes": Mistake(
        r"self\.add_buffer\(rewrite, pair, shard, local,",
        "self.add_buffer(rewrite, pair, shard // pair.work.nbytes, local,",
        "pulled, which has zero bytes",
    ),
    "gradients are never added": Mistake(
        r"rewrite\.swap\(pair\.collective, \[sum_shards\(pair, \[\*pulls, parts\[-1\]\]\)\]\)",
        "rewrite.swap(pair.collective, [], [*pulls, parts[-1]])",
        "bytes are added, and",
    ),
    "blocks are in the wrong order": Mistake(
        r"pulls = (shift_shards\(pair, \[\[local\]\] \* len\(steps\), .*\))\n",
        r"pulls = [replace(pull, work=replace(pull.work, by=1)) for pull in \1]\n",
        "of one rank again",
    ),
    "results are sent to the wrong rank": Mistake(
        r"pulls = (shift_shards\(pair, \[\[part\] for part in parts\[:-1\]\], .*\))\n",
        r"pulls = [replace(pull, work=replace(pull.work, by=1)) for pull in \1]\n",
        "ops from one rank, shifted by",
    ),
    "gradients are added twice": Mistake(
        r"rewrite\.swap\(pair\.collective, \[(sum_shards\(pair, \[\*pulls, parts\[-1\]\]\))\]\)",
        r"rewrite.swap(pair.collective, [\1, pair.collective])",
        "bytes are added, and",
    ),
    "the last block that arrives is never read": Mistake(
        r"zip\(pair\.rows\(product, \[1, \*steps\]\), \[local, \*pulls\], strict=True\)",
        "zip(pair.rows(product, [1, *steps]), [local, *pulls[:-1], local], strict=True)",
        "nobody waits for <F all_gather norm1 3",
    ),
    "blocks come along the wrong axis": Mistake(
        r"pulls = (shift_shards\(pair, \[\[local\]\] \* len\(steps\), .*\))\n",
        r'pulls = [replace(pull, work=replace(pull.work, axes=("cp",))) for pull in \1]\n',
        "runs along cp, and tensor schemes along ['tp']",
    ),
}
"""Mistakes in the module of the overlap, or in `pulled_shards`, its base."""


def mutated(mistake: Mistake, *modules: ModuleType) -> dict[str, Any]:
    """The names of a copy of `modules` with a mistake in one of them; each may use names of those after it."""
    found, names = 0, dict[str, Any](__name__=modules[0].__name__, replace=replace)
    for module in reversed(modules):
        assert module.__file__ is not None
        text, changes = re.subn(mistake.place, mistake.mutant, Path(module.__file__).read_text("utf-8"))
        found += changes
        for base in modules:
            text = re.sub(rf"^from {re.escape(base.__name__)} import (\([^)]*\)|.*)$", "", text, flags=re.MULTILINE)
        exec(compile(text, module.__file__, "exec"), names)
    assert found == 1, "this place of the scheme reads otherwise today: state the mistake for its new text"
    return names


def ring_problems(names: dict[str, Any] | None = None) -> Iterator[str]:
    """Violations in a ring over four ranks, with each order of positions. names: of a mutant."""
    kind: Any = find_scheme(RING)

    class Ring(kind):  # type: ignore[misc]
        def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
            made = names or vars(ring_attention)
            blocks = made["mask_blocks"](self.token_order, self.ranks)
            fragment: Fragment = made["RingAttention"](operator, inner, self.ring_axes, blocks).fragment
            return fragment

    mesh = Mesh({"cp": 4, "tp": 2})

    def schemes(balance: str) -> Sequence[Scheme]:
        return [Ring(("cp",), kind.Options(balance=balance), mesh), make("tensor/megatron-sp", mesh, ("tp",))]

    orders = ("zigzag", "striped", "contiguous")
    return (problem for balance in orders for problem in layer_problems(mesh, partial(schemes, balance)))


def overlap_problems(names: dict[str, Any] | None = None) -> list[str]:
    """Violations in an overlap scheme with tensor parallelism of four ranks. names: of a mutant of its module, or of
    that of its base."""
    kind: Any = find_scheme(OVERLAP)
    if names is not None:
        gathers = {"replace_gather": names["PulledShards"].replace_gather}
        mutant: Any = names.get(kind.__name__) or type(kind.__name__, (kind,), gathers)
        mutant.name, kind = kind.name, mutant
    mesh = Mesh({"cp": 2, "tp": 4})

    def schemes() -> Sequence[Scheme]:
        others = make("tensor/megatron-sp", mesh, ("tp",)), make("sequence/all-gather", mesh, ("cp",))
        return [kind((), kind.Options(), mesh), *others]

    return layer_problems(mesh, schemes)


def test_nothing_is_seen_in_the_schemes_themselves() -> None:
    assert [*ring_problems()] == []
    assert overlap_problems() == []


@pytest.mark.parametrize("mistake", RING_MISTAKES)
def test_a_mistake_in_a_ring_is_seen(mistake: str) -> None:
    problems = ring_problems(mutated(RING_MISTAKES[mistake], ring_attention, attention_steps))
    assert any(RING_MISTAKES[mistake].seen in problem for problem in problems)


@pytest.mark.parametrize("mistake", OVERLAP_MISTAKES)
def test_a_mistake_in_an_overlap_is_seen(mistake: str) -> None:
    change = OVERLAP_MISTAKES[mistake]
    scheme = sys.modules[find_scheme(OVERLAP).__module__]
    own = re.search(change.place, Path(str(scheme.__file__)).read_text("utf-8"))
    found = overlap_problems(mutated(change, scheme if own else pulled_shards))
    assert any(change.seen in problem for problem in found), found

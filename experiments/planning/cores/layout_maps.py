"""Maps from named dims to mesh axes, all of them: the map of least peak memory.

Mesh-TensorFlow's space (Shazeer et al. 2018, arXiv 1811.02084): a dim is sharded over at most one axis, the same in all
tensors, and dims that meet in an operation have different axes. Maps are enumerated depth first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

MOST_MAPS = 2_000_000


def every_map(
    dims: Mapping[str, int], mesh: Mapping[str, int], together: Sequence[Collection[str]]
) -> Iterator[dict[str, str]]:
    """Every map of some dims to axes.

    dims, mesh: dims and axes with their sizes; a dim is sharded over axes that divide it. together: dims that meet.
    """
    names = list(dims)

    def extend(place: int, made: dict[str, str]) -> Iterator[dict[str, str]]:
        if place == len(names):
            yield dict(made)
            return
        name = names[place]
        yield from extend(place + 1, made)
        for axis, size in mesh.items():
            taken = any(name in one and any(made.get(other) == axis for other in one) for one in together)
            if dims[name] % size == 0 and not taken:
                yield from extend(place + 1, {**made, name: axis})

    return extend(0, {})


def find_map(
    dims: Mapping[str, int],
    mesh: Mapping[str, int],
    together: Sequence[Collection[str]],
    value_of: Callable[[Mapping[str, str]], float],
) -> tuple[dict[str, str], float, int]:
    """The map of the least value, that value, and the number of maps.

    Raises ValueError where there may be more than `MOST_MAPS`.
    """
    if (len(mesh) + 1) ** len(dims) > MOST_MAPS:
        raise ValueError(f"{len(dims)} dims over {len(mesh)} axes have over {MOST_MAPS} maps: fix some of them")
    best: tuple[dict[str, str], float] = {}, value_of({})
    visited = 0
    for one in every_map(dims, mesh, together):
        visited += 1
        if (value := value_of(one)) < best[1]:
            best = one, value
    return *best, visited

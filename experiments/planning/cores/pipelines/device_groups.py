"""Groups of devices for the stages of a pipeline: Metis' search space.

Groups are powers of two and add up to all devices; a group has at least a share of the mean size. For every multiset of
sizes all orders count, but where these are many, equal smallest groups stay together (Um et al. 2024, USENIX ATC,
section 4, and the released code SamsungLabs/Metis).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, permutations


def device_groups(devices: int, stages: int, variance: float = 0.5, longest: int = 4) -> list[tuple[int, ...]]:
    """The sizes of the groups of as many stages, in all orders that count.

    variance: least share of the mean size that a group has. longest: groups whose orders all count.
    """
    least = max(devices // stages, stages // devices) * variance
    sizes = [2**power for power in range(devices.bit_length()) if 2**power >= least]
    found: dict[tuple[int, ...], None] = {}
    for chosen in _multisets(devices, stages, sizes):
        for order in set(permutations(_merge_smallest(chosen, longest))):
            found[tuple(chain(*order))] = None
    return sorted(found)


def _multisets(devices: int, stages: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Ascending sizes that add up to all devices."""
    if not stages:
        if not devices:
            yield ()
        return
    for place, size in enumerate(sizes):
        if size * stages > devices:
            break
        if sizes[-1] * stages >= devices:
            for others in _multisets(devices - size, stages - 1, sizes[place:]):
                yield size, *others


def _merge_smallest(sizes: tuple[int, ...], longest: int) -> list[tuple[int, ...]]:
    """Groups of which pairs of the smallest are joined, until no more are left than may be ordered."""
    groups: list[tuple[int, ...]] = [(size,) for size in sizes]
    while len(groups) > longest:
        smallest = min(map(sum, groups))
        equal = [group for group in groups if sum(group) == smallest]
        if len(equal) < 2:
            break
        pairs = len(equal) // 2
        joined = [equal[2 * place] + equal[2 * place + 1] for place in range(pairs)]
        groups = sorted([*joined, *equal[2 * pairs :], *(group for group in groups if sum(group) > smallest)], key=sum)
    return groups

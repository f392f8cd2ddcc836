"""Functions over arrays that numba compiles where it is installed, and that run as plain Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])

HAS_COMPILER = find_spec("numba") is not None


def compile_loop(function: Function) -> Function:
    """Returns a function compiled for the types of its first arguments, kept on disk for later processes if it can
    be."""
    if not HAS_COMPILER:
        return function
    from numba import njit  # type: ignore[import-not-found, unused-ignore]

    try:
        return cast("Function", njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder for it can be written
        return cast("Function", njit(error_model="numpy")(function))

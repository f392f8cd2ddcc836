"""Functions over arrays that numba compiles where it is installed, and that run as plain Python where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar, cast

from meshcast.hardware.documents.output_file import user_caches

Function = TypeVar("Function", bound=Callable[..., object])

HAS_COMPILER = find_spec("numba") is not None

FOLDER = "CACHE_DIR"
"""The setting of numba for where it keeps what it compiles."""

SOURCES = Path(__file__).parent


def compile_loop(function: Function) -> Function:
    """Returns a function compiled for the types of its first arguments, kept on disk for later processes if it can
    be."""
    return _compile(function, "never")


def compile_inside(function: Function) -> Function:
    """Returns a function that is compiled as a part of the loops that call it: a call with arrays costs ten times as
    much as a few operations."""
    return _compile(function, "always")


def _compile(function: Function, inline: Literal["never", "always"]) -> Function:
    """Returns a compiled function. inline: whether its callers have it as a part."""
    if not HAS_COMPILER:
        return function
    from numba import config, njit  # type: ignore[import-not-found, unused-ignore]

    settings, usual = vars(config), getattr(config, FOLDER)
    settings[FOLDER] = str(_find_folder(usual))
    try:
        return cast("Function", njit(cache=True, error_model="numpy", inline=inline)(function))
    except RuntimeError:  # no folder for it can be written
        return cast("Function", njit(error_model="numpy", inline=inline)(function))
    finally:
        settings[FOLDER] = usual


@cache
def _find_folder(usual: str) -> Path:
    """Returns the folder of what is compiled: a folder for each state of the sources, as numba looks at the file of a
    function alone and not at those of what it calls, and cannot read what names a type that is gone.

    usual: the folder that the user chose for numba; empty: none.
    """
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.py")))
    caches = Path(usual) if usual else SOURCES / "__pycache__"
    if not usual and not os.access(SOURCES, os.W_OK):
        caches = user_caches()
    return caches / f"loops-{sha256(sources).hexdigest()[:16]}"

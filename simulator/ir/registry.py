"""Finds schemes: a file per scheme, ``simulator/schemes/<family>/<name>.py``, imported by path; those of plug-ins
(`hardware.plugins`) and classes that Python code gives (`add_scheme`), likewise."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.plugins import check_runs, find_files, remember_names
from meshcast.hardware.python_file import classes_of, import_file
from meshcast.simulator.ir.scheme import FAMILIES, Scheme

SCHEMES = Path(__file__).parents[1] / "schemes"


_classes: dict[str, type[Scheme]] = {}
"""Schemes that Python code gives, by ``family/name``."""


def scheme_names() -> list[str]:
    """Returns every ``family/name``; the folders ``shared`` hold code that several schemes of a family use."""
    names = {family: [*_list_shipped(family), *_find_added(family)] for family in FAMILIES}
    files = [f"{family}/{name}" for family in FAMILIES for name in names[family]]
    return [*files, *(use for use in _classes if use not in files)]


@cache
def _list_shipped(family: str) -> tuple[str, ...]:
    return tuple(path.stem.replace("_", "-") for path in sorted((SCHEMES / family).glob("*.py")))


@remember_names
def _find_added(family: str) -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of their schemes."""
    return find_files(f"schemes/{family}", ".py", _list_shipped(family))


def is_scheme(use: str) -> bool:
    """Returns whether ``family/name`` has a file, or is a class that Python code gave."""
    return use in _classes or _has_file(use)


@remember_names
def _has_file(use: str) -> bool:
    family, _, name = use.partition("/")
    return family in FAMILIES and not {"/", "_"} & {*name} and scheme_file(use).is_file()


def scheme_file(use: str) -> Path:
    """Returns the file of a scheme."""
    family, _, name = use.partition("/")
    added = _find_added(family).get(name) if family in FAMILIES else None
    return added or SCHEMES / family / f"{name.replace('-', '_')}.py"


def add_scheme(scheme: type[Scheme]) -> str:
    """Makes a class a scheme that jobs can name until the process ends; returns its ``family/name``.

    The name is that which the class states, or its own in lower case with hyphens. A class of the same name that was
    added before is replaced: cells of notebooks run again. Raises PlanError for a name that has a file.
    """
    name = vars(scheme).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", scheme.__name__).lower()
    use = f"{scheme.family}/{name}"
    if _has_file(use):
        raise PlanError("schemes", "another scheme has this name", "Give the class another name", use)
    scheme.name = name
    _classes[use] = scheme
    return use


def find_scheme(use: str, where: str = "plan.schemes") -> type[Scheme]:
    """Returns the scheme class in the file of `use` (``family/name``).

    where: place of the name in the job, for error messages.
    Raises PlanError for a name without a file.
    """
    if use in _classes:
        return _classes[use]
    if not is_scheme(use):
        raise PlanError(where, "no such scheme", nearest(use, scheme_names()), use)
    schemes = _import_schemes(use)
    if len(schemes) != 1:
        rule = f"{scheme_file(use).name} must define exactly one scheme, it defines {len(schemes)}"
        raise PlanError(where, rule, "Keep one scheme a file", use)
    return schemes[0]


@cache
def _import_schemes(use: str) -> list[type[Scheme]]:
    """Returns the scheme classes of a file, which is imported once: a class is the same wherever a job names it."""
    family, _, name = use.partition("/")
    path = scheme_file(use)
    check_runs(path, f"scheme {use}")
    schemes = classes_of(import_file(path, f"meshcast.simulator.schemes.{family}.{path.stem}"), Scheme)
    for scheme in schemes:
        scheme.name = name
    return schemes


def scheme_docstring(use: str) -> str:
    """Returns the docstring of a scheme's file."""
    return inspect.getdoc(sys.modules[find_scheme(use).__module__]) or ""


def describe_scheme(use: str) -> str:
    """Returns the idea of a scheme: the first sentence of its file."""
    sentences = " ".join(scheme_docstring(use).partition("\n\n")[0].split())
    return sentences.partition(". ")[0].rstrip(".")

"""Finds schemes: a file per scheme, ``simulator/schemes/<family>/<name>.py``, imported by path."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.ir.scheme import FAMILIES, Scheme

SCHEMES = Path(__file__).parents[1] / "schemes"


def scheme_names() -> list[str]:
    """Returns every ``family/name`` that has a file; the folders ``shared`` hold code that several schemes of a family
    use."""
    return [
        f"{family}/{path.stem.replace('_', '-')}"
        for family in FAMILIES
        for path in sorted((SCHEMES / family).glob("*.py"))
    ]


@cache
def is_scheme(use: str) -> bool:
    """Returns whether ``family/name`` has a file."""
    family, _, name = use.partition("/")
    return family in FAMILIES and not {"/", "_"} & {*name} and scheme_file(use).is_file()


def scheme_file(use: str) -> Path:
    """Returns the file of a scheme."""
    family, _, name = use.partition("/")
    return SCHEMES / family / f"{name.replace('-', '_')}.py"


def find_scheme(use: str, where: str = "plan.schemes") -> type[Scheme]:
    """Returns the scheme class in the file of `use` (``family/name``).

    where: place of the name in the job, for error messages.
    Raises PlanError for a name without a file.
    """
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
    module = _import_file(path, f"meshcast.simulator.schemes.{family}.{path.stem}")
    schemes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, Scheme) and c.__module__ == module.__name__
    ]
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


def _import_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the code of a new scheme raises
        line = error.lineno if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1].lineno
        rule = f"the file of this scheme cannot be imported: {type(error).__name__}: {error}"
        raise PlanError(f"{path}:{line}", rule, "Correct the file, or take it out of the folder") from error
    return module

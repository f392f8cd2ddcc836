"""Packages that only an extra of meshcast installs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshcast.hardware.errors import PlanError


def import_optional(module: str, extra: str, user: str) -> Any:
    """Imports a module of a package that the extra `extra` installs.

    user: what needs it, for the error. Raises PlanError if it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise PlanError(
            user, f"it needs {package}, which is not installed", f"pip install 'meshcast[{extra}]'"
        ) from None

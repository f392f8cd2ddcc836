"""Works of kernels in measurement files: as plain data, and by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.ir.ops import BYTES, Attention, Gemm, HostCopy, Memory, Work


def kernel_class(works: Sequence[Work]) -> str:
    """Class of the kernels of a module: that of its GEMMs or attention if it has some, else of its first kernel."""
    for work in works:
        if isinstance(work, Gemm):
            return "gemm " + work.dtype if not work.groups else "grouped gemm"
        if isinstance(work, Attention):
            return "attention"
    first = works[0]
    return "copy" if isinstance(first, HostCopy) else str(getattr(first, "what", ""))


def work_fields(work: Work) -> dict[str, Any]:
    """Returns the fields of a kernel's work as plain data, without empty ones; `work_of` reads them."""
    return {field.name: value for field in fields(work) if (value := getattr(work, field.name)) not in ("", ())}


def work_of(data: Mapping[str, Any], where: str = "shape") -> Work | None:
    """Returns the work of which `data` are the fields; None if they are those of no kernel.

    where: place of the fields. Raises PlanError for a value of another type than its field's.
    """
    for kind in (Gemm, Attention, Memory):
        known = {field.name: field.default for field in fields(kind)}
        needed = {name for name, default in known.items() if default is MISSING}
        if needed <= data.keys() <= known.keys():
            for name, value in data.items():
                _check_field(f"{where}.{name}", value, kind.__annotations__[name])
            return kind(**{name: _frozen(value) for name, value in data.items()})
    return None


def _frozen(value: Any) -> Any:
    """Returns a list of a file, and the lists in it, as tuples."""
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value


MAX_FIELD = 1e15
"""Largest number in the fields of a kernel: elements, bytes, positions."""


def _check_field(where: str, value: Any, annotation: str) -> None:
    """Raises PlanError for a value that a field of a work cannot have. annotation: of the field, as text."""
    remedy = "Correct it, or measure again"
    if annotation in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_FIELD:
            raise PlanError(where, f"it must be a number from 0 to {MAX_FIELD:g}", remedy, value)
    elif annotation == "bool":
        if not isinstance(value, bool):
            raise PlanError(where, "it must be true or false", remedy, value)
    elif where.endswith("dtype"):
        if not isinstance(value, str) or value not in BYTES:
            raise PlanError(where, "there is no number format of this name", nearest(str(value), BYTES), value)
    elif not isinstance(value, str if annotation == "str" else list | tuple):
        raise PlanError(where, f"it must be {'text' if annotation == 'str' else 'a list'}", remedy, value)

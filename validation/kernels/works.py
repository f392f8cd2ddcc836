"""Works of kernels in measurement files: as plain data, and by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from simulator.ir.ops import Attention, Gemm, HostCopy, Memory, Work


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
    """Fields of a kernel's work as plain data, without empty ones; `work_of` reads them."""
    return {field.name: value for field in fields(work) if (value := getattr(work, field.name)) not in ("", ())}


def work_of(given: Mapping[str, Any]) -> Work | None:
    """The work of which `given` are the fields; None if they are those of no kernel."""
    for kind in (Gemm, Attention, Memory):
        known = {field.name: field.default for field in fields(kind)}
        needed = {name for name, default in known.items() if default is MISSING}
        if needed <= given.keys() <= known.keys():
            return kind(**given)
    return None

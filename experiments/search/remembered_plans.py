"""Best plans that earlier searches found, in the user's folder of caches: a job of the same content is not searched
again. Its name depends on all that a plan does: the job, the files that it names, the installation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshcast.hardware.documents.output_file import user_caches, write_file
from meshcast.hardware.documents.plain_data import Fields, SomeFields

if TYPE_CHECKING:
    from meshcast.experiments.search.certificate.result import SearchResult


def find_remembered(job: SomeFields, base: Path, gap: float = 0.0) -> Path:
    """Returns the file that the best plan of a job is remembered in. base: folder of relative paths in the job. gap: to
    which it is proven."""
    from meshcast.experiments.sweeps.fingerprint import identify_job

    near = f"-{gap:g}" if gap else ""
    return user_caches() / "plans" / f"{identify_job(job, base)}{near}.json"


def read_remembered(kept: Path) -> tuple[str, Fields | None]:
    """Returns how a remembered plan was found, and the job with it; None: it is not remembered."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(kept.read_text("utf-8"))
        return f"{data['search']} (remembered)", dict(data["job"])
    return "", None


def remember(kept: Path, result: SearchResult) -> None:
    """Remembers the best plan; without a place for it the next command searches again."""
    from meshcast.experiments.search.output.page import describe_proof

    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, json.dumps({"search": describe_proof(result), "job": result.best[0].job}))

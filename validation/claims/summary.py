"""Counts of statuses: of all claims, by family and by system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshcast.validation.claims.judge import HOLDS, STATUSES, Judgement


def summarize_judgements(rows: Sequence[Judgement]) -> dict[str, Any]:
    """Counts over all claims, by family and by system. Only claims whose source was read are scored."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    return {
        **count_statuss(rows),
        "by_family": {name: count_statuss(row for row in rows if row["family"] == name) for name in families},
        "by_system": {name: count_statuss(row for row in rows if row["system"] == name) for name in systems},
    }


def count_statuss(rows: Iterable[Judgement]) -> dict[str, Any]:
    """Counts of statuses among scored claims.

    judged: scored claims that hold, miss or depend. near: those that hold or deviate by at most `NEAR`.
    share_holds, share_near: over the judged ones; None without any.
    """
    rows = list(rows)
    scored = [row for row in rows if row["scored"]]
    counts = {status: sum(row["status"] == status for row in scored) for status in STATUSES}
    judged = [row for row in scored if row["ours"] is not None]
    near = sum(row["near"] for row in judged)
    return {
        "claims": len(rows),
        "recalled": len(rows) - len(scored),
        "judged": len(judged),
        **{status.replace("-", "_"): count for status, count in counts.items()},
        "near": near,
        "share_holds": counts[HOLDS] / len(judged) if judged else None,
        "share_near": near / len(judged) if judged else None,
    }

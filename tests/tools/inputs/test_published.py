"""The public files of published runs: every row is named once, and what is added to a file is what was measured."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from meshcast.hardware import load_cluster
from tests.conftest import Tables
from tools.inputs.corpus import CORPUS

FIELDS = {"row", "repository", "commit", "path", "companions", "recipe", "given", "note"}
PLACES = {
    **{"batch.micro": ("batch", "micro"), "batch.global": ("batch", "global"), "batch.sequence": ("batch", "seq")},
    **{"plan.tp": ("mesh", "tp"), "plan.pp": ("mesh", "pp"), "plan.cp": ("mesh", "cp"), "plan.chunks": ("mesh", "vpp")},
    "model.layers": ("model", "layers"),
}
"""Where a row has what a key of a job says."""


def load_published() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load((CORPUS.parent / "published.yaml").read_text("utf-8"))
    return entries


def test_every_file_of_a_published_run_is_named_by_its_commit() -> None:
    entries = load_published()
    assert len({entry["row"] for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.keys() <= FIELDS, entry
        assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"]), entry
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry["repository"]), entry


def test_what_is_added_to_a_file_is_what_was_measured(tables: Tables) -> None:
    rows = {row["id"]: row for row in map(json.loads, tables.published_runs.read_text("utf-8").splitlines())}
    added = [(entry["row"], entry["given"]) for entry in load_published() if entry["row"] in rows]
    assert added
    for name, given in added:
        run = rows[name]["spec"]
        assert load_cluster(given["cluster"]).gpus == run["gpus"], name
        for key, (part, field) in PLACES.items():
            assert key not in given or given[key] == run[part][field] or run[part][field] is None, (name, key)

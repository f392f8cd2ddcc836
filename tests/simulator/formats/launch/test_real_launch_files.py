"""Real configurations of training programs import, and every setting that is not understood is named.

`configurations.jsonl` states facts of public repositories, a line for each file or recipe: its source, settings that
influence time or memory (by the names of the file, in our own layout), and what is expected of the job: degrees
(some from the name of a test case), the billions of parameters that the name of a model claims, the compute format, the
data scheme, the names of the settings that no job can state, and what the forecast refuses, if the file contradicts
itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.convert import export_job, import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import flatten_job, nest
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.formats.launch.programs.registry import FORMATS
from meshcast.simulator.formats.launch.quoting import quote_toml
from meshcast.simulator.formats.launch.render import render_job
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.strategies import some

ROWS = [json.loads(line) for line in Path(__file__).with_name("configurations.jsonl").read_text("utf-8").splitlines()]


def write_settings(program: str, settings: Mapping[str, Any]) -> str:
    """The settings as a file of the program."""
    if program == "megatron":
        return "python pretrain_gpt.py \\\n" + " \\\n".join(f"  {flag} {_word(one)}" for flag, one in settings.items())
    if program == "torchtitan":
        sections: dict[str, list[str]] = {}
        for name, value in settings.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {quote_toml(value)}")
        return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())
    nested = nest(settings)
    return json.dumps(nested) if program == "deepspeed" else yaml.safe_dump(nested)


def _word(value: Any) -> str:
    """A value of a flag; switches have none."""
    if value is True:
        return ""
    return " ".join(f"'{one}'" for one in value) if isinstance(value, list) else f"'{value}'"


def import_row(row: Mapping[str, Any]) -> ImportedJob:
    """Imports the settings of a row."""
    text = write_settings(row["program"], row["settings"])
    where = "file.yaml" if "MODEL_ARGS" in text[:20] or row["program"] == "accelerate" else "file"
    given = {"model": row.get("model"), "cluster": row.get("cluster")}
    return import_text(text, where, row["program"], **given, options=LaunchOptions(assume_defaults=True))


def list_unfollowed(imported: ImportedJob) -> set[str]:
    """The settings that the forecast does not follow."""
    findings = imported.findings
    return {entry.shown for entry in (*findings.approximated, *findings.questions) if entry.shown}


def name_row(row: dict[str, Any]) -> str:
    return re.sub(r"[^\w.]+", "-", row["source"])[-60:]


def test_there_are_many_of_every_program() -> None:
    count = Counter(row["program"] for row in ROWS)
    assert len(ROWS) >= 60 and count.keys() <= FORMATS.keys()
    assert count["megatron"] >= 40 and min(count["nemo"], count["megatron-bridge"]) >= 20 and min(count.values()) >= 7


@pytest.mark.parametrize("row", drawn(ROWS, keep=2), ids=name_row)
def test_a_real_configuration_imports(row: dict[str, Any]) -> None:
    found = import_row(row)
    job = load_job(found.job)
    keys = flatten_job(job)
    said = {key: keys.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp", "ep", "etp", "data")}
    said |= {"chunks": keys.get("plan.pipeline.chunks", 1), "compute": keys["precision.compute"]}
    said |= {"global": keys["batch.global"], "billions": job.model.parameters / 1e9}
    for key, value in row["expected"].items():
        assert said[key] == (pytest.approx(value, rel=0.16) if key == "billions" else value), key
    assert sorted(list_unfollowed(found)) == row["not_understood"]


@pytest.mark.parametrize("row", ROWS[::5], ids=name_row)
def test_what_is_printed_is_the_job_with_its_comments(row: dict[str, Any]) -> None:
    found = import_row(row)
    text = render_job(found)
    assert load_job(yaml.safe_load(text)) == load_job(found.job)
    for name in list_unfollowed(found):
        assert re.search(rf"^#   .*{re.escape(name)}: ", text, re.MULTILINE)
    for key in found.assumed:
        assert f"#   {key}: " in text
    assert "  # assumed: " in text or not found.assumed.keys() - {"model.vocab"}


@pytest.mark.parametrize("row", drawn([row for row in ROWS if row["program"] != "accelerate"][::4], keep=2))
def test_what_was_imported_can_be_exported_whole(row: dict[str, Any]) -> None:
    job = load_job(import_row(row).job)
    form = "megatron-bridge" if row["program"] == "nemo" else row["program"]  # which is where NeMo 2 went
    exported = export_job(job, form, lambda data, folder: load_job(data, base=folder), lambda job: None)
    lost = {"plan.partition"} if job.plan.partition == "by-cost" else set()  # an assumption that no program knows
    if form == "megatron":  # a benchmark, whose random tokens are spread evenly
        lost |= {"model.moe.routing", *(f"plan.expert.routing{key}" for key in ("", ".trained", ".documents"))}
    lost |= {"framework.name"} if row["program"] == "nemo" else set()
    assert exported.unsaid.keys() <= lost


@pytest.mark.parametrize("row", some([(row,) for row in ROWS], of=12))
def test_a_real_configuration_is_forecast_or_contradicts_itself(row: dict[str, Any]) -> None:
    job = load_job(import_row(row).job)
    if "refused" in row:
        with pytest.raises(PlanError, match=row["refused"]):
            simulate(job)
        return
    assert simulate(job).step_time > 0


def test_few_real_configurations_contradict_themselves() -> None:
    assert sum("refused" in row for row in ROWS) == 3

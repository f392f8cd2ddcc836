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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import nest
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.formats.launch.programs.registry import FORMATS
from meshcast.simulator.formats.launch.quoting import quote_toml
from meshcast.simulator.formats.launch.render import render_job
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.launch_files import export, keys_of

ROWS = [json.loads(line) for line in Path(__file__).with_name("configurations.jsonl").read_text("utf-8").splitlines()]
NUMBERS = range(len(ROWS))


def write_settings(program: str, settings: Mapping[str, Any]) -> str:
    """Returns settings as a file of their program."""
    if program == "megatron":
        flags = (f"  {flag} {write_words(value)}" for flag, value in settings.items())
        return "python pretrain_gpt.py \\\n" + " \\\n".join(flags)
    if program == "torchtitan":
        sections: dict[str, list[str]] = {}
        for name, value in settings.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {quote_toml(value)}")
        return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())
    nested = nest(settings)
    return json.dumps(nested) if program == "deepspeed" else yaml.safe_dump(nested)


def write_words(value: Any) -> str:
    """Returns the words of a flag; switches have none."""
    if value is True:
        return ""
    return " ".join(f"'{word}'" for word in value) if isinstance(value, list) else f"'{value}'"


@cache
def import_row(number: int) -> ImportedJob:
    """Imports the settings of a row."""
    row = ROWS[number]
    text = write_settings(row["program"], row["settings"])
    where = "file.yaml" if "MODEL_ARGS" in text[:20] or row["program"] == "accelerate" else "file"
    silent = LaunchOptions(assume_defaults=True)
    return import_text(text, where, row["program"], row.get("cluster"), row.get("model"), options=silent)


def test_there_are_many_of_every_program() -> None:
    count = Counter(row["program"] for row in ROWS)
    assert len(ROWS) >= 60 and count.keys() <= FORMATS.keys()
    assert count["megatron"] >= 40 and min(count["nemo"], count["megatron-bridge"]) >= 20 and min(count.values()) >= 7
    assert sum("refused" in row for row in ROWS) == 2, "few contradict themselves"


@pytest.mark.parametrize("number", drawn(NUMBERS, keep=4))
def test_a_real_configuration_imports_and_is_printed_with_its_comments(number: int) -> None:
    row, found = ROWS[number], import_row(number)
    job, keys = load_job(found.job), keys_of(found)
    said = {key: keys.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp", "ep", "etp", "data")}
    said |= {"chunks": keys.get("plan.pipeline.chunks", 1), "compute": keys["precision.compute"]}
    said |= {"global": keys["batch.global"], "billions": job.model.parameters / 1e9}
    for key, value in row["expected"].items():
        assert said[key] == (pytest.approx(value, rel=0.16) if key == "billions" else value), key
    unfollowed = {entry.shown for entry in (*found.findings.approximated, *found.findings.questions) if entry.shown}
    assert sorted(unfollowed) == row["not_understood"]
    text = render_job(found)
    assert load_job(yaml.safe_load(text)) == job
    for name in unfollowed:
        assert re.search(rf"^#   .*{re.escape(name)}: ", text, re.MULTILINE)
    assert all(f"#   {key}: " in text for key in found.assumed)
    assert "  # assumed: " in text or not found.assumed.keys() - {"model.vocab"}


@pytest.mark.parametrize("number", drawn([n for n in NUMBERS if ROWS[n]["program"] != "accelerate"], keep=16))
def test_what_was_imported_can_be_exported_whole(number: int) -> None:
    program, job = ROWS[number]["program"], load_job(import_row(number).job)
    exported = export(job, "megatron-bridge" if program == "nemo" else program)  # which is where NeMo 2 went
    lost = {"plan.partition"} if job.plan.partition == "by-cost" else set()  # an assumption that no program knows
    if program == "megatron":  # a benchmark, whose random tokens are spread evenly
        lost |= {"model.moe.routing", *(f"plan.expert.routing{key}" for key in ("", ".trained", ".documents"))}
    lost |= {"framework.name"} if program == "nemo" else set()
    assert exported.unsaid.keys() <= lost


@pytest.mark.parametrize("number", drawn(NUMBERS, keep=lambda number: number % 24 == 0 or "refused" in ROWS[number]))
def test_a_real_configuration_is_forecast_or_contradicts_itself(number: int) -> None:
    job = load_job(import_row(number).job)
    if "refused" in ROWS[number]:
        with pytest.raises(PlanError, match=ROWS[number]["refused"]):
            simulate(job)
        return
    assert simulate(job).step_time > 0

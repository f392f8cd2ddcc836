"""What commands say of names that hold escape sequences, line ends and markup: one line stays one line."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshcast.experiments.sweeps.output import parts_folder
from tests.fuzz import seeds
from tests.fuzz.readers import invoke, of_measured
from tests.fuzz.seeds import COMPUTE_ONLY, SMALL, TRACE
from tests.payloads import PAYLOADS
from tests.simulator.formats.samples import kernel

KINDS = ("sequences of a terminal", "controls of a terminal", "marks of direction", "invisible", "separators of lines")
EVIL = "".join(PAYLOADS[kind] for kind in KINDS).replace("/", "|") + "\r\nPWNED[red]x[/red]$\\frac{$ "
"""A name that holds every character that a terminal acts upon, a line end, and markup of rich."""

NAMED = "\x1b[31m\u202ea\u2028b\u0085c\r\nPWNED[red]x$\\frac{$"
"""The same, short enough for a part of the name of a file."""

CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What no command prints."""

OF_NODE: dict[str, Any] = {
    "name": EVIL,
    "gpu": "h100-sxm",
    "gpus": {"value": 8, "kind": "assumed", "source": EVIL},
    "scale_up": {"link": "nvlink4"},
    "nics": {"link": "infiniband-ndr", "count": {"value": 8, "kind": "assumed", "source": EVIL}},
}
JOB: dict[str, Any] = {
    **SMALL,
    "id": EVIL,
    "model": {**SMALL["model"], "name": EVIL},
    "cluster": {"node": OF_NODE, "nodes": 2},
    "framework": {"name": "megatron-core", "set": {"sigmas": {EVIL: 0.5}}},
    "published": {"step_time_s": 1.0, "source": EVIL},
    "run": {"steps": 10},
}

COMMANDS = (
    "predict JOB",
    "compare JOB JOB --set plan.tp=4",
    "collectives JOB",
    "run JOB --out OUT-runs.parquet",
    "scale JOB --gpus 8,16",
    "search JOB --set plan.tp=auto",
    "sweep SWEEP --out OUT.parquet --workers 1",
    "plot OUT.parquet --out OUT.svg",
    "plot OUT.parquet --x model.name --y framework.set.sigmas --why 1,1",
    "plot breakdown JOB --out OUT.svg",
    "list schedule ORDER.csv",
    "predict --jobs JOBS --out OUT.jsonl",
    "predict JOB --trace OUT.json --plot OUT.svg",
    "export JOB --to megatron --out SCRIPT.sh",
    "export JOB --to nemo",
    "export JOB --against SCRIPT.sh",
    "import SCRIPT.sh",
    "predict SCRIPT.sh",
    "predict ABSENT",
    "predict JOB --set EVIL=1",
    "predict JOB --EVIL",
    "predict JOB --set model.name=EVIL --set plan.EVIL=EVIL",
    "plot EVIL",
    "EVIL",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a strange name, and strange files in it."""
    folder = tmp_path_factory.mktemp("x") / NAMED
    folder.mkdir()
    (folder / "JOB").write_text(json.dumps(JOB), "utf-8")
    vary = {"model.name": [EVIL, "a"], "framework.set.sigmas": [{EVIL: 0.1}, {"b": 0.2}]}
    (folder / "SWEEP").write_text(json.dumps({"job": "JOB", "vary": vary}), "utf-8")
    (folder / "ORDER.csv").write_text(COMPUTE_ONLY, "utf-8")
    (folder / "JOBS").write_text(json.dumps(JOB) + "\n" + json.dumps({EVIL: EVIL}) + "\n" + EVIL + "\n", "utf-8")
    return folder


def test_no_command_lets_a_name_out_of_its_line(folder: Path) -> None:
    for command in COMMANDS:
        names = (re.sub("[A-Z]{3,}S?(?=$|[.-])", lambda name: f"{folder}/{name[0]}", word) for word in command.split())
        words = [name.replace(f"{folder}/EVIL", EVIL).replace("EVIL", EVIL) for name in names]
        found = invoke(words)
        assert isinstance(found.exception, SystemExit | None), command
        assert CONTROLS.findall(found.output) == [], command
        assert not re.search(r"^[│ ]*PWNED", found.output, re.MULTILINE), command
        assert "PWNED[red]x[/red]" in found.output or command != "predict JOB"
    for drawn in folder.glob("*.svg"):
        ElementTree.parse(drawn)
    events = json.loads((folder / "OUT.json").read_text("utf-8"))
    assert events["traceEvents"] and EVIL not in events


# -------------------------------------------------------------------- Parquet files, traces, files that are resumed


def write_rows(path: Path) -> None:
    """Writes rows of a sweep whose columns, cells and notes hold a name."""
    figures = {"step_time_s": 1.0, "tokens_per_s_per_gpu": 9.0, "peak_device_gib": 8.0}
    words = {"reason": EVIL, "limits": EVIL, "id": EVIL}
    rows = [
        {"index": number, "plan.tp": 2**number, f"plan.{EVIL}": f"{EVIL}{number}", "status": status, **words, **figures}
        for number, status in enumerate(("fits", "does-not-fit", "invalid"))
    ]
    about = {"job": {"model": EVIL, "cluster": {"name": EVIL}}, "points": 3, "certificate": None}
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"meshcast": json.dumps(about), EVIL: EVIL})
    pq.write_table(table, path)


def write_trace(path: Path) -> None:
    """Writes a Kineto trace with a name in every text."""
    trace = copy.deepcopy(TRACE)
    for number, one in enumerate(trace["traceEvents"][1:]):
        one["name"] += EVIL if number % 2 else ""
        one["args"] = {**one.get("args", {}), EVIL: EVIL, "Collective name": EVIL, "Process Group Name": EVIL}
    trace["traceEvents"] += [kernel(f"{EVIL}{number}", 60 + 5 * number, 5, 9 + number) for number in range(4)]
    trace["deviceProperties"][0]["name"] = EVIL
    trace["distributedInfo"] |= {"backend": EVIL, "pg_config": [{"pg_name": EVIL, "pg_desc": EVIL, "ranks": [0, 1]}]}
    path.write_text(json.dumps(trace), "utf-8")


def plant(value: Any) -> Any:
    """Returns data with a name behind each of its texts of several words."""
    if isinstance(value, dict):
        return {key: plant(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plant(inner) for inner in value]
    return value + EVIL if isinstance(value, str) and " " in value else value


def stop_sweep(folder: Path) -> None:
    """Leaves a sweep that was stopped, whose part and note hold a name in every text."""
    assert seeds.stop_sweep(folder)
    parts = parts_folder(folder / "stopped.parquet")
    for path in parts.glob("*.parquet"):
        table = pq.read_table(path)
        for at, name in enumerate(table.column_names):
            if table.column(at).type == pa.string():
                table = table.set_column(at, name, pa.array([EVIL] * len(table)))
        pq.write_table(table.append_column(EVIL, pa.array([EVIL] * len(table))), path)
    note = parts / "_sweep.json"
    note.write_text(json.dumps({**json.loads(note.read_text("utf-8")), EVIL: EVIL}), "utf-8")


OF_FILES = {
    "plot rows.parquet --why 1,1": True,
    "plot rows.parquet --out rows.svg": False,
    "merge rows.parquet rows.parquet --out merged.parquet": False,
    "sweep parts.yaml --out stopped.parquet --workers 1": False,
    "validate trace trace.json --job job.yaml --plot trace.svg": True,
    "import kineto trace.json --job job.yaml --out imported.json": False,
    "validate kernels imported.json": False,
    "validate distributed steps.json --plot steps.svg": True,
    "validate stages stages.json": True,
}
"""Commands, and whether they show a name that the file holds."""


@pytest.mark.filterwarnings("ignore:Glyph")
def test_no_text_of_a_binary_or_resumed_file_leaves_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(seeds.JOB, "utf-8")
    write_rows(tmp_path / "rows.parquet")
    write_trace(tmp_path / "trace.json")
    stop_sweep(tmp_path)
    for pattern, name in (("*-tp2*", "steps"), ("stages-*", "stages")):
        measured = json.loads(of_measured(f"{pattern}.json")(tmp_path)[0])
        (tmp_path / f"{name}.json").write_text(json.dumps(plant(measured)), "utf-8")
    for command, shows in OF_FILES.items():
        found = invoke(command)
        assert isinstance(found.exception, SystemExit | None), command
        assert CONTROLS.findall(found.output) == [], command
        assert not re.search(r"^[│ ]*PWNED", found.output, re.MULTILINE), command
        assert "PWNED" in found.output or not shows, command
    drawn = [ElementTree.parse(file) for file in tmp_path.glob("*.svg")]
    assert len(drawn) == 3


def test_a_pipe_in_place_of_a_part_and_lists_in_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seeds.stop_sweep(tmp_path)
    for part in parts_folder(tmp_path / "stopped.parquet").glob("0*.parquet"):
        part.unlink()
        os.mkfifo(part)
    assert invoke("sweep parts.yaml --out stopped.parquet --workers 1").exit_code == 0
    rows = pq.read_table("stopped.parquet")
    nested = pa.array([[number] for number in range(len(rows))])
    pq.write_table(rows.append_column("plan.nested", nested), "nested.parquet")
    found = invoke("plot nested.parquet --x plan.nested --y plan.tp --out a.png")
    assert found.exit_code == 2 and "no place on an axis" in found.output

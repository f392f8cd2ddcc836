"""What commands say of names that hold escape sequences, line ends and markup: one line stays one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.fuzz.readers import invoke
from tests.fuzz.seeds import COMPUTE_ONLY, SMALL
from tests.payloads import PAYLOADS

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

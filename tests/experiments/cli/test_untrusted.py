"""Names and folders of strangers: terminal escapes, links, modules in the working directory, numbers JSON lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from meshcast.experiments.cli.console import to_json
from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.render.terminal.safe_console import Lines
from meshcast.hardware.errors import CONTROLS, PlanError, escape_controls
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.validation.distributed.launch import environment
from tests.draws import drawn
from tests.experiments.cli.samples import JOB, ROOT, run
from tests.experiments.cli.test_mistakes import refusal

RED = "\x1b[31m"


# ------------------------------------------------------------------------------------------- escapes


def test_control_characters_are_escaped() -> None:
    assert escape_controls("a\x1b]0;b\x07\n\x9b1m\u202e é 中 🙂") == "a\\x1b]0;b\\x07\n\\x9b1m\\u202e é 中 🙂"
    controls = re.compile(CONTROLS)
    assert not any(map(str.isprintable, filter(controls.match, map(chr, range(sys.maxunicode)))))
    assert str(PlanError("a\u2028b", "bad", "Correct it")) == "a\\u2028b: bad. Correct it"
    assert len(str(PlanError("k" * 5000, "bad", "Correct it"))) < 500
    assert str(PlanError(f"{RED}a\nb", "bad", "Correct it")) == "\\x1b[31ma\\nb: bad. Correct it"
    assert render(Text(f"one {RED}red\ntwo", style="red")) == "one \\x1b[31mred\\ntwo\n"
    assert render(Lines(f"one {RED}red\ntwo", "three")) == "one \\x1b[31mred\\ntwo\nthree\n"


def test_no_name_in_a_file_reaches_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    named = '{preset: llama3-8b, name: "a\\x1b[31mb"}'
    path.write_text(JOB.replace("llama3-8b", named), "utf-8")
    found = run("predict", path)
    assert found.exit_code == 0 and "a\\x1b[31mb" in found.stdout and "\x1b" not in found.output
    path.write_text(JOB.replace("tp: 4", '"t\\x1b[31mp": 4'), "utf-8")
    assert "plan.t\\x1b[31mp: no such key" in refusal("predict", path)


def test_no_name_begins_a_line_of_a_file_that_is_written(tmp_path: Path) -> None:
    """The name of a cluster file, of a launch file, or a value in it could otherwise be a command of a script."""
    (tmp_path / "c\ntouch PWNED\n#.yaml").write_text("{gpu: h100-sxm, gpus: 8}", "utf-8")
    model = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
    cluster = "c\ntouch PWNED\n#.yaml"
    job = {"model": model, "cluster": cluster, "batch": {"global": 16, "micro": 1}, "plan": {"tp": 2}}
    (tmp_path / "job.json").write_text(json.dumps(job), "utf-8")
    for program in EXPORTS:
        found = run("export", tmp_path / "job.json", "--to", program)
        assert found.exit_code == 0 and "touch PWNED" in found.stdout and "\ntouch" not in found.stdout
    script = tmp_path / f"{RED}\ntouch PWNED\n.sh"
    flags = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --seq-length 4096 --bf16"
    script.write_text(f"torchrun pretrain_gpt.py {flags} --unheard $'{RED}a\ntouch PWNED'\n", "utf-8")
    for words in (("import",), ("predict",)):
        found = run(*words, script, "--set", "model=llama3-8b", "--assume-defaults")
        assert found.exit_code == 0 and "touch PWNED" in found.output
        assert "\ntouch" not in found.output and "\x1b" not in found.output
    path = tmp_path / "named.yaml"
    path.write_text(JOB.replace("llama3-8b", '{preset: llama3-8b, name: "a\\x1b[31m\\nb"}'), "utf-8")
    assert "a\\x1b[31m\\nb" in run("collectives", path).stdout


# ------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--jobs", "jobs.jsonl", "--out", "LINK.jsonl"),
        ("predict", "job.yaml", "--trace", "LINK.json"),
        ("predict", "job.yaml", "--plot", "LINK.png"),
        ("sweep", "sweep.yaml", "--out", "LINK.parquet"),
        ("export", "schedule", "1f1b", "--p", "2", "--m", "2", "--out", "LINK.csv"),
        ("init", "LINK.yaml", "--force"),
    ],
)
@pytest.mark.parametrize("exists", drawn([True, False], keep=2))
def test_outputs_follow_no_links(
    tmp_path: Path, words: tuple[str, ...], exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    (tmp_path / "jobs.jsonl").write_text("{}\n", "utf-8")
    (tmp_path / "sweep.yaml").write_text("job: job.yaml\nvary: {plan.tp: [4]}\n", "utf-8")
    target, name = tmp_path / "target", next(word for word in words if word.startswith("LINK"))
    if exists:
        target.write_text("mine", "utf-8")
    (tmp_path / name).symlink_to("target")
    line = refusal(*words)
    assert name in line and "is a symbolic link to target" in line
    assert (target.read_text("utf-8") == "mine") if exists else not target.exists()


def test_an_output_is_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.csv")
    words = ("export", "schedule", "1f1b", "--p", "2", "--m", "2", "--out", tmp_path / "out.csv")
    assert "it is a pipe or a device" in refusal(*words)


# ---------------------------------------------------------------------------------------------- JSON


def test_numbers_that_json_lacks_are_null_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"a": [1.0, float("nan")], "b": {"c": float("-inf"), "d": "NaN"}, "e": (float("inf"),) * 2}
    assert json.loads(to_json(answer)) == {"a": [1.0, None], "b": {"c": None, "d": "NaN"}, "e": [None, None]}
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("meshcast: a[1] is nan, b.c is -inf, e[0] is inf and 1 more: no")
    assert to_json({"a": 1.5}, indent=2) == '{\n  "a": 1.5\n}' and capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------- imports

MODULES = ("yaml", "numpy", "torch", "pydantic", "typer", "rich", "typing", "pathlib", "json", "re", "random", "gc")


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder with modules that end the process."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"import os; os.write(2, b'{name} was imported'); os._exit(9)", "utf-8")
    return tmp_path


@pytest.mark.parametrize("module", drawn(["meshcast", "meshcast.experiments.cli"], keep=2))
def test_modules_in_the_working_directory_are_not_imported(traps: Path, module: str) -> None:
    command = [sys.executable, "-m", module, "list", "gpus"]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=traps, env=path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "h100-sxm" in found.stdout


@pytest.mark.parametrize("binary", drawn([False, True], keep=1))
def test_settings_of_plots_in_the_working_directory_are_text(tmp_path: Path, binary: bool) -> None:
    settings = tmp_path / "matplotlibrc"
    _ = settings.write_bytes(b"\xff\xfe\x00") if binary else os.mkfifo(settings)
    command = [sys.executable, "-m", "meshcast", "list", "gpus"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and ended.stderr.startswith("meshcast: matplotlibrc: it is "), ended.stderr


@pytest.mark.parametrize("path", drawn(["", os.pathsep, f"{os.pathsep}/absent"], keep=3))
def test_processes_that_measure_do_not_import_from_the_working_directory(
    traps: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    command = [sys.executable, "-m", "meshcast.validation.calibration.write"]
    found = subprocess.run(command, cwd=traps, env=environment("cpu"), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr

"""The pages on adding a GPU, a model, a scheme, a key of a plan and a program: their diffs, applied to a copy of the
project, pass its tests.

Nothing but the files of the diffs, and what `make docs-pages` and `make golden` write, differs in the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("meshcast", "hardware", "simulator", "validation", "experiments", "tools", "tests", "docs", "examples")
PAGES = ("add-a-gpu.md", "add-a-model.md", "add-a-plan-key.md", "add-a-program.md", "add-a-scheme.md")
DIFF = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n((?:[+ @].*\n|\+\n)*)", re.MULTILINE)
"""The old path, the new path and the lines of one file; lines begin with `+`, and with a space for context."""


def diffs(page: str) -> list[tuple[str, str, list[str]]]:
    """(old path, new path, lines) of every file in the diffs of a page."""
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert all("".join(f"--- {a}\n+++ b/{b}\n{lines}" for a, b, lines in DIFF.findall(text)) == text for text in blocks)
    return [(a, b, lines.splitlines()) for text in blocks for a, b, lines in DIFF.findall(text)]


def added(lines: Sequence[str]) -> str:
    return "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))


def apply(old: str, new: str, lines: Sequence[str], folder: Path) -> None:
    """Writes a new file, or adds lines to an old one behind the context that stands before them."""
    file = folder / new
    if old == "/dev/null":
        file.write_text(added(lines), "utf-8")
        return
    assert old == f"a/{new}"
    context, text = "".join(f"{line[1:]}\n" for line in lines if line.startswith(" ")), file.read_text("utf-8")
    assert text.count(f"\n{context}") == 1, context
    file.write_text(text.replace(f"\n{context}", f"\n{context}{added(lines)}"), "utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project."""
    # A compiled file has a further suffix while another process writes it.
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy2(ROOT / name, tmp_path)
    return tmp_path


def run(project: Path, code: str, keyword: str, *files: str) -> str:
    """Runs Python code in the copy, and then the tests of some files that have a keyword; returns their output."""
    words = ["-q", "-p", "no:cacheprovider", "-k", keyword, *files]
    code = f"{code}\nimport sys, pytest\nsys.exit(pytest.main({words!r}))"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env = {**kept, "PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def passed(output: str) -> int:
    """How many tests passed."""
    return int(re.findall(r"^(\d+) passed", output, re.MULTILINE)[-1])


def changed(project: Path) -> set[str]:
    """The files of the copy that the project does not have, or has with another text."""
    files = (file for name in COPIED for file in (project / name).rglob("*") if file.is_file())
    names = {file.relative_to(project).as_posix() for file in files if "__pycache__" not in file.parts}
    return {name for name in names if not same(ROOT / name, project / name)}


def same(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_a_gpu_is_one_file(project: Path) -> None:
    (diff,) = diffs("add-a-gpu.md")
    apply(*diff, project)
    gpu = Path(diff[1]).stem
    job = {"model": "gpt2", "cluster": {"gpu": gpu, "gpus": 8, "gpus_per_node": 8}}
    code = f"""
from pathlib import Path
from tools.pages.catalog import page
from meshcast.simulator import simulate
Path("docs/catalog.md").write_text(page(), "utf-8")
print(*simulate({job!r}).to_dict()["assumed"], sep="\\n")
"""
    tests = (
        "tests/hardware/test_catalog.py",
        "tests/tools/pages/test_catalog_page.py",
        "tests/simulator/costs/test_kernels.py",
    )
    output = run(project, code, f"test_catalog or test_catalog_page or {gpu}", *tests)
    assert passed(output) > 250
    (borrowed,) = re.findall(r"```text\nassumed +(.*)\n```", (ROOT / "docs" / "add-a-gpu.md").read_text("utf-8"))
    assert borrowed in output.splitlines()
    assert changed(project) <= {diff[1], "docs/catalog.md"}


def test_a_preset_is_one_file_and_its_parameter_count(project: Path) -> None:
    preset, count = diffs("add-a-model.md")
    apply(*preset, project)
    apply(*count, project)
    # Tests go through all presets, and one through the exact counts, in which the line stands.
    name = Path(preset[1]).stem
    assert f"{name}: " in added(count[2])
    assert passed(run(project, "", f"{name} or preset", "tests/simulator/models/test_load.py")) > 2
    assert changed(project) <= {preset[1], count[1]}


@pytest.mark.slow
def test_a_scheme_is_one_file_and_one_golden_job(project: Path) -> None:
    scheme, golden = diffs("add-a-scheme.md")[:2]
    apply(*scheme, project)
    apply(*golden, project)
    use, job = Path(scheme[1]).stem.replace("_", "-"), Path(golden[1]).stem
    code = f"""
from pathlib import Path
from tools.pages.schemes import page
from tests.golden.rewrite import reports, stored, summary, write
((_, report),) = reports([{job!r}])
write({job!r}, summary(report, stored({job!r}).whole))
Path("docs/schemes.md").write_text(page(), "utf-8")
"""
    tests = "tests/contract", "tests/golden", "tests/tools/pages/test_schemes_page.py"
    output = run(project, code, f"{use} or test_every_scheme_occurs or page_of_the_schemes", *tests)
    assert passed(output) > 20
    assert (project / golden[1]).read_text("utf-8").startswith(added(golden[2]) + "forecast:\n")
    assert changed(project) <= {scheme[1], golden[1], "docs/schemes.md"}


@pytest.mark.slow
def test_a_plan_key_is_one_entry_of_the_table(project: Path) -> None:
    (diff,) = diffs("add-a-plan-key.md")
    apply(*diff, project)
    (key,) = re.findall(r"^    (\w+): Annotated", added(diff[2]), re.MULTILINE)
    job = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:1"}
    job |= {"batch": {"global": 16, "micro": 1, "sequence": 2048}, "plan": {"fsdp": True, "tp": 2}}
    code = f"""
from pathlib import Path
import meshcast
from meshcast.experiments.schema import schema
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.simulator.formats.launch.keys import compose_plan, flatten_plan
from tools.pages.plan_keys import write_table

page = Path("docs/job.md")
page.write_text(write_table(page.read_text("utf-8")), "utf-8")
assert "| `{key}` | true | of `fsdp`: false gathers" in page.read_text("utf-8")
assert "of `fsdp`" in schema("job")["$defs"]["ShortPlan"]["properties"]["{key}"]["description"]

job = {job!r}
seconds = {{}}
for value in True, False:
    made = meshcast.load_job(job | {{"plan": job["plan"] | {{"{key}": value}}}})
    (entry,) = [entry for entry in made.plan.schemes if entry.use == "data/fsdp"]
    assert entry.model_extra == {{"{key}": value}}
    assert read_short_form(made, frozenset(["plan.{key}"])).by_field()["plan.{key}"] is value
    short = compose_plan(flatten_plan(made.plan), made.model, 8, 8)
    assert short.get("{key}", True) is value and "mesh" not in short
    seconds[value] = meshcast.simulate(made).step_time
assert seconds[True] < seconds[False]

found = meshcast.search(job | {{"plan": job["plan"] | {{"{key}": "auto"}}}}, top=2)
assert {{plan.changes["plan.{key}"]: plan.report.step_time for plan in found.best}} == seconds
"""
    tests = "tests/test_architecture.py", "tests/tools/pages/test_plan_keys_page.py", "tests/experiments/test_schema.py"
    assert passed(run(project, code, "key_of_a_plan or plan_keys or examples_are_accepted", *tests)) > 10
    assert changed(project) <= {diff[1], "docs/job.md"}


@pytest.mark.slow
def test_a_program_is_one_module_and_a_line_of_the_registry(project: Path) -> None:
    found = diffs("add-a-program.md")
    for diff in found:
        apply(*diff, project)
    refused = ("simulator/formats/launch/programs/refused.py", "tools/inputs/corpus/refused.yaml")
    for name, pattern in zip(refused, (r' +RefusedProgram\(\n? *"picotron".*?\),\n', PICOTRON), strict=True):
        text, count = re.subn(pattern, "", (project / name).read_text("utf-8"), flags=re.DOTALL)
        assert count == 1
        (project / name).write_text(text, "utf-8")
    tests = "tests/tools/inputs", "tests/experiments/cli/test_launch.py", "tests/test_architecture.py"
    words = "picotron or names_every_program or every_entry_of_the_corpus or sentence or docstring"
    assert passed(run(project, "", words, *tests)) > 2
    assert changed(project) <= {*(new for _, new, _ in found), *refused}


PICOTRON = r"- repository: huggingface/picotron\n.*?(?=\n- |\Z)"
"""The entry of picotron in the corpus of programs that are refused."""


def test_the_schedule_of_the_recipe_is_its_file() -> None:
    schedule, golden = diffs("add-a-scheme.md")[2:]
    assert (ROOT / schedule[1]).read_text("utf-8").endswith(added(schedule[2]))
    assert (ROOT / golden[1]).read_text("utf-8").startswith(added(golden[2]) + "forecast:\n")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_link_of_a_page_exists(page: str) -> None:
    text = re.sub(r"^```diff\n.*?^```", "", (ROOT / "docs" / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"(?:tests|simulator|hardware)/[\w/.-]+(?![\w/<*])", text):
        assert (ROOT / path.rstrip("./")).exists(), path

"""What is built and installed: its files, its metadata, its commands, and shell completion."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from meshcast.experiments.planning.cores.ilp import load_solver
from meshcast.hardware.documents.optional_package import import_optional
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.version import describe_version, find_commit, product_version
from tests.draws import drawn
from tests.experiments.cli.samples import run
from tests.pythons import ROOMS, ROOT, build_distributions, try_python
from tests.test_typed import EXPECTED, check_scripts


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    return build_distributions(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment with the wheel alone; other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(place)
    others = [path for path in sys.path if path.endswith("-packages")]
    # Editable installations are put on the path by files that are read in these folders only, not from a .pth.
    (place / "others.pth").write_text("".join(f"{path}\n" for path in others), "utf-8")
    yield python


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


# --------------------------------------------------------------------------------------------- files


def test_the_wheel_has_every_file_of_the_packages(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ignored = {".pyc"}
    folders = {"meshcast": ROOT / "meshcast"} | {f"meshcast/{room}": ROOT / room for room in ROOMS}
    tree = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in ignored and "__pycache__" not in path.parts
    }
    assert tree - names == set()
    assert names - tree <= {"meshcast/commit.txt"}
    assert "meshcast/py.typed" in names


def test_the_wheel_installs_one_package(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (top,) = [name for name in wheel.namelist() if name.endswith(".dist-info/top_level.txt")]
        assert wheel.read(top).decode().split() == ["meshcast"]
        assert {name.partition("/")[0] for name in wheel.namelist()} == {"meshcast", top.partition("/")[0]}


def test_the_source_distribution_builds_the_same(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "meshcast/__main__.py"} <= names
    assert ("meshcast/commit.txt" in names) == bool(find_commit())


def test_the_metadata(built: tuple[Path, Path]) -> None:
    about = metadata_of(built[1])
    assert (about["Name"], about["Version"]) == ("meshcast", product_version())
    assert about["License-Expression"] == "Apache-2.0" and about["License-File"] == "LICENSE"
    assert about["Requires-Python"] == ">=3.11" and about["Description-Content-Type"] == "text/markdown"
    needed = {line.split(">")[0].split(";")[0].strip(): line for line in about.get_all("Requires-Dist", [])}
    base = {name for name, line in needed.items() if "extra ==" not in line}
    assert base == {
        "simpy",
        "numpy",
        "pydantic",
        "pandas",
        "matplotlib",
        "pyarrow",
        "pyyaml",
        "tree-sitter",
        "tree-sitter-bash",
        "typer",
    }
    assert {"torch", "search", "cluster", "solvers", "dev"} <= set(about.get_all("Provides-Extra", []))
    classifiers = about.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers and not any(one.startswith("License ::") for one in classifiers)


# ----------------------------------------------------------------------------------------- the program


def ask(python: Path, code: list[str], where: Path, **environment: str) -> str:
    done = subprocess.run(
        [python, *code], cwd=where, env={**os.environ, "PYTHONPATH": "", **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_command_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    for room in ROOMS:  # of a research repository
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('foreign package')", "utf-8")
    commit = find_commit()
    said = ask(installed, ["-m", "meshcast", "--version"], tmp_path)
    assert said.startswith(f"meshcast {product_version()}")
    assert commit[:12] in said  # of the build, not of a checkout around the environment
    job = "model: gpt2-124m\ncluster: dgx-h100:1\nplan: {tp: 2}\n"
    (tmp_path / "job.yaml").write_text(job, "utf-8")
    used = "import meshcast; print(meshcast.simulate('job.yaml').fits, meshcast.simulator.__file__)"
    fits, where = ask(installed, ["-c", used], tmp_path).split()
    assert fits == "True" and where.startswith(str(installed.parent.parent))
    answer = ask(installed, ["-m", "meshcast", "predict", "job.yaml", "--json"], tmp_path)
    assert answer == run("predict", tmp_path / "job.yaml", "--json").stdout


def test_a_build_knows_the_commit_of_its_checkout() -> None:
    code = "import setuptools, runpy; setuptools.setup = lambda **_: None; "
    code += "print(runpy.run_path('setup.py')['find_commit']())"
    assert ask(Path(sys.executable), ["-c", code], ROOT).strip() == find_commit()


def test_the_version_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("--version").stdout
    assert shown == f"meshcast {describe_version()}\n"
    monkeypatch.setenv("MESHCAST_COMMIT", "of the environment")
    find = find_commit.__wrapped__
    assert find(tmp_path) == "of the environment"
    (tmp_path / "meshcast").mkdir()
    (tmp_path / "meshcast" / "commit.txt").write_text("0123456789abcdef-dirty\n", "utf-8")
    assert find(tmp_path) == "0123456789abcdef-dirty"
    (tmp_path / ".git").mkdir()  # a checkout that git cannot read
    assert find(tmp_path) == "of the environment"


# ----------------------------------------------------------------------------------------- completion


COMMAND = "import sys; sys.argv[0] = 'meshcast'; from meshcast.__main__ import main; main()"


@pytest.mark.parametrize(
    ("shell", "words", "wanted"),
    drawn(
        [
            ("bash", "meshcast s", {"sweep", "scale", "schema", "search"}),
            ("zsh", "meshcast s", {"sweep", "scale", "schema", "search"}),
            ("fish", "meshcast s", {"sweep", "scale", "schema", "search"}),
            ("bash", "meshcast list s", {"schemes", "schedule"}),
            ("bash", "meshcast predict --tr", {"--trace"}),
        ],
        keep=lambda case: case[:2] == ("fish", "meshcast s"),  # bash is run below
    ),
)
def test_shells_complete_words(shell: str, words: str, wanted: set[str]) -> None:
    environment = {"_MESHCAST_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": words.split()[-1]}
    shown = ask(Path(sys.executable), ["-c", COMMAND], ROOT, PYTHONPATH=str(ROOT), **environment)
    assert all(word in shown for word in wanted) and "predict" not in shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_completion_of_bash_runs(tmp_path: Path) -> None:
    program = tmp_path / "meshcast"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -c "{COMMAND}" "$@"\n', "utf-8")
    program.chmod(0o755)
    script = (
        'eval "$(_MESHCAST_COMPLETE=source_bash meshcast)"; COMP_WORDS=(meshcast comp); COMP_CWORD=1; '
        '_meshcast_completion meshcast; echo "${COMPREPLY[@]}"; complete -p meshcast'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "compare"


@pytest.mark.parametrize("command", ["", "predict", "sweep", "list", "validate", "import", "export", "collectives"])
def test_help_has_no_braces(command: str) -> None:
    shown = run(*([command] if command else []), "--help")
    assert shown.exit_code == 0 and not {"{", "}"} & set(shown.stdout) and "[[" not in shown.stdout


# ----------------------------------------------------------------------------------------- without extras


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(PlanError, match=r"it needs scipy, which is not installed. pip install 'meshcast\[solvers\]'"):
        load_solver()
    monkeypatch.setitem(sys.modules, "of_meshcast", None)
    with pytest.raises(PlanError, match="this command: it needs of_meshcast"):
        import_optional("of_meshcast", "solvers", "this command")


def test_only_planners_and_calibrations_import_scipy() -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for room in ("meshcast", *ROOMS)
        for path in (ROOT / room).rglob("*.py")
        if '"scipy.' in path.read_text("utf-8")
    ]
    learn = ["validation/calibration/fit.py", "validation/learning/posterior.py", "validation/learning/step_prior.py"]
    assert sorted(users) == ["experiments/planning/cores/ilp.py", *learn]


# ------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_mypy_checks_scripts_beside_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert check_scripts(tmp_path, f"--python-executable={installed}") == EXPECTED


@pytest.mark.slow
@pytest.mark.network
def test_the_tutorial_in_an_empty_environment(built: tuple[Path, Path]) -> None:
    assert any("tutorial done" in text for text in try_python(sys.executable, built[1]))

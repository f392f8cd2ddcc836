"""Installs meshcast's wheel into an empty environment of every Python that is named, and does the tutorial there:
``python -m tests.pythons python3.12 python3.13`` (``make test-pythons``).

The wheel is built from a source distribution, as a package index would get it. The tutorial runs in a folder outside
the checkout. Pythons that are not found are named and left out; the exit code is 1 if one failed or none was found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshcast.simulator.report.version import find_commit
from tests.excerpts import follow_page, split_command

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("hardware", "simulator", "validation", "experiments")
"""Folders of the checkout that `meshcast/` links to as its packages."""

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")


def run(command: Sequence[str | Path], where: Path, wanted: int = 0) -> str:
    """The output of a command in a folder, without the packages of this environment."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=where, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == wanted, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """Builds the source distribution, and the wheel from it, of a copy of this checkout. Returns both files."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("meshcast", *ROOMS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if commit := find_commit():
        (copy / "meshcast" / "commit.txt").write_text(commit, "utf-8")
    source = folder / _build("sdist", folder, copy)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source")  # made here, and there are Pythons 3.11 without filters
    (tree,) = (folder / "source").iterdir()
    return source, folder / _build("wheel", folder, tree)


def _build(kind: str, folder: Path, tree: Path) -> str:
    """Builds a distribution of a tree into a folder; returns the name of its file."""
    code = f"import setuptools.build_meta as b; print('made', b.build_{kind}({str(folder)!r}))"
    return run([sys.executable, "-c", code], tree).partition("\nmade ")[2].split()[0]


def make_environment(python: str, folder: Path) -> Path:
    """Makes an empty environment; returns its folder of programs."""
    run([python, "-m", "venv", folder], ROOT)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def do_tutorial(programs: Path, where: Path) -> None:
    """Does the tutorial with the installed command, in an empty folder."""

    def run_command(line: str) -> str:
        arguments, wanted = split_command(line)
        return run([programs / "meshcast", *arguments], where, wanted)

    where.mkdir()
    before = Path.cwd()
    os.chdir(where)
    try:
        follow_page(TUTORIAL, run_command, lambda text: run([programs / "python", "-c", text], where))
    finally:
        os.chdir(before)


def count_megabytes(folder: Path) -> float:
    """Size of a folder on the disk, as ``du`` counts [MB of 2^20 bytes]."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 2**20


def try_python(python: str, wheel: Path) -> Iterator[str]:
    """Installs a wheel into an empty environment of one Python, and does the tutorial; yields what was measured.

    Raises AssertionError if something fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        programs = make_environment(python, Path(folder) / "environment")
        empty = count_megabytes(Path(folder))
        begin = time.perf_counter()
        run(
            [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], Path(folder)
        )
        size = count_megabytes(Path(folder))
        yield f"installed in {time.perf_counter() - begin:.0f} s: {size:.0f} MB, of which Python and pip {empty:.0f}"
        begin = time.perf_counter()
        do_tutorial(programs, Path(folder) / "work")
        said = run([programs / "meshcast", "--version"], Path(folder)).strip()
        yield f"tutorial done in {time.perf_counter() - begin:.0f} s by {said}"


def find_version(python: str) -> str:
    """The version of a Python; empty if it is not there."""
    if shutil.which(python) is None:
        return ""
    code = "import sys, venv, ensurepip; print(sys.version.split()[0])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main(pythons: Sequence[str]) -> int:
    """Tries every Python; returns the exit code."""
    tried, failed = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        _, wheel = build_distributions(Path(folder))
        for python in pythons:
            name = find_version(python)
            if not name:
                print(f"{python}: not found, left out", flush=True)
                continue
            tried += 1
            try:
                for text in try_python(python, wheel):
                    print(f"Python {name}: {text}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"Python {name}: FAILED\n{error}", flush=True)
    return int(failed > 0 or not tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

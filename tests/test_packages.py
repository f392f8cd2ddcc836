"""The public package, and folders of the user that hide meshcast's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshcast
from meshcast.packages import PACKAGES, check_packages

ROOT = Path(__file__).resolve().parents[1]


def run(code: list[str], where: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a directory. path: folders that imports search first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *code], cwd=where, env=environment, capture_output=True, text=True)


def test_every_public_name_is_there() -> None:
    assert all(getattr(meshcast, name) is not None for name in meshcast.__all__)
    assert {*meshcast.__all__} <= {*dir(meshcast)}
    report = meshcast.simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
    assert isinstance(report, meshcast.Report) and report.fits
    assert meshcast.__version__
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        meshcast.simulat  # noqa: B018


def test_the_packages_say_that_they_are_typed() -> None:
    assert all((ROOT / name / "py.typed").exists() for name in ("meshcast", *PACKAGES))


def test_python_m_meshcast_is_the_command(tmp_path: Path) -> None:
    shown = run(["-m", "meshcast", "--version"], tmp_path, ROOT)
    assert shown.returncode == 0 and shown.stdout.startswith("meshcast ")


INTERRUPTED_IMPORT = """\
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets tests in its background ignore it

class Interrupting:
    def find_spec(self, name, *_):
        if name == {name!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                {reaction}

sys.meta_path.insert(0, Interrupting())
sys.argv = ["meshcast", "list", "gpus"]
runpy.run_module("meshcast", run_name="__main__")
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal of POSIX")
@pytest.mark.parametrize("name", ["experiments.cli.app", "typer", "hardware.load"])
@pytest.mark.parametrize("reaction", ["raise", "raise ValueError('a model cannot be built') from None"])
def test_ctrl_c_during_imports_is_no_traceback(name: str, reaction: str, tmp_path: Path) -> None:
    script = INTERRUPTED_IMPORT.format(name=name, reaction=reaction)
    stopped = run(["-c", script], tmp_path, ROOT)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_of_the_user_that_hides_ours_is_named(name: str, tmp_path: Path) -> None:
    own = tmp_path / name
    own.mkdir()
    (own / "__init__.py").write_text("")
    said = f"{own} hides meshcast's package '{name}', which is in {ROOT}. Start Python in another directory"
    command = run(["-m", "meshcast", "--version"], tmp_path, tmp_path, ROOT)
    assert command.returncode == 2 and said in command.stderr and "Traceback" not in command.stderr
    used = run(["-c", "import meshcast; meshcast.simulate"], tmp_path, tmp_path, ROOT)
    assert f"ImportError: {said}" in used.stderr


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    shown = run(["-m", "meshcast", "--version"], tmp_path, tmp_path, ROOT)
    assert shown.returncode == 0, shown.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    check_packages()
    with pytest.raises(ImportError, match="hides meshcast's package 'hardware'"):
        check_packages(tmp_path)

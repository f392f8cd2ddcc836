"""The public package, beside folders of the user that are called as those of meshcast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshcast
from tests.pythons import ROOMS

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
@pytest.mark.parametrize("name", ["meshcast.experiments.cli.start", "yaml", "meshcast.hardware.load"])
@pytest.mark.parametrize("reaction", ["raise", "raise ValueError('a model cannot be built') from None"])
def test_ctrl_c_during_imports_is_no_traceback(name: str, reaction: str, tmp_path: Path) -> None:
    script = INTERRUPTED_IMPORT.format(name=name, reaction=reaction)
    stopped = run(["-c", script], tmp_path, ROOT)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")


def test_packages_of_the_user_are_not_ours(tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('foreign package')")
    used = f"import meshcast; meshcast.simulate; import {', '.join(f'meshcast.{room}' for room in ROOMS)}"
    for code, printed in ((["-m", "meshcast", "--version"], "meshcast "), (["-c", used], "")):
        done = run(code, tmp_path, tmp_path, ROOT)
        assert (done.returncode, done.stdout[:9]) == (0, printed), done.stderr


def test_no_package_is_imported_by_the_name_of_its_folder() -> None:
    code = "import sys, meshcast.experiments.cli.app as app, meshcast.experiments.search.search_job as find; "
    code += f"print([name for name in {ROOMS} if name in sys.modules])"
    assert run(["-c", code], ROOT, ROOT).stdout == "[]\n"

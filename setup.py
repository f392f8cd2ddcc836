"""Checks that the packages are linked into ``meshcast/``, and writes the commit of the source into what is built,
``meshcast/commit.txt``; everything else is in pyproject.toml."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SOURCE = Path(__file__).resolve().parent
PLACE = Path("meshcast") / "commit.txt"


def check_links() -> None:
    """Ends the build if the packages beside ``meshcast/`` are not linked into it, as where git makes no links."""
    missing = [
        room
        for room in ("hardware", "simulator", "validation", "experiments")
        if not (SOURCE / "meshcast" / room).is_dir()
    ]
    if missing:
        rule = f"meshcast/{missing[0]} is not a link to the folder {missing[0]}/"
        raise SystemExit(f"{rule}. Check out again: git config core.symlinks true, then git checkout -- meshcast")


def find_commit() -> str:
    """The commit of this checkout, or that which this source distribution was made of, or ""."""
    if not (SOURCE / ".git").exists():
        built = SOURCE / PLACE
        return built.read_text("utf-8").strip() if built.is_file() else ""
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_commit(folder: Path) -> None:
    """Writes the commit, if it is known, below `folder`."""
    if commit := find_commit():
        (folder / PLACE).parent.mkdir(parents=True, exist_ok=True)
        (folder / PLACE).write_text(f"{commit}\n", "utf-8")


class BuildWithCommit(build_py):
    """Builds the packages of a wheel; an editable installation asks git whenever it is asked."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class SourceWithCommit(sdist):
    """Makes a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


check_links()
setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit})

"""Files that ship are read as any YAML file, whatever was kept of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshcast.hardware.documents import shipped
from meshcast.hardware.documents.document import read_yaml
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import CatalogError

TEXT = "rate: 900 GB/s\nsizes: [1, 2.5, 1e3, .inf]\nnested: {deep: {on: true, none: null}}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = tmp_path / "gpu-1.5.yaml"
    path.write_text(TEXT, "utf-8")
    return path


def find_kept(file: Path) -> list[Path]:
    return list((file.parent / "__pycache__").glob("*"))


def test_what_was_parsed_is_kept_and_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = read_shipped(file)
    monkeypatch.setattr(shipped, "read_yaml", None)
    assert read_shipped(file) == parsed == read_yaml(file) and len(find_kept(file)) == 1
    assert read_shipped(file, "elsewhere").where == "elsewhere"
    parsed.data["rate"] = "changed by a caller"
    assert read_shipped(file).data["rate"] == "900 GB/s"


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "text": lambda file, _: file.write_text("rate: 1 GB/s\n", "utf-8"),
    "reader": lambda _, patch: patch.setattr(shipped, "_identify_reader", lambda: -1),
    "damaged": lambda file, _: find_kept(file)[0].write_bytes(b"\xff\x00"),
    "cut": lambda file, _: find_kept(file)[0].write_bytes(find_kept(file)[0].read_bytes()[:40]),
    "empty": lambda file, _: find_kept(file)[0].write_bytes(b""),
    "another": lambda file, _: find_kept(file)[0].write_bytes(b"i\x01\x00\x00\x00"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_kept_counts_for_its_text_and_reader_alone(
    change: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_shipped(file)
    CHANGES[change](file, monkeypatch)
    before = find_kept(file)[0].read_bytes()
    assert read_shipped(file) == read_yaml(file)
    assert find_kept(file)[0].read_bytes() != before


def test_nothing_is_kept_where_python_keeps_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert read_shipped(file) == read_yaml(file) and not find_kept(file)


def test_a_folder_that_takes_no_files_is_read(file: Path) -> None:
    (file.parent / "__pycache__").write_text("a file", "utf-8")
    assert read_shipped(file) == read_yaml(file)


def test_a_file_that_is_missing_or_wrong_is_an_error_with_its_place(file: Path) -> None:
    with pytest.raises(CatalogError, match="no such file"):
        read_shipped(file.with_name("other.yaml"))
    file.write_text("a: 1\na: 2\n", "utf-8")
    with pytest.raises(CatalogError, match=r"gpus/x\.yaml:2.*given twice"):
        read_shipped(file, "gpus/x.yaml")

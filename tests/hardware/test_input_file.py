"""Input files of any kind: limits, pipes, devices, gzip, and what JSON is accepted."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from meshcast.hardware.documents.input_file import (
    DATA,
    DESCRIPTION,
    SizeLimit,
    Unreadable,
    parse_csv,
    parse_json,
    parse_toml,
    read_bytes,
    read_text,
)
from meshcast.hardware.errors import PlanError

SMALL = SizeLimit(1000, 10, "Split it")


def test_content_is_that_of_the_file_plain_or_packed(tmp_path: Path) -> None:
    path, content = tmp_path / "a", bytes(range(256)) * 10_000
    for packed in (
        content,
        gzip.compress(content),
        gzip.compress(content[:7]) + gzip.compress(content[7:]) + b"\0" * 9,
    ):
        path.write_bytes(packed)
        assert read_bytes(path, DATA._replace(lines=10**6)) == content


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_limits_are_of_the_content(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "a"
    for content, rule in (
        (b"x" * 1000, ""),
        (b"x" * 1001, "1,00[01]"),
        (b"\n" * 10, ""),
        (b"\n" * 11, "11 lines, at most 10 are read"),
        (b"\r" * 11, "11 lines, at most 10 are read"),
    ):
        path.write_bytes(pack(content))  # type: ignore[operator]
        if not rule:
            assert read_text(path, SMALL) == content.decode()
            continue
        with pytest.raises(Unreadable, match=rule) as refused:
            read_text(path, SMALL)
        assert refused.value.remedy == "Split it"


def test_a_gzip_bomb_is_not_decompressed_in_whole(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(2**26)))
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    with pytest.raises(Unreadable, match="more than 10,000,000 decompressed bytes"):
        read_bytes(path, DESCRIPTION)
    assert tracemalloc.get_traced_memory()[1] < 4 * DESCRIPTION.nbytes
    tracemalloc.stop()
    path.write_bytes(gzip.compress(b"\n" * 10_000_000))  # 10 kB
    with pytest.raises(Unreadable, match="10,000,000 lines, at most 2,000,000 are read"):
        read_text(path, DATA)


@pytest.mark.parametrize("cut", [5, 30, -1])
def test_incomplete_archives_are_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"some text, and more of it")[:cut])
    with pytest.raises(Unreadable, match="compressed and incomplete"):
        read_bytes(path, DATA)
    path.write_bytes(gzip.compress(b"some text") + b"more")
    with pytest.raises(Unreadable, match="compressed and damaged"):
        read_bytes(path, DATA)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: opening it would wait forever
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    for path, rule in (
        (tmp_path / "pipe", "it is a pipe, not a regular file"),
        (Path("/dev/zero"), "it is a device, not a regular file"),
        (tmp_path, "it is a folder, not a regular file"),
        (tmp_path / "none", r"it cannot be read \(No such file or directory\)"),
        (tmp_path / "a\0b", "it cannot be read"),
        (tmp_path / "sparse", "1,099,511,627,776 bytes, at most 200,000,000 are read"),
    ):
        with pytest.raises(Unreadable, match=rule):
            read_bytes(path, DATA)


def test_errors_name_the_line_of_the_file_or_of_an_options_value(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a\nb\n\xff")
    with pytest.raises(Unreadable) as refused:
        read_text(path, DATA)
    assert (
        str(refused.value.error(PlanError, "a.csv", "Convert it")) == "a.csv:3: not UTF-8 text. Save it as UTF-8 text"
    )
    assert str(refused.value.error(PlanError, "--data", "Convert it", "a.csv")) == (
        "--data is 'a.csv': line 3: not UTF-8 text. Save it as UTF-8 text"
    )


def test_text_is_the_same_however_a_file_ends_its_lines(tmp_path: Path) -> None:
    path, text = tmp_path / "a", 'a,b\n\n"1,\n2",ä\n3\n'
    for end in ("\n", "\r\n", "\r"):
        for encoding in ("utf-8", "utf-8-sig"):
            path.write_bytes(text.replace("\n", end).encode(encoding))
            assert read_text(path, DATA) == text
    assert parse_csv(text) == [(1, ["a", "b"]), (2, []), (3, ["1,\n2", "ä"]), (5, ["3"])]


@pytest.mark.parametrize(("content", "line", "rule"), [
    ("a\n".encode("utf-16"), 1, "it is UTF-16 text, not UTF-8"), ("a\n".encode("utf-16-be"), 1, "a NUL character"),
    ("a\n".encode("utf-32"), 1, "it is UTF-16 text, not UTF-8"), (b"a\rb\r\n\0", 3, "a NUL character"),
    ("a\rä".encode("latin-1"), 2, "not UTF-8 text"), (b'a\n\n1,"2\n3', 3, "a quote is not closed"),
    (b'a\r"1"2', 2, "letters follow a closing quote"),
    (b"a\n" + b"1" * 200_000, 2, "a cell of more than 131,072 characters"),
])  # fmt: skip
def test_text_and_tables_that_are_refused_name_the_line(tmp_path: Path, content: bytes, line: int, rule: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(Unreadable, match=rule) as refused:
        parse_csv(read_text(tmp_path / "a.csv", DATA))
    assert refused.value.line == line


def test_a_table_of_commas_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.hardware.documents.input_file.MAX_CELLS", 100)
    with pytest.raises(Unreadable, match="more than 100 cells"):
        parse_csv("," * 60 + "\n" + "," * 60)


@pytest.mark.parametrize(("text", "rule"), [
    ('{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' is given twice"), ('{"a": [NaN]}', "NaN is not a number in JSON"),
    ('{"a": -Infinity}', "-Infinity is not a number in JSON"), ("[1,\n2", r"not valid JSON \(a comma is missing"),
    ("[" * 100_000, "nested too deeply"), (r'["\ud83d"]', "half a character"),
    ("9" * 5000, r"not valid JSON \(Exceeds the limit"),
])  # fmt: skip
def test_json_that_is_refused(text: str, rule: str) -> None:
    with pytest.raises(Unreadable, match=rule):
        parse_json(text)


def test_json_of_more_values_than_memory_holds_is_refused() -> None:
    for text in ("[" + "[]," * 40 + "[]]", "[" + "{}," * 40 + "{}]", "[" + "1," * 80 + "1]"):
        assert parse_json(text)
        with pytest.raises(Unreadable, match="more than 80 values"):
            parse_json(text, most=80)


@pytest.mark.parametrize("text", ["a = " + "[" * 9999, "a = " + "9" * 5000, "a = 1\na = 2", "a = 2026-02-31", "\0"])
def test_toml_that_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match="TOML"):
        parse_toml(text)
    assert parse_toml("a.b = 1") == {"a": {"b": 1}}


def test_json_of_other_programs() -> None:
    assert parse_json('{"a": 1, "a": 2}', repeated=True) == {"a": 2}
    assert parse_json('{"time_step_limit": [0.0, Infinity]}', constants=True) == {"time_step_limit": [0, float("inf")]}

"""Malformed files of every format, a few of each; `make fuzz` reads many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.generate import LAYERS, mutate
from tests.fuzz.readers import READERS, prepare
from tests.fuzz.run import make_file, run_reader, run_seed, try_file

FILES = 12
"""Files of each reader."""


@pytest.mark.parametrize("name", READERS)
def test_malformed_files_are_read_or_refused(name: str) -> None:
    failed = [outcome for outcome in run_reader(name, range(FILES)) if outcome.failure]
    assert not failed


@pytest.mark.parametrize("name", READERS)
def test_the_first_valid_file_is_accepted(name: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    reader = READERS[name]
    content = reader.make_seeds(tmp_path)[0]
    (tmp_path / reader.name).write_bytes(content)
    assert try_file(reader, tmp_path) == "accepted"


def test_a_seed_gives_the_same_file_again() -> None:
    assert LAYERS.keys() == {reader.form for reader in READERS.values()}
    for form in LAYERS:
        valid = (
            b'[{"a": 1}, 2]'
            if form in ("json", "yaml")
            else b'{"a": [1]}\n{"b": 2}\n'
            if form == "jsonl"
            else b"a,b\n1,2\n"
        )
        found = [mutate(valid, form, random.Random(seed)) for seed in range(40)]
        assert found == [mutate(valid, form, random.Random(seed)) for seed in range(40)]
        assert len(set(found)) > 20
    assert make_file("job", 3, [b"a: 1\n"]) == make_file("job", 3, [b"a: 1\n"])

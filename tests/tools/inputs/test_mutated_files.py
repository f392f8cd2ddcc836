"""A sample of `tests.fuzz.launch_lines`: no mutated launch file ends in a traceback, and no setting vanishes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.draws import MORE, drawn
from tests.fuzz.launch_lines import drop_lines, mutate_states, read_text
from tools.inputs.corpus import PROGRAMS, load_corpus
from tools.pages.inputs import write_small_file

CORPUS = load_corpus()
EACH = min(MORE, 4)
"""Files of a program of which every line is dropped."""


@pytest.mark.parametrize("program", drawn(PROGRAMS, 4))
def test_a_dropped_line_changes_the_job_or_was_listed_without_influence(program: str, tmp_path: Path) -> None:
    entries = [entry for entry in CORPUS if entry.program == program]
    for entry in entries[:: -(-len(entries) // EACH)] if entries else ():
        assert list(drop_lines(entry, tmp_path)) == []


def test_no_mutated_file_ends_in_a_traceback(tmp_path: Path) -> None:
    choose = random.Random(50)
    for entry in choose.sample(CORPUS, min(30 * MORE, 150)):
        read_text(entry, write_small_file(entry, tmp_path), mutate_states(entry, choose))


def test_a_companion_with_a_name_that_no_file_can_have_is_asked_for(tmp_path: Path) -> None:
    entry = next(entry for entry in CORPUS if "deepspeed_config" in entry.states or "--deepspeed " in entry.states)
    text = f"deepspeed train.py --model_name_or_path llama3-8b --deepspeed '{'x' * 300}.json' --bf16 True\n"
    assert read_text(entry, tmp_path / "run.sh", text) is not None

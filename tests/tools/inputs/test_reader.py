"""The reader of launch files against the facts of the corpus, in small files that state the same as the public ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.draws import MORE, drawn
from tools.inputs.corpus import PROGRAMS, PublicFile, load_corpus
from tools.inputs.judge import judge
from tools.pages.inputs import write_small_file

CORPUS = load_corpus()

NOT_ANSWERED = {"pai-megatron-patch": 1}
"""Files of a program that hold all that is needed and are not answered. The numbers only shrink."""


@pytest.mark.parametrize("program", [name for name in PROGRAMS if any(entry.program == name for entry in CORPUS)])
def test_a_file_is_read_as_the_job_that_it_is_or_asked_about(program: str, tmp_path: Path) -> None:
    outcomes, wrong = Counter[str](), []
    for number, entry in enumerate(drawn([entry for entry in CORPUS if entry.program == program], keep=3)):
        (folder := tmp_path / str(number)).mkdir()
        judgement = judge(entry, write_small_file(entry, folder))
        outcomes[judgement.outcome] += 1
        if judgement.outcome == "another plan":
            wrong.append(f"{entry.name}: {'; '.join(judgement.misses)}")
    assert not wrong, "\n".join(wrong)
    unanswered = outcomes["asked needlessly"] + outcomes["not read"]
    assert unanswered <= NOT_ANSWERED.get(program, 0) and (unanswered or MORE == 1 or program not in NOT_ANSWERED)


def test_a_plan_that_the_answer_names_is_no_silent_one(tmp_path: Path) -> None:
    command = "accelerate launch --multi_gpu --num_processes 2 sft.py --model_name_or_path m --dataset_name d"
    states = f"{command} --max_length 64 --bf16 --per_device_train_batch_size 1\n"
    facts = {"repository": "own/scripts", "commit": "0" * 40, "path": "run.sh", "program": "trl", "states": states}
    given = {"model": "llama3-8b"}
    path = tmp_path / "run.sh"
    path.write_text(states, "utf-8")
    outcomes = [
        judge(PublicFile.model_validate({**facts, "given": given, "expect": expect}), path).outcome
        for expect in ({"recompute": "full"}, {"recompute": "none"}, {"recompute": "none", "micro": 2})
    ]
    assert outcomes == ["right", "approximated", "another plan"]

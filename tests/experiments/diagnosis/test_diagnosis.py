"""`meshcast.explain` on runs with a planted cause and on clean ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.diagnosis.causes.slow_rank import is_certain
from meshcast.experiments.diagnosis.detector import detectors
from meshcast.experiments.diagnosis.explain import explain
from meshcast.experiments.diagnosis.explanation import Explanation
from meshcast.hardware.errors import PlanError
from tests.experiments.cli.samples import answer, run
from tests.experiments.diagnosis import written_logs as logs
from tests.experiments.diagnosis.cases import CASES, LLAMA, STEPS, step_of_llama
from tests.experiments.diagnosis.written_logs import WrittenRun, vary

PLANTED = [name for name, case in CASES.items() if case.cause]
CLEAN = [name for name, case in CASES.items() if not case.cause]
QUICK = [name for name in PLANTED if CASES[name].job is LLAMA]


def explain_case(name: str, folder: Path, seed: int = 0) -> Explanation:
    """Explains the run of a case."""
    case = CASES[name]
    return explain(case.write(folder, np.random.default_rng(seed)), case.job)


def write_llama(folder: Path, run: WrittenRun) -> Path:
    """Writes a log of Megatron-LM."""
    path = folder / "run.log"
    path.write_text(run.write(logs.megatron), "utf-8")
    return path


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_first(tmp_path: Path, name: str) -> None:
    explanation = explain_case(name, tmp_path)
    assert [cause.name for cause in explanation.causes[:1]] == [CASES[name].cause]
    assert explanation.causes[0].evidence and explanation.causes[0].help
    # Nothing is taken twice: what is found is no longer than what is missing, where both are known.
    known = sum(cause.seconds or 0.0 for cause in explanation.causes if not cause.pauses)
    assert (
        explanation.steady_excess is None
        or known <= max(explanation.steady_excess, 0.0) + 0.15 * explanation.evidence.step
    )
    assert explanation.unexplained_pauses <= 0.01 * (explanation.measured or 1.0)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_named_in_a_clean_run(tmp_path: Path, name: str) -> None:
    explanation = explain_case(name, tmp_path)
    assert explanation.causes == () and explanation.questions == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_verdicts_do_not_hang_on_the_noise(tmp_path: Path, seed: int) -> None:
    wrong = []
    for name, case in CASES.items():
        (folder := tmp_path / name.replace(" ", "-")).mkdir()
        named = [cause.name for cause in explain_case(name, folder, seed).causes]
        if named[:1] != [case.cause] * bool(case.cause):
            wrong.append((name, named))
    assert not wrong


def test_every_cause_is_planted() -> None:
    assert {case.cause for case in CASES.values()} - {""} == detectors().keys()
    assert all("" in detector.words for detector in detectors().values())


def test_seconds_add_up(tmp_path: Path) -> None:
    """Forecast, causes and what is unexplained are the mean step."""
    step = step_of_llama()
    saves = {number: 2 * step for number in range(30, STEPS, 30)}
    words = {number: [f"saving checkpoint at iteration {number:7d} to /c in torch_dist format"] for number in saves}
    seconds = vary(np.random.default_rng(3), 1.2 * step, STEPS)
    explanation = explain(write_llama(tmp_path, WrittenRun(seconds, between=saves, behind=words)), LLAMA)
    (cause,) = explanation.causes
    assert cause.seconds == pytest.approx(2 * step * len(saves) / (STEPS - 1), rel=0.02)
    assert explanation.unexplained == pytest.approx(0.2 * step, rel=0.05)
    assert explanation.expected is not None and explanation.measured is not None and explanation.unexplained is not None
    total = explanation.expected + explanation.unexplained + cause.seconds + explanation.unexplained_pauses
    assert total == pytest.approx(explanation.measured, rel=1e-9)


def test_a_run_of_another_batch_is_a_question(tmp_path: Path) -> None:
    seconds = vary(np.random.default_rng(0), step_of_llama(), 40)
    explanation = explain(write_llama(tmp_path, WrittenRun(seconds, samples=256)), LLAMA)
    assert "the log's global batch is 256, the job's 128" in explanation.questions[0]
    # Nothing is compared with the forecast of another run.
    assert explanation.expected is explanation.unexplained is explanation.steady_excess is None
    text = WrittenRun(seconds, tokens=128 * 8192).write(logs.nanotron)
    (tmp_path / "tokens.log").write_text(text, "utf-8")
    (question,) = explain(tmp_path / "tokens.log", LLAMA).questions
    assert "sequence length (4,096 in the job)" in question


def test_a_drift_is_told_and_has_no_cause_without_evidence(tmp_path: Path) -> None:
    seconds = vary(np.random.default_rng(0), step_of_llama(), STEPS)
    seconds[100:] *= 1.2
    explanation = explain(write_llama(tmp_path, WrittenRun(seconds)), LLAMA)
    steps = explanation.evidence.steps
    assert explanation.causes == () and explanation.pauses == 0 and steps is not None and steps.drift is not None
    assert steps.drift[1] / steps.drift[0] == pytest.approx(1.2, abs=0.02) and 98 <= steps.drift[2] <= 103


def test_pauses_of_no_known_period_are_a_pattern(tmp_path: Path) -> None:
    seconds = vary(np.random.default_rng(0), step_of_llama(), STEPS)
    seconds[16::17] *= 2
    explanation = explain(write_llama(tmp_path, WrittenRun(seconds)), LLAMA)
    assert explanation.causes == () and explanation.unexplained_pauses > 0.03 * step_of_llama()
    assert "one each 17 steps: no setting that is known has this period" in explanation.patterns[0]


def test_settings_of_the_launch_file_are_the_evidence(tmp_path: Path) -> None:
    from tests.experiments.advice.files import MEGATRON

    script = tmp_path / "run.sh"
    script.write_text(MEGATRON.replace("--bf16", "--bf16 --manual-gc --manual-gc-interval 25"), "utf-8")
    seconds = vary(np.random.default_rng(0), 1.0, STEPS)
    seconds[24::25] += 0.8
    saves = {number: 3.0 for number in range(50, STEPS, 50)}
    words = {number: [f"saving checkpoint at iteration {number:7d} to /c in torch_dist format"] for number in saves}
    run = WrittenRun(seconds, between=saves, behind=words, samples=64)
    explanation = explain(write_llama(tmp_path, run), script, "cluster=dgx-h100:2")
    pauses = {cause.name: cause for cause in explanation.causes if cause.pauses}
    garbage = pauses["garbage collection"]
    assert pauses.keys() == {"garbage collection", "checkpoint saves"} and "--manual-gc-interval" in garbage.help
    assert "each 25th (" in garbage.evidence[0] and "run.sh:5 --manual-gc-interval" in garbage.evidence[0]
    # Saves that the log tells of are no pauses of another period that they share.
    assert garbage.seconds == pytest.approx(9 * 0.8 / STEPS, rel=0.1)


def test_a_rank_that_is_slow_by_chance_is_none() -> None:
    assert is_certain([0.3]) and is_certain([0.3, 0.31, 0.29, 0.3])
    assert not is_certain([0.3, 0.01, 0.4, 0.02])


def test_the_command(tmp_path: Path) -> None:
    path = write_llama(tmp_path, WrittenRun(vary(np.random.default_rng(0), 1.0, 60), between={20: 3.0, 40: 3.0}))
    page = run("explain", path)
    assert page.exit_code == 0 and "No cause has evidence" in page.stdout and "60 steps" not in page.stdout
    result = answer("explain", path, "--skip", 2)
    assert result["measured"]["steps"] == 58 and result["expected_s"] is None
    assert result["unexplained_s"]["pauses"] == pytest.approx(6 / 58, rel=0.05)


def test_mistakes(tmp_path: Path) -> None:
    log = write_llama(tmp_path, WrittenRun(vary(np.random.default_rng(0), 1.0, 20)))
    (tmp_path / "empty.txt").write_text("nothing\n", "utf-8")
    titan = tmp_path / "titan.log"
    titan.write_text(WrittenRun([1.0, 1.0]).write(logs.torchtitan), "utf-8")
    mistakes: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "missing"),
        ([log, log], {}, "second training log"),
        (tmp_path / "empty.txt", {}, "no line of it has the form"),
        (titan, {}, "Name the job of the run"),
    ]
    for files, options, words in mistakes:
        with pytest.raises(PlanError, match=words):
            explain(files, **options)

"""The job that stands in the contract, in its short and in its long form, word for word."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app

SHORT = """
model: llama3-70b
cluster: dgx-h100:64
batch: {global: 1024, micro: 1, sequence: 8192}
plan: {tp: 8, pp: 4, schedule: interleaved-1f1b, chunks: 5, zero: 1, recompute: selective}
"""

LONG = """
model: llama3-70b
cluster: dgx-h100:64
framework: {name: megatron-core, release: null, set: {}}
batch: {global: 1024, micro: 1, sequence: 8192}
precision: {compute: bf16, gradients: fp32, main_weights: fp32, moments: fp32}
optimizer: adam
plan:
  mesh: {pp: 4, dp: 16, tp: 8}
  partition: even
  schemes:
    - {use: pipeline/interleaved-1f1b, over: pp, chunks: 5}
    - {use: data/zero-1, over: dp}
    - {use: tensor/megatron-sp, over: tp}
    - {use: memory/recompute-selective, modules: [core_attn]}
run: {tokens: null, price_per_gpu_hour: null}
"""

KEYS = (
    "id meshcast status job step_time_s interval_90_s tokens_per_s_per_gpu breakdown_s hidden_s mfu hfu memory limits "
    "assumed warnings run"
)


def predict(text: str, folder: Path) -> str:
    (folder / "job.yaml").write_text(text)
    result = CliRunner().invoke(app, ["predict", str(folder / "job.yaml"), "--json"])
    assert result.exit_code == 0, result.output
    return result.output


def test_both_forms_give_the_same_answer(tmp_path: Path) -> None:
    short = predict(SHORT, tmp_path)
    answer = json.loads(short)
    long = yaml.safe_load(LONG)  # with what the short form leaves open, which widens its interval
    long["framework"]["set"] = {"sigmas": answer["job"]["framework"]["set"]["sigmas"]}
    assert predict(json.dumps(long), tmp_path) == short
    assert list(answer)[: len(KEYS.split())] == KEYS.split()  # further figures stand behind
    # The answer holds the job in long form: it can be asked again.
    assert predict(json.dumps(answer["job"]), tmp_path) == short


def test_the_breakdown_adds_up(tmp_path: Path) -> None:
    answer = json.loads(predict(SHORT, tmp_path))
    parts = answer["breakdown_s"]
    nested = sum(sum(part.values()) for part in (parts["compute"], parts["exposed"]))
    total = nested + sum(parts[key] for key in ("bubble", "optimizer", "host", "idle"))
    assert total == pytest.approx(answer["step_time_s"], rel=1e-9)
    low, high = answer["interval_90_s"]
    assert low < answer["step_time_s"] < high

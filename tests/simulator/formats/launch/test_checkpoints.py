"""How often a launch file saves: `meshcast run` alone reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.formats.launch.render import render_job
from meshcast.simulator.loading.load import load_job
from tests.experiments.cli.samples import run

SCRIPT = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8"
SCRIPT += " --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --train-iters 50 --bf16"

TITAN = "[training]\nseq_len = 256\n[checkpoint]\nenable = true\n"

SILENT = LaunchOptions(assume_defaults=True)


@pytest.mark.parametrize(
    ("form", "text", "checkpoints"),
    [
        ("megatron", SCRIPT, {}),
        ("megatron", f"{SCRIPT} --save-interval 20", {"kind": "sharded", "every_steps": 20}),
        ("megatron", f"{SCRIPT} --save-interval 20 --async-save", {"kind": "asynchronous", "every_steps": 20}),
        ("torchtitan", TITAN.replace("true", "false"), {}),
        ("torchtitan", TITAN, {"kind": "sharded", "every_steps": 500}),
        ("torchtitan", f"{TITAN}interval = 9\nasync_mode = 'disabled'", {"kind": "sharded", "every_steps": 9}),
        ("torchtitan", f"{TITAN}interval = 9\nasync_mode = 'async'", {"kind": "asynchronous", "every_steps": 9}),
        ("nemo", "checkpoint: {save_interval: 7, async_save: true}", {"kind": "asynchronous", "every_steps": 7}),
        (
            "nemo",
            "exp_manager: {checkpoint_callback_params: {every_n_train_steps: 7}}",
            {"kind": "sharded", "every_steps": 7},
        ),
        ("accelerate", "{distributed_type: FSDP, save_steps: 5}", {"kind": "sharded", "every_steps": 5}),
        ("accelerate", "{distributed_type: FSDP, save_steps: 0.1}", {}),
        ("accelerate", "{distributed_type: FSDP, save_steps: 5, save_strategy: epoch}", {}),
    ],
)
def test_what_files_say_of_checkpoints(form: str, text: str, checkpoints: dict[str, Any]) -> None:
    where = "file.yaml" if form == "accelerate" else "file"
    found = import_text(text, where, form, "dgx-h100:1", None if form == "megatron" else "gpt2-124m", options=SILENT)
    assert found.checkpoints == checkpoints
    assert "checkpoints" not in found.job.get("run", {})  # a sweep of the file would simulate whole runs
    printed = render_job(found)
    assert ("meshcast run reads it from the file" in printed) == bool(checkpoints)
    assert load_job(yaml.safe_load(printed)) == load_job(found.job)


def test_run_simulates_the_checkpoints_of_the_file(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(f"{SCRIPT} --save-interval 20")

    def answer(*words: str) -> Any:
        found = run("run", path, "--set", "run.seeds=1", "--json", *words)
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    own, other = answer(), answer("--set", "run.checkpoints.every_steps=10")
    assert own["checkpoints"]["tiers"][0]["every_steps"] == 20 and other["checkpoints"]["tiers"][0]["every_steps"] == 10
    assert not any("checkpoints (run.checkpoints)" in one or "Daly" in one for one in own["assumed"])
    path.write_text(SCRIPT)
    assert any(one.startswith("interval of checkpoints: the best one by Daly") for one in answer()["assumed"])

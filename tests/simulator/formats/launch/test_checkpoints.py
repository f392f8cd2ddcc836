"""How often a launch file saves: `meshcast run` alone reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.experiments.cli.samples import run

SCRIPT = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8"
SCRIPT += " --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --train-iters 25 --bf16"


def test_run_simulates_the_checkpoints_of_the_file(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(f"{SCRIPT} --save-interval 20")

    def answer(*words: str) -> Any:
        found = run("run", path, "--set", "run.seeds=1", "--json", *words)
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    stated, changed = answer(), answer("--set", "run.checkpoints.every_steps=10")
    assert [answered["checkpoints"]["tiers"][0]["every_steps"] for answered in (stated, changed)] == [20, 10]
    assert not any("checkpoints (run.checkpoints)" in note or "Daly" in note for note in stated["assumed"])
    path.write_text(SCRIPT)
    assert any(note.startswith("interval of checkpoints: the best one by Daly") for note in answer()["assumed"])

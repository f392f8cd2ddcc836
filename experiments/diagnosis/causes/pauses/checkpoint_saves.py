"""Saves of checkpoints that training waits for."""

from __future__ import annotations

from meshcast.experiments.diagnosis.causes.pauses.pause import Pause
from meshcast.experiments.diagnosis.detector import ANY
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.formats.logs.training_log import SAVE

SHARDED = "save asynchronously, to a faster store, or less often"


class CheckpointSaves(Pause):
    """Steps at which a checkpoint is saved, or the time between steps that it takes."""

    name = "checkpoint saves"
    event = SAVE
    settings = ("save_interval", "save_steps", "checkpoint.interval", "checkpoints.checkpoint_interval")
    timers = ("save-checkpoint", "save-checkpoint-non-persistent")
    words = {
        "megatron": "--async-save with --ckpt-format torch_dist, a longer --save-interval, or a faster store",
        "torchtitan": 'checkpoint.async_mode = "async", a longer checkpoint.interval, or a faster store',
        "trainer": "a longer save_steps, save_only_model, or a faster store",
        ANY: SHARDED,
    }

    def find_period(self, run: RunEvidence) -> tuple[int, str]:
        """Returns the interval of saves of the launch file, or of the job's ``run.checkpoints``."""
        every = run.checkpoints.get("every_steps")
        return (every, "its checkpoints") if isinstance(every, int) and every > 0 else super().find_period(run)

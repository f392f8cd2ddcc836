"""Evaluations between steps."""

from __future__ import annotations

from meshcast.experiments.diagnosis.causes.pauses.pause import Pause
from meshcast.experiments.diagnosis.detector import ANY
from meshcast.simulator.formats.logs.training_log import EVALUATION


class Evaluations(Pause):
    """Steps after which the model is evaluated."""

    name = "evaluations"
    event = EVALUATION
    settings = ("eval_interval", "eval_steps", "validation.freq", "trainer.val_check_interval", "val_check_interval")
    timers = ("eval-time",)
    words = {
        "megatron": "a longer --eval-interval, or fewer --eval-iters",
        "torchtitan": "a longer validation.freq, or fewer validation.steps",
        "trainer": "a longer eval_steps, or a smaller evaluation set",
        ANY: "evaluate less often, or on less data",
    }

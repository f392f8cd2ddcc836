"""Engines agree about models of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.draws import drawn_grid
from tests.simulator.models import test_diffusion, test_encoder_decoder, test_heads
from tests.simulator.models.lowered import PLANS, play

HEADS: list[dict[str, Any]] = [{"classes": 3}, {"classes": 3, "pool": "none"}, {"pool": "mean"}]
MODELS: dict[str, dict[str, Any]] = {
    **{kind: test_diffusion.describe(kind) for kind in ("dit", "flux", "wan")},
    "encoder-decoder": test_encoder_decoder.describe(),
    **{str(head): test_heads.SHAPE | {"layers": 4, "output": head} for head in HEADS},
}
SPLITS: list[dict[str, Any]] = [
    *PLANS.values(),
    *[{"dp": 8}, {"pp": 4, "dp": 2}, {"pp": 2, "dp": 4, "recompute": "full"}, {"tp": 4, "dp": 2}, {"cp": 2, "dp": 4}],
    {"pp": 2, "dp": 4, "schedule": "interleaved-1f1b", "chunks": 2},
]


RINGS = [("encoder-decoder", plan) for plan in SPLITS if "cp" in plan]
"""Refused: a decoder attends to an encoder whose output is whole."""


@pytest.mark.parametrize(("kind", "plan"), [case for case in drawn_grid(MODELS, SPLITS) if case not in RINGS], ids=str)
def test_the_engines_agree(kind: str, plan: dict[str, Any]) -> None:
    spans = [play(MODELS[kind], plan, 8, 32, engine=engine).step.span for engine in ("matrices", "simpy")]
    assert 0 < spans[0] == pytest.approx(spans[1], rel=1e-9)

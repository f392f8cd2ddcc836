"""Offloading of what modules save: bytes out and back, what stays on the GPU, and when it comes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from meshcast.simulator.ir.ops import HostCopy, Op
from meshcast.validation.contract.played import Ideal, Played, play_job
from tests.draws import drawn_grid

TOKENS, HIDDEN, LAYERS = 2 * 64, 64, 6
STREAM = 2 * TOKENS * HIDDEN
"""Bytes of a tensor as wide as the residual stream."""

SAVED = {
    "attn_norm": 1,  # input
    "qkv_linear": 1,
    "core_attn": 3 + 1 + 2 / 32,  # queries, keys, values, result, and of each of 2 heads a number in fp32
    "attn_proj": 1,
    "mlp_norm": 1,
}
"""What modules of a layer save, in `STREAM`; norms beside it 8 bytes of statistics a token."""

STATISTICS = 8 / (2 * HIDDEN)


def job(*modules: str, pp: int = 1, batches: int = 1, **options: Any) -> dict[str, Any]:
    """A small GPT that offloads what modules save; none: nothing."""
    model = {"layers": LAYERS, "hidden": HIDDEN, "heads": 2, "vocab": 128, "seq": 64, "dropout": 0.0}
    offload = {"use": "memory/offload", "modules": list(modules), "least_elements": 0, **options}
    schemes = [{"use": "pipeline/1f1b", "over": "pp"}, *([offload] if modules else [])]
    plan = {"mesh": {"pp": pp}, "schemes": schemes}
    batch = {"global": 2 * batches, "micro": 2}
    traits = {"launch_s": 0.0, "step_overhead_s": 0.0, "fused_gradients": True}
    framework = {"name": "megatron-core", "set": traits}
    return {
        **{"model": model, "cluster": {"gpu": "h100-sxm", "gpus": pp}, "batch": batch, "plan": plan},
        "framework": framework,
    }


def copies(found: Played, device: int = 0) -> list[tuple[int, Op]]:
    return [(number, op) for number, op in found.instances(device) if isinstance(op.work, HostCopy)]


@pytest.mark.parametrize("modules", [[name] for name in SAVED if name != "attn_proj"] + [["core_attn", "attn_proj"]])
def test_what_a_module_saves_goes_out_and_comes_back(modules: list[str]) -> None:
    """Of all layers but that in front of the loss, whose backward pass follows at once."""
    bare, run = play_job(job(batches=2)), play_job(job(*modules, batches=2))
    wanted = sum(SAVED[name] + STATISTICS * ("norm" in name) for name in modules) * STREAM
    for back in (False, True):
        moved = sum(op.work.nbytes for _, op in copies(run) if isinstance(op.work, HostCopy) and op.work.back == back)
        assert moved == pytest.approx(2 * (LAYERS - 1) * wanted, rel=1e-9)
    assert run.flops("F", "B", "W") == bare.flops("F", "B", "W")
    assert all(peak.left == 0 for peak in run.peaks)


def test_what_another_module_saves_stays_on_the_gpu() -> None:
    """The result of attention is freed only where the output projection offloads it, too."""
    links = Ideal(links=1e15)
    bare, core, both = (
        play_job(job(*modules), links).category_peak(0, "activations")
        for modules in ([], ["core_attn"], ["core_attn", "attn_proj"])
    )
    gone = LAYERS - 1
    assert bare - core == pytest.approx(gone * (SAVED["core_attn"] - 1) * STREAM, rel=0.01)
    assert core - both == pytest.approx(gone * STREAM, rel=0.01)


@pytest.mark.parametrize(("modules", "pp"), drawn_grid([["mlp_norm", "attn_norm"], ["core_attn"]], [1, 2]))
def test_a_fast_link_hides_all_copies(modules: list[str], pp: int) -> None:
    bare, run = (play_job(job(*names, pp=pp, batches=3), Ideal(links=1e18)) for names in ([], modules))
    assert max(run.times.end) == pytest.approx(max(bare.times.end), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75])
def test_the_first_modules_of_a_pass_are_copied(share: float) -> None:
    """`activation_offload_fraction`: as many groups as int(groups x (1 - share)) leaves."""
    run = play_job(job("core_attn", "mlp_norm", copies=share))
    names = [op.name for _, op in copies(run) if isinstance(op.work, HostCopy) and not op.work.back]
    groups = 2 * (LAYERS - 1)
    assert len(names) == groups - int(groups * (1 - share))
    assert all(earlier != later for earlier, later in pairwise(names))


def test_a_module_comes_back_once_that_of_the_layer_behind_is_done() -> None:
    """So the norm of the MLP, used first, while attention of the layer behind computes; attention behind this MLP."""
    run = play_job(job("core_attn", "mlp_norm"), Ideal(links=1e15))
    begin, end = run.times.begin, run.times.end
    for name, kernel in (("mlp_norm", "dnorm2"), ("core_attn", "dcore")):
        backs = [number for number, op in copies(run) if op.name == f"copy in {name}"]
        uses = [number for number, op in run.instances() if op.name == kernel]
        assert len(backs) == len(uses) - 1 == LAYERS - 1
        for back, behind, mine in zip(backs, uses[:-1], uses[1:], strict=True):
            assert end[behind] <= begin[back] < end[back] <= begin[mine]


def test_small_tensors_stay() -> None:
    run = play_job(job("core_attn", least_elements=STREAM // 2))
    moved = sum(op.work.nbytes for _, op in copies(run) if isinstance(op.work, HostCopy))
    assert moved == 2 * (LAYERS - 1) * 4 * STREAM


@pytest.mark.parametrize("module", ["core_attn", "mlp_norm"])
def test_a_copy_has_the_time_between_the_module_and_itself_in_the_next_layer(module: str) -> None:
    """A copy back that takes a third of the backward pass of a layer hides, whichever place the module has in it."""
    bare = play_job(job())
    starts = [bare.times.begin[number] for number, op in bare.instances() if op.name == "dcore"]
    layer = starts[1] - starts[0]
    link = SAVED[module] * STREAM / (layer / 3)
    run = play_job(job(module), Ideal(links=link))
    before, behind = (max(found.times.end) for found in (bare, run))
    assert behind == pytest.approx(before, rel=1e-3)

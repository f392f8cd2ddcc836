"""Contrastive models: parameters and FLOPs, the loss of a batch, and where it stands in a step."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.ir.ops import Collective, Gemm, Op
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.load import load_model
from meshcast.simulator.scheduling.schedule import ActionKind
from meshcast.validation.contract.played import FREE, PAID, Ideal, Played, play_job
from tests.draws import drawn_grid

WIDTH, LAYERS, HIDDEN = 32, 4, 48

IMAGE = {"name": "image", "tokens": 16, "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "input_width": 20}
TEXT = {"name": "text", "layers": 2, "projector": "linear", "projector_bias": False}
MODEL: dict[str, Any] = {
    "layers": 0, "contrastive": WIDTH, "hidden": 64, "heads": 4, "vocab": 64, "seq": 24, "branches": [IMAGE, TEXT],
}  # fmt: skip


def schedule(branches: Any = 1, **options: Any) -> dict[str, Any]:
    return {"use": "pipeline/distmm", "over": "pp", "branches": branches, **options}


def job(mesh: dict[str, int], schemes: list[dict[str, Any]], batch: int = 24, micro: int = 4) -> dict[str, Any]:
    """A job of `MODEL`."""
    gpus = 1
    for size in mesh.values():
        gpus *= size
    return {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "batch": {"global": batch, "micro": micro},
        "plan": {"mesh": mesh, "schemes": schemes},
    }


DDP = {"use": "data/ddp", "over": "dp"}
TP = {"use": "tensor/megatron", "over": "tp"}


def of_kind(played: Played, kind: str) -> list[Op]:
    """The ops of all actions of a kind, of all devices."""
    numbers = [number for number, action in enumerate(played.program.timetable.actions) if action.kind == kind]
    return [played.flat.ops[at] for number in numbers for at in played.ops(number)]


# ------------------------------------------------------------------------------------------------ the model


def test_clip_has_the_published_parameters_and_flops() -> None:
    """docs/model_profile.csv of mlfoundations/open_clip: 427.62, 303.97 and 123.65 M; 175.33 GFLOPs of an image and a
    text."""
    model = load_model("clip-vit-l-14")
    millions = [round(one / 1e6, 2) for one in (model.parameters, *(tower.parameters for tower in model.branches))]
    assert millions == [427.62, 303.97, 123.65]
    flops = forward_matmul_flops(model, model.seq, model.seq, causal=False)
    assert sum(flops.values()) / 1e9 == pytest.approx(175.33, abs=0.005)


# ------------------------------------------------------------------------------------------------ the loss


@pytest.mark.parametrize("dp, tp", [(1, 1), (2, 1), (4, 2)])
def test_the_loss_of_a_rank_is_its_rows_of_both_matrices(dp: int, tp: int) -> None:
    """On one stage: (batch / dp) x batch similarities in both directions, one product forward and two backward."""
    batch = 24
    played = play_job(job({"pp": 1, "dp": dp, "tp": tp}, [schedule(), DDP, TP], batch, 3))
    works = [op.work for op in of_kind(played, ActionKind.LOSS)]
    products = [work for work in works if isinstance(work, Gemm)]
    assert [work.flops for work in products] == [2 * batch // dp * batch * WIDTH] * 6
    moved = sorted((work.operation, work.nbytes, work.axes) for work in works if isinstance(work, Collective))
    each = [(name, batch * WIDTH * 2, ("dp",)) for name in ("all_gather", "reduce_scatter") for _ in range(2)]
    assert moved == (each if dp > 1 else [])


def test_the_gradient_of_a_branch_has_both_directions() -> None:
    """The last op of the loss adds what the rows and what the columns of a branch give; the products of the other
    branch wait for its vectors."""
    played = play_job(job({"pp": 1, "dp": 2}, [schedule(), DDP]))
    ops = of_kind(played, ActionKind.LOSS)
    place = {op.name: at for at, op in enumerate(ops)}
    for branch in (0, 1):
        assert place[f"all_gather held{1 - branch}"] < place[f"similarity{branch}"] < place[f"dsimilarity{branch}"]
        assert place[f"dsimilarity{1 - branch}"] < place[f"reduce_scatter dheld{branch}"] < place[f"add dheld{branch}"]


def test_two_stages_compute_one_direction_each_and_exchange_vectors() -> None:
    batch, heterogeneous = 24, {"schedule": {"use": "distmm", "branches": 2}, "stages": [{"dp": 4}, {"dp": 2}]}
    given = {**job({"dp": 6}, []), "batch": {"global": batch, "microbatches": 2}, "plan": heterogeneous}
    played = play_job(given)
    table = played.program.timetable
    for stage, dp in ((0, 4), (1, 2)):
        number = next(i for i, a in enumerate(table.actions) if a.kind == ActionKind.LOSS and a.stage == stage)
        works = [played.flat.ops[at].work for at in played.ops(number)]
        assert [work.flops for work in works if isinstance(work, Gemm)] == [2 * batch // dp * batch * WIDTH] * 3
    coupling = {slot.kind: i for i, slot in enumerate(table.slots) if slot.stage == 0}
    sent = [played.program.sends[coupling[kind]] for kind in (ActionKind.OUTPUTS, ActionKind.LOSS)]
    for send in sent:
        assert send is not None and sum(nbytes for *_, nbytes in send.work.pairs) == batch * WIDTH * 2
        assert {source for source, *_ in send.work.pairs} == {0, 1, 2, 3}
        assert {target for _, target, _ in send.work.pairs} == {4, 5}


# ------------------------------------------------------------------------------------------------ the step


def branch_alone(played: Played, stage: int) -> dict[str, float]:
    """Seconds of one action of every kind on a stage."""
    found = {}
    for number, action in enumerate(played.program.timetable.actions):
        if action.stage == stage:
            places = played.ops(number)
            found[action.kind] = sum(played.flat.seconds[at] for at in places)
    return found


@pytest.mark.parametrize("m", [1, 3, 6])
def test_a_step_is_the_outputs_the_loss_and_1f1b(m: int) -> None:
    """Two branches of two stages each, without communication: between the work of the last stage of the image branch,
    which takes longer, with the ends of the pipeline, and the closed form for the slower of its two stages."""
    played = play_job(job({"pp": 4}, [schedule([2, 2])], 4 * m), FREE)
    first, last = branch_alone(played, 0), branch_alone(played, 1)
    forward, backward = max(first["F"], last["F"]), max(first["BW"], last["BW"])
    passes = max(end for end, op in zip(played.times.end, played.flat.ops, strict=True) if op.phase != "U")
    least = first["N"] + m * last["N"] + last["Y"] + last["Z"] + m * (last["F"] + last["BW"]) + first["BW"]
    most = m * forward + last["Y"] + last["Z"] + (m + 1) * (forward + backward)
    assert least * (1 - 1e-12) <= passes <= most


@pytest.mark.parametrize(
    ("price", "options"), drawn_grid([PAID, FREE, Ideal(links=1e5, latency=1e-2)], [{}, {"recompute": False}])
)
def test_the_engines_agree(options: dict[str, Any], price: Ideal) -> None:
    heterogeneous = {"schedule": {"use": "distmm", "branches": [2, 1], **options}}
    heterogeneous |= {"stages": [{"dp": 1, "tp": 2, "sequence_parallel": False}, {"dp": 4, "zero": 2}, {"dp": 2}]}
    given = {**job({"dp": 8}, []), "batch": {"global": 64, "microbatches": 8}, "plan": heterogeneous}
    engines: tuple[Engine, ...] = ("matrices", "sweep", "simpy")
    spans = [play_job(given, price, engine=engine).step.span for engine in engines]
    assert spans == pytest.approx([spans[0]] * 3, rel=1e-9)


def test_outputs_alone_stay_from_the_first_phase() -> None:
    """With more micro-batches in a batch, the peak grows by outputs and the loss; without recomputation by whole
    activations."""

    def peaks(m: int, **options: Any) -> list[float]:
        return [one.by["activations"] for one in play_job(job({"pp": 2}, [schedule(2, **options)], 4 * m)).peaks]

    vectors = 4 * WIDTH * 2
    kept, whole = [
        [b - a for a, b in zip(peaks(4, **o), peaks(12, **o), strict=True)] for o in ({}, {"recompute": False})
    ]
    assert max(kept) <= 8 * 2 * vectors
    assert min(whole) > 100 * vectors


def test_degrees_by_branch_are_never_slower_than_one_for_both() -> None:
    """A small search with free communication: 8 GPUs divided between the branches, their equal division among them."""

    def seconds(images: int) -> float:
        stages = [{"dp": images}, {"dp": 8 - images}]
        plan = {"schedule": {"use": "distmm", "branches": 2}, "stages": stages}
        return play_job({**job({"dp": 8}, []), "batch": {"global": 480, "microbatches": 4}, "plan": plan}).step.span

    found = {images: seconds(images) for images in (2, 3, 4, 5, 6)}
    best = min(found, key=found.__getitem__)
    assert best > 4, "the image branch has more layers and tokens"
    assert found[4] / found[best] > 1.1

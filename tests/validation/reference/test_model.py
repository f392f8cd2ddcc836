"""The reference model against one written in plain operations: loss, gradients, and refused features."""

from __future__ import annotations

from typing import Any

import pytest

from tests.validation.reference.plans import GPT, LLAMA, MODELS, plan, serial

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from meshcast.validation.reference import model, tokens  # noqa: E402
from meshcast.validation.reference.deferred_weight_gradients import DeferredWeightGradients  # noqa: E402
from meshcast.validation.reference.functions import linear  # noqa: E402
from meshcast.validation.reference.tensor_parallel import TensorGroup  # noqa: E402
from tests.draws import drawn_grid  # noqa: E402

CPU = torch.device("cpu")


def gradients(module: Any) -> dict[str, Any]:
    return {name: param.grad for name, param in module.named_parameters()}


@pytest.mark.parametrize(("recompute", "name"), drawn_grid(["none", "selective", "full"], MODELS))
def test_loss_and_gradients_are_those_of_plain_operations(name: str, recompute: str) -> None:
    given = plan(MODELS[name], recompute=recompute)
    stage = model.build_stage(given, None, TensorGroup(), CPU)
    weights = {n: param.detach().double().requires_grad_() for n, param in stage.named_parameters()}
    ids, targets = tokens.make_tokens(given, 0, 0, 0)
    loss = stage(ids, targets)
    loss.backward()
    wanted = serial(weights, given, ids, targets)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for n, grad in gradients(stage).items():
        torch.testing.assert_close(grad.double(), weights[n].grad, rtol=1e-4, atol=1e-6, msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_a_pipeline_are_the_whole_model(name: str) -> None:
    whole = plan({**MODELS[name], "layers": 4})
    cut = plan({**MODELS[name], "layers": 4}, gpus=2, pp=2, chunks=2)
    serial_stage = model.build_stage(whole, None, TensorGroup(), CPU)
    stages = [model.build_stage(cut, i, TensorGroup(), CPU) for i in range(4)]
    ids, targets = tokens.make_tokens(whole, 0, 0, 0)
    x = ids
    for stage in stages:
        x = stage(x)
    loss = stages[-1].loss(x, targets)
    loss.backward()
    serial_stage(ids, targets).backward()
    wanted = gradients(serial_stage)
    copies = [model.tied_embedding(stage) for stage in stages]
    if whole.job.model.tied:
        assert copies[0] is not None and copies[1:3] == [None, None] and copies[3] is not None
        total = copies[0].grad + copies[3].grad
        copies[0].grad, copies[3].grad = total, total
        assert copies[0].in_norm and not copies[3].in_norm
    else:
        assert copies == [None] * 4
    found = {n: grad for stage in stages for n, grad in gradients(stage).items()}
    assert found.keys() == wanted.keys()
    for n, grad in found.items():
        torch.testing.assert_close(grad, wanted[n], rtol=1e-4, atol=1e-6, msg=n)


def test_parts_of_the_weights_make_up_the_whole_ones() -> None:
    given = plan(LLAMA)
    whole = dict(model.build_stage(given, None, TensorGroup(), CPU).named_parameters())
    parts = [model.build_stage(given, None, TensorGroup(2, rank), CPU) for rank in (0, 1)]
    for name, param in whole.items():
        for part in parts:
            assert torch.equal(dict(part.named_parameters())[name], part.shardings[name].shard_of(param.detach())), name
    halves = [dict(part.named_parameters())["layers.0.attention.qkv.weight"] for part in parts]
    q, k, v = whole["layers.0.attention.qkv.weight"].split((48, 24, 24))
    assert torch.equal(torch.cat([half[:24] for half in halves]), q)
    assert torch.equal(torch.cat([half[24:36] for half in halves]), k)
    assert torch.equal(torch.cat([half[36:] for half in halves]), v)


def test_one_rank_alone_has_the_shapes_of_its_part() -> None:
    for sequence in (False, True):
        given = plan(GPT, tp=1)
        stage = model.build_stage(given, None, TensorGroup(2, 0, None, sequence), CPU)
        ids, targets = tokens.make_tokens(given, 0, 0, 0)
        seen = []
        stage.layers["0"].register_forward_hook(lambda _, ins, out, seen=seen: seen.append(out.shape))
        logits = stage(ids)
        assert logits.shape == (2, 16, 48)
        assert seen == [(2, 8 if sequence else 16, 48)]
        stage.loss(logits, targets).backward()
        assert all(param.grad is not None for param in stage.parameters())


def test_tokens_depend_on_their_place_alone() -> None:
    given = plan(GPT)
    ids, targets = tokens.make_tokens(given, 1, 0, 0)
    again, _ = tokens.make_tokens(given, 1, 0, 0)
    other, _ = tokens.make_tokens(given, 2, 0, 0)
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    assert torch.equal(ids[:, 1:], targets[:, :-1]) and ids.dtype == torch.int64 and ids.shape == (2, 16)


def test_a_deferred_weight_gradient_is_added_when_its_work_is_done() -> None:
    weight, inputs = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    queue = DeferredWeightGradients([weight])
    with queue.defer():
        linear(inputs, weight).sum().backward()
    assert weight.grad is None and inputs.grad.tolist() == [[2, 2]] * 2
    weight.grad = torch.ones(2, 2)
    queue.take_work()()
    assert weight.grad.tolist() == [[3, 3]] * 2

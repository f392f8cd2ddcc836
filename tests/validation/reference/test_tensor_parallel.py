"""Two ranks that shard each layer, or the optimizer's state, have the results of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.validation.reference.plans import MODELS, plan

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from meshcast.validation.reference import model, optimizer, tokens  # noqa: E402
from meshcast.validation.reference.sharded_parameter import ParameterSharding  # noqa: E402
from meshcast.validation.reference.tensor_parallel import TensorGroup  # noqa: E402
from tests.validation.ranks import on_ranks  # noqa: E402
from tests.validation.reference.ranks import divided, replicas  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return on_ranks(divided)


def alone(name: str) -> tuple[float, dict[str, Any], float, dict[str, Any]]:
    """Loss, gradients, their norm and the weights after a step."""
    given = plan(MODELS[name])
    stage = model.build_stage(given, None, TensorGroup(), CPU)
    adam = optimizer.Optimizer(stage.parameters(), given)
    loss = stage(*tokens.make_tokens(given, 0, 0, 0))
    loss.backward()
    gradients = {n: param.grad.clone() for n, param in stage.named_parameters()}
    norm = adam.step()
    return loss.item(), gradients, norm.item(), {n: param.detach() for n, param in stage.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_divided_model_is_the_whole_one(both: list[dict[str, Any]], name: str, sequence: bool) -> None:
    loss, gradients, norm, weights = alone(name)
    for rank, found in enumerate(both):
        one = found[name, sequence]
        assert one["loss"] == pytest.approx(loss, rel=1e-6)
        assert one["norm"] == pytest.approx(norm, rel=1e-5)
        assert one["gradients"].keys() == gradients.keys()
        for n, (dim, sections) in one["cuts"].items():
            cut = ParameterSharding(TensorGroup(2, rank, None, sequence), dim, sections)
            torch.testing.assert_close(one["gradients"][n], cut.shard_of(gradients[n]), rtol=1e-4, atol=1e-6, msg=n)
            # A step of Adam is as long for a small gradient as for a large one, so only most of them can agree.
            moved = (one["weights"][n] - cut.shard_of(weights[n])).abs()
            assert moved.max() <= 2.1e-4 and (moved > 2e-6).float().mean() < 0.01, n


def test_a_divided_state_makes_the_same_steps() -> None:
    first, second = on_ranks(replicas)
    for (precision, gradients), one in first.items():
        other = second[precision, gradients]
        formats = {"compute": precision, "gradients": gradients, "main_weights": "fp32", "moments": "fp32"}
        given = plan(MODELS["llama"], job={"precision": formats, "batch": {"micro": 2, "global": 4}})
        stage = model.build_stage(given, None, TensorGroup(), CPU)
        adam = optimizer.Optimizer(stage.parameters(), given)
        pair = plan(MODELS["llama"], gpus=2, dp=2)
        norms = []
        for step in range(2):
            for replica in (0, 1):
                (stage(*tokens.make_tokens(pair, step, 0, replica)) / 2).backward()
            norms.append(adam.step().item())
            adam.zero_grad()
        close = 1e-5 if precision == "fp32" else 1e-2
        assert one["norms"] == pytest.approx(norms, rel=close) and other["norms"] == one["norms"]
        assert one["state"] == -(-sum(param.numel() for param in stage.parameters()) // 2)
        for n, param in stage.named_parameters():
            assert torch.equal(one["weights"][n], other["weights"][n]), n
            moved = (one["weights"][n].float() - param.detach().float()).abs()
            assert (moved > close).float().mean() < 0.01, n

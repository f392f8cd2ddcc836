"""Where the laws of data schemes are asked: a small model on data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.forecast import device_params, lowered, resting
from simulator.job import load_job
from simulator.models import Model
from simulator.ops import Chain
from simulator.plan import Plan
from simulator.scheme import Scheme
from tests.contract.measure import backward_ops, forward_ops, ops_beside, sent


@dataclass(frozen=True)
class DataSetting:
    """A small GPT with an output layer of its own on n data-parallel ranks, with fp32 gradients and bf16 weights."""

    n: int = 4

    @property
    def model(self) -> Model:
        return Model(layers=2, hidden=64, heads=4, vocab=256, seq=32, tied=False)

    @property
    def grad_bytes(self) -> int:
        return 4 * self.model.parameters

    @property
    def weight_bytes(self) -> int:
        return 2 * self.model.parameters

    @property
    def last_weight_bytes(self) -> int:
        """Of the final norm and the output layer."""
        return 2 * (self.model.norm_parameters + self.model.hidden * self.model.vocab)

    def lowered(self, use: str) -> tuple[Chain, Plan]:
        plan = {"mesh": {"dp": self.n}, "schemes": [{"use": use, "over": "dp"}]}
        cluster = {"gpu": "h100-sxm", "gpus": self.n}
        ready = Plan(load_job({"model": self.model, "cluster": cluster, "plan": plan}))
        (chain,), _ = lowered(ready)
        return chain, ready


def sent_per_step(setting: DataSetting, use: str) -> float:
    chain, plan = setting.lowered(use)
    beside = ops_beside((*chain.ahead, *chain.behind))
    return sent(forward_ops(chain) + backward_ops(chain) + beside, plan.mesh)


def state_bytes_per_parameter(setting: DataSetting, use: str) -> float:
    chain, plan = setting.lowered(use)
    (params,) = device_params(plan, [chain])
    return sum(resting(plan, params).values()) / setting.model.parameters


def settings(kind: type[Scheme]) -> Iterator[DataSetting]:
    for n in (1, 2, 3, 4, 7, 8, 16, 64):
        yield DataSetting(n)


MEASURES = {
    "sent_per_step": sent_per_step,
    "state_bytes_per_parameter": state_bytes_per_parameter,
}

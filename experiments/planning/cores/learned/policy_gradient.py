"""Device placement by a policy that is trained on the times of the placements that it draws.

The policy is a sequence-to-sequence network: an LSTM reads the groups of operators, and another, with attention to all
of them, emits their devices in turn, knowing those before (Mirhoseini et al. 2017, arXiv 1706.04972, section 3).

* REINFORCE: the reward is - sqrt(time), less a moving average of rewards.
* Proximal policy optimisation: every group is a step of a Markov decision process; a batch is used several times, and
the policy stays near its state at the draw: clipped ratios of probabilities and a penalty on the Kullback-Leibler
  divergence (Gao et al. 2018, Spotlight, ICML).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from meshcast.experiments.planning.clock import is_over

FAILED = 10.0
"""The time of a placement that fails, in times of the mean of those that do not."""

MAX_DRAWS = 4
"""Placements that are drawn at most for each that may be priced: those that are known cost nothing."""

CONVERGED = 0.1
"""Share of a batch that is new, below which a policy is given up."""


class TrainingSettings(NamedTuple):
    """Settings of a training.

    batch: placements drawn by a policy before its next training.
    rate: of learning.
    passes: gradient steps on a batch; 1: REINFORCE.
    clip: most by which a ratio of probabilities counts.
    penalty: of the divergence.
    memory: of the moving average.
    entropy: weight of the entropy of the policy, which keeps it exploring.
    """

    batch: int = 32
    rate: float = 3e-3
    passes: int = 1
    clip: float = 0.2
    penalty: float = 0.0
    memory: float = 0.9
    entropy: float = 0.01


class BestPlacement(NamedTuple):
    """The fastest placement that was drawn: the device of every group, its time [s], and placements priced."""

    devices: tuple[int, ...]
    seconds: float
    visited: int


class PlacementPolicy(nn.Module):
    """Probabilities of devices for groups of operators.

    features: of every group [groups, features].
    devices: their number.
    width: of the hidden states.
    """

    def __init__(self, features: np.ndarray, devices: int, width: int = 48) -> None:
        super().__init__()
        self.devices, self.width = devices, width
        self.register_buffer("features", torch.as_tensor(features, dtype=torch.float32))
        self.embed = nn.Linear(features.shape[1], width)
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.previous = nn.Embedding(devices + 1, width)
        self.writer = nn.LSTMCell(2 * width, width)
        self.attend = nn.Linear(width, width, bias=False)
        self.choose = nn.Linear(2 * width, devices)

    def forward(self, count: int, chosen: Any = None, generator: Any = None) -> tuple[Any, Any]:
        """Returns devices [count, groups], drawn or as `chosen`, and log-probabilities [count, groups, devices]."""
        read, (hidden, cell) = self.reader(self.embed(self.features)[None])
        hidden, cell = (state[0].expand(count, -1) for state in (hidden, cell))
        read = read.expand(count, -1, -1)
        before = torch.full((count,), self.devices)
        devices, logs = [], []
        for group in range(read.shape[1]):
            hidden, cell = self.writer(torch.cat([read[:, group], self.previous(before)], dim=1), (hidden, cell))
            weights = torch.softmax(torch.einsum("bw,bgw->bg", self.attend(hidden), read), dim=1)
            context = torch.einsum("bg,bgw->bw", weights, read)
            log = torch.log_softmax(self.choose(torch.cat([hidden, context], dim=1)), dim=1)
            drawn = torch.multinomial(log.detach().exp(), 1, generator=generator)[:, 0]
            before = drawn if chosen is None else chosen[:, group]
            devices.append(before)
            logs.append(log)
        return torch.stack(devices, dim=1), torch.stack(logs, dim=1)


def train_placement(
    features: np.ndarray,
    devices: int,
    price: Callable[[np.ndarray], float],
    steps: int,
    seed: int,
    settings: TrainingSettings,
) -> BestPlacement | None:
    """Returns the fastest of `steps` placements drawn while a policy is trained on their times; None if all fail.

    features: of every group of operators [groups, features]. price: seconds of the devices of all groups; infinite: the
    placement fails.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is small: threads cost more than they save
    best: BestPlacement | None = None
    known: dict[bytes, float] = {}
    drawn = 0
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            while len(known) < steps and drawn < MAX_DRAWS * steps and not is_over():
                # A policy that draws what is known finds nothing: the next policy begins from other weights.
                policy = PlacementPolicy(features, devices)
                for placements, seconds in _train(policy, price, steps, generator, settings, known):
                    drawn += len(seconds)
                    place = int(np.argmin(seconds))
                    if math.isfinite(seconds[place]) and (best is None or seconds[place] < best.seconds):
                        best = BestPlacement(tuple(placements[place].tolist()), float(seconds[place]), 0)
                    if is_over():
                        break
    finally:
        torch.set_num_threads(threads)
    return best and best._replace(visited=len(known))


def _train(
    policy: PlacementPolicy,
    price: Callable[[np.ndarray], float],
    steps: int,
    generator: Any,
    settings: TrainingSettings,
    known: dict[bytes, float],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches of placements with their seconds, and trains the policy on each, until hardly any is new, or
    `steps` are priced.

    known: seconds of the placements that are priced; new ones are added.
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.rate)
    baseline: float | None = None
    while len(known) < steps:
        before = len(known)
        count = min(settings.batch, steps - before)
        with torch.no_grad():
            drawn, old = policy(count, generator=generator)
        placements = drawn.numpy()
        for placement in placements:
            if placement.tobytes() not in known:
                known[placement.tobytes()] = price(placement)
        seconds = np.array([known[placement.tobytes()] for placement in placements])
        yield placements, seconds
        if len(known) - before < CONVERGED * count:
            return
        rewards = _reward(seconds)
        mean = float(rewards.mean())
        baseline = mean if baseline is None else settings.memory * baseline + (1 - settings.memory) * mean
        # Rewards are told apart by their spread, so that the unit of time does not matter.
        advantage = torch.as_tensor((rewards - baseline) / (rewards.std() + 1e-9), dtype=torch.float32)
        for _ in range(settings.passes):
            loss = _loss(policy(count, chosen=drawn)[1], old, drawn, advantage[:, None], settings)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()


def _reward(seconds: np.ndarray) -> np.ndarray:
    """Returns the rewards of placements by their seconds; those that fail count as `FAILED` says."""
    finite = np.isfinite(seconds)
    worst = FAILED * float(seconds[finite].mean()) if finite.any() else 1.0
    return -np.sqrt(np.where(finite, seconds, worst))


def _loss(logs: Any, old: Any, drawn: Any, advantage: Any, settings: TrainingSettings) -> Any:
    """Returns what a gradient step lowers. All groups of a placement have its advantage."""
    chosen = logs.gather(2, drawn[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(2).mean()
    if settings.passes == 1:
        return -(advantage * chosen).sum(1).mean() - settings.entropy * entropy
    ratio = (chosen - old.gather(2, drawn[..., None])[..., 0]).exp()
    kept = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    divergence = (old.exp() * (old - logs)).sum(2).mean()
    gain = torch.minimum(ratio * advantage, kept * advantage).sum(1).mean()
    return -gain + settings.penalty * divergence - settings.entropy * entropy

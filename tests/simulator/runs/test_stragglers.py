"""The slowest of many ranks, beside theory and beside the maximum of as many draws."""

from statistics import NormalDist

import numpy as np
import pytest

from meshcast.simulator.runs.stragglers import Episodes, Jitter, normal_quantile

RANKS = (1, 2, 8, 128, 1024, 16_384)


def test_the_normal_quantile_is_that_of_the_standard_library() -> None:
    exceeded = np.array([1e-300, 1e-30, 1e-12, 1e-5, 0.01, 0.0749, 0.0751, 0.3, 0.5, 0.8, 0.99, 1 - 1e-9])
    known = [-NormalDist().inv_cdf(one) for one in exceeded]
    assert np.allclose(normal_quantile(exceeded), known, rtol=1e-13, atol=1e-15)


def theory(distribution: str, sigma: float, ranks: int) -> float:
    """Expected maximum of `ranks` durations: of 1 - F^n, the probability that the maximum exceeds a value."""
    if distribution == "exponential":
        return 1 + sigma * sum(1 / k for k in range(1, ranks + 1))
    grid = np.linspace(-9.0, 9.0, 180_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    below = np.cumsum(density) * (grid[1] - grid[0])
    highest = ranks * density * np.clip(below, 0, 1) ** (ranks - 1)
    values = np.exp(sigma * grid) if distribution == "lognormal" else 1 + sigma * grid
    return float((values * highest).sum() / highest.sum())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("distribution", ["normal", "lognormal", "exponential"])
def test_the_expected_maximum_is_that_of_theory(distribution, ranks: int) -> None:
    jitter = Jitter(0.1, distribution, ranks)
    known = theory(distribution, 0.1, ranks)
    drawn = jitter.draw(np.random.default_rng(1), 40_000)
    assert jitter.mean_duration() == pytest.approx(known, rel=2e-3)
    # The excess over the forecast, not the whole duration, within 2 %.
    if ranks > 1:
        assert drawn.mean() - 1 == pytest.approx(known - 1, rel=0.02)


def test_draws_have_the_distribution_of_the_maximum_of_as_many() -> None:
    rng = np.random.default_rng(3)
    drawn = np.sort(Jitter(0.3, "lognormal", 64).draw(rng, 20_000))
    maxima = np.sort(np.exp(0.3 * rng.standard_normal((20_000, 64))).max(axis=1))
    shares = np.array([0.01, 0.1, 0.5, 0.9, 0.99])
    assert np.quantile(drawn, shares) == pytest.approx(np.quantile(maxima, shares), rel=0.02)


def test_without_jitter_steps_are_those_of_the_forecast() -> None:
    assert Jitter(0.0, "normal", 100).draw(np.random.default_rng(0), 3).tolist() == [1.0, 1.0, 1.0]
    assert Jitter().mean_duration() == 1.0


def test_the_more_ranks_vary_the_longer_is_a_step() -> None:
    means = [Jitter(sigma, "lognormal", 64).mean_duration() for sigma in (0.0, 0.1, 0.5, 1.0, 1.5)]
    assert means == sorted(set(means))


def test_waits_for_data_are_exponential_and_other_pauses_fixed() -> None:
    rng = np.random.default_rng(0)
    assert Episodes(10.0, pause=4.0).draw_pause(rng) == 4.0
    waits = [Episodes(10.0, pause=4.0, data=True).draw_pause(rng) for _ in range(4000)]
    assert np.mean(waits) == pytest.approx(4.0, rel=0.05) and np.std(waits) == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize(("distribution", "sigma"), [("normal", 0.1), ("lognormal", 0.2), ("exponential", 0.1)])
def test_ranks_that_meet_rarely_wait_less(distribution, sigma: float) -> None:
    """Local SGD: the slow-down is E[max over n of the sum of H durations] / (H E[t]) and shrinks as H grows."""
    rng, before = np.random.default_rng(7), 1e9
    draws = {
        "normal": lambda size: 1 + sigma * rng.standard_normal(size),
        "lognormal": lambda size: np.exp(sigma * rng.standard_normal(size)),
        "exponential": lambda size: 1 + sigma * rng.standard_exponential(size),
    }
    for steps in (1, 2, 8, 32):
        jitter = Jitter(sigma, distribution, 64, steps)
        known = float(draws[distribution]((2000, 64, steps)).mean(axis=2).max(axis=1).mean())
        mean = Jitter(sigma, distribution, 1, steps).mean_duration()
        assert jitter.mean_duration() - mean == pytest.approx(known - mean, rel=0.04)
        drawn = jitter.draw(np.random.default_rng(2), 40_000 // steps * steps)
        assert drawn.mean() == pytest.approx(jitter.mean_duration(), rel=0.01)
        assert jitter.mean_duration() < before
        before = jitter.mean_duration()

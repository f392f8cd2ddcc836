"""Fits find the coefficients of generated data, whatever noise is in it, and never leave their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from meshcast.simulator.costs.coefficients import ceil_div, coefficient, coefficients, estimate_sigma, maximum, minimum
from meshcast.validation.calibration.fit import fit
from meshcast.validation.calibration.kernels.calibrate import _fit
from meshcast.validation.calibration.tables.calibrated import make_section, sigmas_by_library
from meshcast.validation.calibration.tables.rows import RowForecasts
from meshcast.validation.calibration.write import find_sigmas, nine_of_ten, text


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = size / (rate share) + launch"""

    rate: float = coefficient("items a second", 1.0, 1e9, 1e3)
    bend: float = coefficient("more at the end", 0.0, 1.0, 0.5)
    other: float = coefficient("of work that nobody measured", 0.0, 1.0, 0.5)
    share: float = coefficient("of the rate", 0.1, 1.0, 0.9, "library")
    launch: float = coefficient("before the first item [s]", 1e-7, 1e-2, 1e-5, "library")
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True)
class Rows:
    library: str
    size: np.ndarray
    seconds: np.ndarray


def line(rows, model):
    return rows.size / (model.rate * model.share) * (1 + model.bend) + model.launch


def made(library, share, launch, noise=0.0, seed=1, count=400):
    draw = np.random.default_rng(seed)
    size = 10 ** draw.uniform(0, 6, count)
    model = Line(rate=1e6, bend=0.0, other=0.0, share=share, launch=launch)
    exact = line(Rows(library, size, size), model)
    return Rows(library, size, exact * np.exp(noise * draw.standard_normal(count)))


def test_finds_the_coefficients_of_generated_data():
    rows = [made("slow", 0.4, 3e-4), made("fast", 0.8, 5e-5)]
    found = fit(Line, rows, line, held={"rate": 1e6, "bend": 0.0})
    assert found.libraries["slow"]["share"] == pytest.approx(0.4, rel=1e-3)
    assert found.libraries["fast"]["share"] == pytest.approx(0.8, rel=1e-3)
    assert found.libraries["slow"]["launch"] == pytest.approx(3e-4, rel=1e-3)
    assert found.libraries["fast"]["launch"] == pytest.approx(5e-5, rel=1e-3)


def test_kernels_that_are_not_tuned_say_nothing_of_the_gpu():
    """Alone, they are all that there is."""
    tuned, other = (
        SimpleNamespace(**vars(made(library, share, 1e-4, count=40)), tuned=library == "tuned", own=())
        for library, share in (("tuned", 0.8), ("other", 0.2))
    )
    both = _fit(Line, [tuned, other], line, {})
    assert both.values == fit(Line, [tuned], line).values and both.libraries.keys() == {"tuned", "other"}
    assert _fit(Line, [other], line, {}).values == fit(Line, [other], line).values


def test_what_rows_do_not_determine_stays_near_its_known_value():
    """`rate` and `share` act as a product, and `other` not at all: only the prior tells them apart."""
    rows = made("one", 0.5, 1e-4, noise=0.03)
    prior = {("rate", None): 2e6, ("other", None): 0.2, ("share", "one"): 0.25, ("launch", "one"): 1e-3}
    found = fit(Line, [rows], line, held={"bend": 0.0}, prior=prior)
    assert found.values["rate"] == pytest.approx(2e6, rel=0.01)
    assert found.libraries["one"]["share"] == pytest.approx(0.25, rel=0.01)
    assert found.values["other"] == 0.2
    assert found.libraries["one"]["launch"] == pytest.approx(1e-4, rel=0.03), "many rows outweigh it"
    free = fit(Line, [rows], line, held={"bend": 0.0})
    assert free.values["rate"] != pytest.approx(2e6, rel=0.1)


def test_outliers_hardly_move_it():
    rows = made("one", 0.5, 1e-4, noise=0.03)
    rows.seconds[::10] *= 5
    found = fit(Line, [rows], line, held={"rate": 1e6, "bend": 0.0})
    assert found.libraries["one"]["share"] == pytest.approx(0.5, rel=0.03)
    assert found.libraries["one"]["launch"] == pytest.approx(1e-4, rel=0.03)


def test_stays_within_bounds_and_states_its_uncertainty():
    rows = made("one", 0.5, 1e-6, noise=0.02)  # long rows only: they do not determine the launch
    keep = rows.size > 1e4
    found = fit(Line, [Rows("one", rows.size[keep], rows.seconds[keep])], line, held={"rate": 1e6, "bend": 0.0})
    known = coefficients(Line)
    for name, value in found.libraries["one"].items():
        if name in known:
            assert known[name].low <= value <= known[name].high
    assert found.library_errors["one"]["share"] < 0.05
    assert found.library_errors["one"]["launch"] > 0.2


def test_the_same_rows_give_the_same_fit():
    rows = [made("a", 0.4, 3e-4, 0.1), made("b", 0.8, 5e-5, 0.1, seed=2)]
    assert fit(Line, rows, line) == fit(Line, rows, line)


def test_sigmas_hold_nine_of_ten_rows():
    draw = np.random.default_rng(3)
    seconds = 10 ** draw.uniform(-6, -2, 4000)
    launch = np.full(4000, 1e-6)
    share = launch / seconds
    measured = seconds * np.exp((0.05 + 0.25 * share) * draw.standard_normal(4000))
    sigmas = find_sigmas(seconds, measured, launch)
    model = Line(1.0, 0.0, 0.0, 1.0, 0.0, **sigmas)
    far = np.abs(np.log(measured / seconds)) / (1.645 * estimate_sigma(model, seconds, launch))
    for some in (share > 0.3, share < 0.3):
        assert np.mean(far[some] <= 1) == pytest.approx(0.9, abs=0.025)


@pytest.mark.parametrize(("count", "rank"), [(4, 4), (9, 9), (10, 10), (19, 18), (99, 90)])
def test_nine_of_ten_further_values_lie_below_the_rank_that_leaves_a_tenth_above(count, rank):
    assert nine_of_ten(np.arange(count, 0, -1)) == rank


def test_a_kind_of_few_rows_has_the_larger_of_the_sigmas_of_its_library_and_of_its_kind():
    """Five backward rows of `b` are 0.02 off; those of `a` lie 0.4 off, the forward rows of both 0.1."""
    groups = [
        ("a", "forward", 0.1, 40),
        ("a", "backward", 0.4, 40),
        ("b", "forward", 0.1, 40),
        ("b", "backward", 0.02, 5),
    ]
    found = sigmas_by_library([priced_rows(*group) for group in groups])
    narrow, wide = 0.1 / 1.645, 0.4 / 1.645
    assert found["b"]["sigma"] == pytest.approx(narrow, rel=0.01)
    assert found["b"]["kinds"]["forward"]["sigma"] == pytest.approx(narrow, rel=0.01)
    assert found["a"]["kinds"]["backward"]["sigma"] == found["b"]["kinds"]["backward"]["sigma"]
    assert found["b"]["kinds"]["backward"]["sigma"] == pytest.approx(wide, rel=0.01)


def priced_rows(library, kind, far, count):
    rows = SimpleNamespace(library=library, kind=kind, index=np.arange(count), seconds=np.full(count, np.exp(far)))
    return rows, RowForecasts(np.ones(count), np.zeros(count), np.zeros(count))


def test_unmeasured_coefficients_are_left_out():
    rows = made("one", 0.5, 1e-6, noise=0.02)
    keep = rows.size > 1e5
    found = fit(Line, [Rows("one", rows.size[keep], rows.seconds[keep])], line, held={"rate": 1e6, "bend": 0.0})
    sigmas = {"sigma": 0.1, "sigma_short": 0.2}
    pairs = [(SimpleNamespace(library="one", index=np.arange(rows)), "a paper") for rows in (3, 4)]
    data = make_section(Line, found, {"one": sigmas}, {"bf16": sigmas}, pairs, {"one": "bf16"})
    library = data["libraries"]["one"]
    assert (
        set(library["coefficients"]) == {"share", "launch"} and library["rows"] == 7 and library["source"] == "a paper"
    )
    assert library["coefficients"]["share"]["meaning"] == "of the rate"
    assert data["common"]["coefficients"] == {} and data["unnamed"] == {"bf16": sigmas}
    assert "share: {value: " in text("A thing", {"line": data})


def test_numbers_and_arrays_alike():
    one, other = np.array([1.0, 5.0]), np.array([2.0, 3.0])
    assert minimum(one, other).tolist() == [minimum(1.0, 2.0), minimum(5.0, 3.0)]
    assert maximum(one, 2.0).tolist() == [maximum(1.0, 2.0), maximum(5.0, 2.0)]
    assert ceil_div(7, 2) == 4 and ceil_div(8, 2) == 4 and ceil_div(np.array([7, 8]), 2).tolist() == [4, 4]

"""How far a forecast exceeds the best published utilisation, and which of its terms carry it there.

With T seconds of the model's FLOPs at peak on all GPUs, MFU = T / step. So 1/MFU is the sum of the parts of the step on
its slowest device in units of T, and 1/MFU of two forecasts differs by the sum of the differences of their parts:
exposed communication of every axis, bubble, memory-bound kernels, optimizer, host. The part of GEMMs and attention is
the product of three factors, whose logarithms divide its difference (logarithmic mean Divisia index, Ang 2004, doi
10.1016/j.enpol.2003.10.010):

    FLOPs executed per FLOP of the model (recomputation),  FLOPs of the slowest device over the mean (imbalance of
    stages),  seconds at peak over seconds (efficiency of kernels), inverted
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.program.categories import COMPUTING, EXPOSED, HOST
from meshcast.simulator.report.report import COMMUNICATION, Report
from meshcast.validation.published.measured_range.envelope import BestRun, Envelope, published_envelope

MATRIX = ("gemm", "attention")
NAMED_TERMS = 3
"""Terms that a sentence names."""

PARTS = {
    "memory_bound": "memory-bound kernels take",
    "optimizer": "the optimizer takes",
    HOST: "waiting for the host takes",
    "bubble": "the pipeline bubble takes",
    "idle": "idling takes",
    **{axis: f"exposed {COMMUNICATION[axis]} communication takes" for axis in EXPOSED},
}
"""Parts of a step in words."""

FACTORS = {
    "recomputation": "kernels execute {:.2f} instead of {:.2f} FLOPs per FLOP of the model",
    "imbalance": "the slowest device computes {:.2f} instead of {:.2f} times the mean",
    "efficiency": "GEMMs and attention run at {:.0%} instead of {:.0%} of peak",
}
"""Factors of the part of GEMMs and attention in words."""


@dataclass(frozen=True)
class Term:
    """A part of the step, or a factor of its GEMMs and attention, of a forecast and of the envelope's run.

    name: a part of the breakdown, or a key of `FACTORS`.
    own, published: shares of the step; values of a factor.
    saved: by how much the term makes 1/MFU smaller than that of the envelope's run; negative: larger.
    """

    name: str
    own: float
    published: float
    saved: float

    def __str__(self) -> str:
        if self.name in FACTORS:
            return FACTORS[self.name].format(self.own, self.published)
        return f"{PARTS[self.name]} {self.own:.1%} instead of {self.published:.1%} of the step"


@dataclass(frozen=True)
class BeyondEnvelope:
    """A forecast beyond the best published utilisation.

    mfu: of the forecast, in the convention of PaLM.
    envelope: that it exceeds.
    excess: by what share it does, in the convention in which it does by less: PaLM's counts attention in full, so a
        long sequence alone raises it.
    forecast_mfu: of the envelope's run, as meshcast forecasts it.
    terms: of both forecasts, those that save most first; `saved` of all of them adds up to the difference of 1/MFU.
    """

    mfu: float
    envelope: Envelope
    excess: float
    forecast_mfu: float
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        best = self.envelope.best
        borrowed = ", borrowed" if self.envelope.borrowed else ""
        whose = f"{self.envelope.gpu}, {self.envelope.number}, {self.envelope.kind}{borrowed}"
        said = (
            f"MFU {self.mfu:.1%} is {100 * (self.mfu - best.mfu):.1f} points beyond the best published one, "
            f"{best.mfu:.1%} of {best.run} on {best.gpus:,} GPUs ({whose}), whose forecast is {self.forecast_mfu:.1%}"
        )
        named = [str(term) for term in self.terms[:NAMED_TERMS] if term.saved > 0]
        return f"{said}: {'; '.join(named)}." if named else f"{said}."


def beyond_envelope(report: Report, shared_work: SharedWork | None = None) -> BeyondEnvelope | None:
    """Measures how far a forecast exceeds the best published utilisation of its GPU, number format and class.

    It is beyond if its MFU exceeds the envelope in both conventions, with attention in full and by half. Only then is
    the envelope's run forecast. None within the envelope, and where there is none.

    shared_work: that of `report`, if it was forecast with a calibration of its own.
    """
    envelope = published_envelope(report.job)
    if envelope is None:
        return None
    excess = min(report.mfu["palm"] / envelope.mfu, report.mfu["causal"] / envelope.causal) - 1
    if excess <= 0:
        return None
    best = envelope.best
    published = simulate(best.job, shared_work=shared_work) if shared_work else _forecast_run(best)
    terms = compare_terms(report, published)
    return BeyondEnvelope(report.mfu["palm"], envelope, excess, published.mfu["palm"], tuple(terms))


@lru_cache(maxsize=4)
def _forecast_run(best: BestRun) -> Report:
    """Returns the forecast of a run of the envelope, with shipped calibrations."""
    return simulate(best.job)


def compare_terms(report: Report, published: Report) -> list[Term]:
    """Returns the terms of two forecasts, those that save most in the first forecast first."""
    parts, theirs = report.parts, published.parts
    unit, their_unit = (forecast.step_time * forecast.mfu["palm"] for forecast in (report, published))
    terms = [
        Term(name, parts[name] / report.step_time, theirs[name] / published.step_time, theirs[name] / their_unit - part)
        for name in (*(kind for kind in COMPUTING if kind not in MATRIX), *EXPOSED, HOST, "bubble", "idle")
        for part in (parts[name] / unit,)
    ]
    factors, their_factors = _factors(report), _factors(published)
    mean = _logarithmic_mean(_matrix_seconds(report) / unit, _matrix_seconds(published) / their_unit)
    for name, value in factors.items():
        inverse = -1.0 if name == "efficiency" else 1.0
        saved = inverse * mean * math.log(their_factors[name] / value)
        terms.append(Term(name, value, their_factors[name], saved))
    return sorted(terms, key=lambda term: -term.saved)


def _factors(report: Report) -> dict[str, float]:
    """Returns the three factors of the part of GEMMs and attention."""
    kinds, unit = [COMPUTING.index(name) for name in MATRIX], report.step_time * report.mfu["palm"]
    flops = report.sums[:, kinds, SUMS.index("flops")].sum(axis=1)
    weights = report.play.plan.ranks.device_weights
    imbalance = float(flops[report.device] / ((flops * weights).sum() / len(flops)))
    recomputation = report.hfu / report.mfu["palm"]
    efficiency = recomputation * imbalance * unit / _matrix_seconds(report)
    return {"recomputation": recomputation, "imbalance": imbalance, "efficiency": efficiency}


def _matrix_seconds(report: Report) -> float:
    return sum(report.parts[name] for name in MATRIX)


def _logarithmic_mean(first: float, second: float) -> float:
    return first if math.isclose(first, second, rel_tol=1e-9) else (first - second) / math.log(first / second)


def describe_envelope(envelope: Envelope) -> dict[str, Any]:
    """Returns an envelope as plain data for ``--json``."""
    best = envelope.best
    return {
        "mfu": {"palm": envelope.mfu, "causal": envelope.causal},
        "hfu": best.hfu,
        "run": best.run,
        "gpus": best.gpus,
        "source": best.source,
        "printed": best.printed,
        "of": {"gpu": envelope.gpu, "format": envelope.number, "class": envelope.kind},
        "borrowed": envelope.borrowed,
        "large": envelope.large,
        "runs": envelope.runs,
    }

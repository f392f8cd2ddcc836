"""Reports: their display at a Python prompt."""

from meshcast.simulator import simulate


def test_a_prompt_shows_the_forecast() -> None:
    report = simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
    assert repr(report) == f"<Report: llama3-8b on dgx-h100:1, {report.step_time:.4g} s a step, fits>"
    misfit = simulate({"model": "llama3-70b", "cluster": "dgx-h100:1"})
    assert repr(misfit).endswith("does not fit>")

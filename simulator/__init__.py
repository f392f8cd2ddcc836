"""meshcast: forecasts of LLM training on a GPU cluster.

>>> from simulator import simulate
>>> report = simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
>>> report.fits
True
"""

from simulator.job import Job, load_job
from simulator.report.report import Report
from simulator.simulate import simulate

__all__ = ["Job", "Report", "load_job", "simulate"]

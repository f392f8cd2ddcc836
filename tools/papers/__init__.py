"""Figures and tables of papers, redrawn: what was published beside the forecast of the same jobs.

A file of `figures/` is a figure: its source, its published points, and the job of each point, most often one of a
file of claims. ``make papers`` runs them all, draws them into out/papers/, and writes docs/papers.md.
"""

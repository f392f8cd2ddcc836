"""Pages of docs/ and of the README that are made from forecasts (`make docs-accuracy`, `make docs-readme`), and images
of docs/plots.md (`make docs-plots`)."""

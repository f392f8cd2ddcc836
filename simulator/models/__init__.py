"""Models: presets, Hugging Face configurations, parameter and FLOP counts, and the architecture as modules."""

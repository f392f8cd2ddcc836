"""Models: presets, Hugging Face configurations, parameter and FLOP counts, and the modules that a model is built of."""

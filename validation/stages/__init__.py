"""Real pipeline stages, one device of the pipeline after another, and the step that their times put together."""

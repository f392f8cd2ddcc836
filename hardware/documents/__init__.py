"""Input documents: YAML and JSON with line numbers, and errors of pydantic in a single sentence."""

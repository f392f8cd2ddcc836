"""Dynamic programs over the layers of a model."""

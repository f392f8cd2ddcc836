"""The fields of the shape of a model, and the relations between them that must hold."""

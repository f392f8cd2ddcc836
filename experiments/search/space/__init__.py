"""The space of a search: open fields of a job, their values, the points that they span, and which of them count."""

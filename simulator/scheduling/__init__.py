"""Pipeline schedules: their base class, and the machinery that several schedules share."""

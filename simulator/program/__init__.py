"""What every device executes: timetable, tasks composed of blocks of priced ops, and their memory profiles."""

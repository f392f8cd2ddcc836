"""What every device executes: timetable, tasks made of blocks of priced ops, and their memory profiles."""

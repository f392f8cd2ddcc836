"""What to change in a job: its neighbours one change at a time, the best of them together, and the edited launch file."""

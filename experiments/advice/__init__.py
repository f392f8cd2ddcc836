"""What to change in a job: its neighbours alone and together, and the edited launch file."""

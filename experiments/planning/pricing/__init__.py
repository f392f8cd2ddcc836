"""The problem that a job states: operators and stages at the prices of the forecast, and plans as job files."""

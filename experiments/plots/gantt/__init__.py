"""Parts of Gantt charts: the bars of a device, windows of time, their legend."""

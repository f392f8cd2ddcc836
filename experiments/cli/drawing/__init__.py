"""``meshcast plot``, and the width of plots, an option of every command that draws one."""

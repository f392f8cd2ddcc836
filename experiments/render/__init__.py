"""What views and answers look like: on a terminal, in a notebook, in Markdown."""

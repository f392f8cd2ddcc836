"""What views and answers look like, a room for each medium: a terminal, a notebook, figures, HTML, Markdown."""

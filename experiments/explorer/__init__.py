"""``meshcast explore``: a local page on which a person changes a job by controls and sees at once what follows.

``explored_job`` is the model, controls in and answers out, without a browser; ``background_search`` searches the best
plan in a process of its own; ``page`` shows both by Bokeh with the sections of ``meshcast report``; ``server`` serves
the page on this machine alone.
"""

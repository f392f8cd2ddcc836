"""``meshcast report``: a forecast, a sweep or a search as a self-contained HTML page, drawn by Bokeh."""

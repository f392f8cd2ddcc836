"""``meshcast report``: a forecast, a sweep or a search as one self-contained HTML page, drawn by Bokeh."""

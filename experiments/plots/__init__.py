"""Figures of reports. One house style (`style`); matplotlib is imported only when a figure is drawn."""

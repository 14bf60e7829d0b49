"""Frames in and out, the time axis, missing values, windows, splits, the Lightning data module, the catalogue.

May import: errors, notices.
"""

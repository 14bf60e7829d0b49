"""Frames in and out, windows, splits and the benchmark catalogue."""

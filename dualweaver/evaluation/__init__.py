"""Scores and figures of a fitted pipeline: backtest, plots.

May import: forecast, data, errors.
"""

"""The fitted pipeline: arrays in, forecasts out, calibrated quantiles; saving and loading.

May import: settings, adapters, backbones, data, compute, errors, notices.
"""

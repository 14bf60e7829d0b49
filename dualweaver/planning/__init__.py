"""Where time and memory of training go, and the fastest way to train within a budget.

May import: settings, adapters, method, backbones, data, compute, errors.
"""

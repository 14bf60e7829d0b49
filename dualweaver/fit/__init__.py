"""From arrays to a fitted pipeline: windows, stages, the Lightning module, and all that validation decides
(`selection`).

May import: planning, forecast, settings, adapters, method, backbones, data, compute, errors, notices.
"""

"""Benchmarks of attention: cases × providers give records, tables and a plot; tuning of tiles.

``cases``: the workloads. ``providers``: the implementations. ``measure``: timing and verification. ``cache_ops``: ops
of the cache. ``run``: cases × providers. ``report``: tables and plot. ``tune``: a sweep of the GPU kernels' tiles.
"""

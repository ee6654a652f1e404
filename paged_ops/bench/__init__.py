"""Measurements of attention: cases × providers, records as data, tables and plots of them, and the tuning of tiles.

``cases`` says what is measured, ``providers`` by whom, ``measure`` how, ``cache_ops`` measures the ops of the cache,
``run`` puts all together, ``report`` makes tables and plots of the records, ``tune`` sweeps the tiles of the GPU
kernels.
"""

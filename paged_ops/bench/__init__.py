"""Measurements of attention: cases × providers, records as data, tables and plots of them, and the tuning of tiles.

``cases`` says what is measured, ``providers`` by whom, ``measure`` how, ``run`` puts them together, ``report`` makes
tables and plots of the records, ``tune`` sweeps the tiles of the GPU kernels.
"""

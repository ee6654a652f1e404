"""Models of other libraries on paged_ops. Each package imports its library, so none is imported here.

``expanded``: prompts over latent caches, for all of them.
"""

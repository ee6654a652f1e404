"""SGLang with these ops: ``plugin`` makes the backend known, ``backend`` is it.

The backend is imported when an engine creates it: SGLang loads plugins in every process, before models and kernels.
"""

"""Ahead-of-time compilation of every kernel variant that ships, for GPUs that need not be present."""

"""Models of other libraries on paged_ops. Each module imports its library, so none is imported here."""

"""One module a device: how each op runs there. :data:`paged_ops.registry.LOWERINGS` says which, and imports it late."""

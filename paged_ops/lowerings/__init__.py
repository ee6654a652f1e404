"""One module a device: how each op runs there. :data:`paged_ops.op.LOWERINGS` says which, and imports it late."""

"""How each op runs: one module per device, imported late. :data:`paged_ops.registry.LOWERINGS` names them."""

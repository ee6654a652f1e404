"""One step's batch: its metadata, the builder that fills it, and helpers that split, reorder and rewrite batches.

``step`` has the metadata that a model reads, ``builder`` fills it from a :class:`paged_ops.Batch`, ``buffers`` has its
memory.
"""

from paged_ops.metadata.batch import (
    Batch,
    Ints,
    Reorderable,
    VirtualBatches,
    block_ids_from_addresses,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    swaps_to_split_decodes_and_prefills,
    use_cascade_attention,
)
from paged_ops.metadata.builder import AttentionMetadataBuilder
from paged_ops.metadata.hyperparameters import (
    LayerHyperparameters,
    collect_layer_hyperparameters,
    common_layer_hyperparameters,
)
from paged_ops.metadata.step import (
    AttentionMetadata,
    CascadeMetadata,
    ContextMetadata,
    GraphSupport,
    PoolMetadata,
    advance_decodes,
    split_decodes_and_prefills,
)

__all__ = [
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "Batch",
    "CascadeMetadata",
    "ContextMetadata",
    "GraphSupport",
    "Ints",
    "LayerHyperparameters",
    "PoolMetadata",
    "Reorderable",
    "VirtualBatches",
    "advance_decodes",
    "block_ids_from_addresses",
    "collect_layer_hyperparameters",
    "common_layer_hyperparameters",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
    "swaps_to_split_decodes_and_prefills",
    "use_cascade_attention",
]

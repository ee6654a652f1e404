"""Steps of a model captured in CUDA (HIP) graphs, and replayed for every batch that fits.

A captured step reads its batch from tensors that never move, so replaying it costs one launch. That needs no knowledge
of the model: :class:`DecodeGraphs` takes any callable step, eager or compiled, that reads no value on the host. The
attention ops balance their work on the device, so one graph is right and fast for all lengths.

::

    graphs = DecodeGraphs(step, kv_cache, max_num_seqs=64, sample=lambda logits: logits.argmax(-1))
    print(graphs.capture())
    logits = graphs.replay(batch, input_ids, lookahead=8)  # pads to the next captured size
    logits = graphs.replay_next()  # one more token for each sequence: nothing but a launch, up to 8 times

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary, B tokens per block.

Sources of the ideas: capture sizes, one memory pool for all of them and graphs of the pieces between attention are
vLLM's; graphs without a copy of their result come from inductor's CUDA graph trees.
"""

from paged_ops.graphs.capture import CaptureError, CaptureReport, CaptureSession, Graph
from paged_ops.graphs.inputs import StepInputs, build_inputs, step_builder
from paged_ops.graphs.modes import GraphKey, GraphMode, capture_sizes, choose_mode
from paged_ops.graphs.pieces import ATTENTION_OPS, Pieces, check_pieces_exist, compile_pieces
from paged_ops.graphs.runner import DecodeGraphs, GraphStats, Step

__all__ = [
    "ATTENTION_OPS",
    "CaptureError",
    "CaptureReport",
    "CaptureSession",
    "DecodeGraphs",
    "Graph",
    "GraphKey",
    "GraphMode",
    "GraphStats",
    "Pieces",
    "Step",
    "StepInputs",
    "build_inputs",
    "capture_sizes",
    "check_pieces_exist",
    "choose_mode",
    "compile_pieces",
    "step_builder",
]

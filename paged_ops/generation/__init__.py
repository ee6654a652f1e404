"""Generation with continuous batching over a paged cache, for any model that can run one ragged step.

``loop`` has :class:`GenerationLoop`. One of its steps: ``scheduler`` chooses the tokens, ``model_step`` runs the model,
``sampling`` chooses the next tokens, ``changes`` makes the changes that follow.
"""

from paged_ops.generation.loop import GenerationLoop
from paged_ops.generation.model_step import ModelStep
from paged_ops.generation.params import SamplingParams, TokenLogprobs
from paged_ops.generation.request import GenerationStats, NewToken, Output, TokenStream

__all__ = [
    "GenerationLoop",
    "GenerationStats",
    "ModelStep",
    "NewToken",
    "Output",
    "SamplingParams",
    "TokenLogprobs",
    "TokenStream",
]

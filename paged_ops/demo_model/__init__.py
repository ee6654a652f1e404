"""The demo model: a Llama of 1.9 million parameters that comes with the package, so that examples download nothing."""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> str:
    """The folder of the demo model, for ``from_pretrained`` of transformers: model and tokenizer."""
    return str(Path(__file__).parent)

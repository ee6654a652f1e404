"""Serve a model in SGLang's engine on the CPU, in a process of its own: ``python -m tests.integrations.sglang.serve``.

Reads a JSON object from standard input: ``engine``, the keyword arguments of ``sglang.Engine``, and ``loads``, lists of
prompts that are served one after the other. Writes the answers of each load to the file ``out``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIXED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "mem_fraction_static": 0.05,
    "log_level": "warning",
    "random_seed": 0,
}


def main() -> None:
    import sglang

    asked = json.load(sys.stdin)
    engine = sglang.Engine(**{**FIXED, **asked["engine"]})
    params = {"temperature": 0.0, "max_new_tokens": asked["max_new_tokens"], "ignore_eos": True}
    answers = []
    for prompts in asked["loads"]:
        found = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        answers.append(
            [
                {
                    "tokens": each["output_ids"],
                    "cached": each["meta_info"]["cached_tokens"],
                    "logprobs": [float(logprob) for logprob, *_ in each["meta_info"]["output_token_logprobs"]],
                }
                for each in found
            ]
        )
    Path(asked["out"]).write_text(json.dumps(answers))
    engine.shutdown()


if __name__ == "__main__":
    main()

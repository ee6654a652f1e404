"""A few steps of TRL's GRPO on the CPU whose rollouts come from :class:`paged_ops.generation.GenerationLoop`.

Run as ``python examples/grpo.py``, with ``pip install trl`` (written for TRL 1.16, whose ``rollout_func`` is
experimental). The rollout's log-probabilities are those of a batch-invariant model, so a second computation without
gradients has the same bits: importance ratios against it are exactly 1. TRL's own forward, with gradients, is not
batch-invariant. After each rollout the model is unwrapped, so TRL trains the plain model. A line per rollout::

    rollout 1: 8 completions, C of C log-probabilities are equal in one forward pass
"""

import contextlib
import itertools
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from paged_ops import demo_model
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM

STEPS, GENERATIONS, NEW_TOKENS = 3, 4, 16
seeds = itertools.count()
rollouts = itertools.count(1)


@contextlib.contextmanager
def paged_model(trainer):
    """The trainer's model, wrapped for inference; afterwards it is as before."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, model.training)
        wrapper = vars(model).pop("forward", None)  # of accelerate, which converts results
        if wrapper is not None:
            stack.callback(setattr, model, "forward", wrapper)
        paged = PagedCausalLM(model.eval(), batch_invariant=True)
        stack.callback(paged.unwrap)
        yield paged


def rollout(prompts, trainer):
    """One completion for each prompt; TRL repeats a prompt for each of its generations."""
    prompt_ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
    with paged_model(trainer) as paged:
        with GenerationLoop(paged, paged.allocate_kv_cache(num_blocks=256)) as loop:
            ids = [
                loop.submit(
                    each, SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=next(seeds), logprobs=0)
                )
                for each in prompt_ids
            ]
            found = loop.run()
        outputs = [found[each] for each in ids]
        pairs = zip(prompt_ids, outputs, strict=True)
        again = [paged.token_logprobs([*prompt, *output])[len(prompt) - 1 :] for prompt, output in pairs]
    logprobs = [[each.logprob for each in output.logprobs] for output in outputs]
    same = torch.cat(again) == torch.tensor([each for row in logprobs for each in row])
    print(
        f"rollout {next(rollouts)}: {len(outputs)} completions,"
        f" {int(same.sum())} of {len(same)} log-probabilities are equal in one forward pass"
    )
    return {"prompt_ids": prompt_ids, "completion_ids": [list(each) for each in outputs], "logprobs": logprobs}


def reward(completions, **kwargs):
    """More letters e."""
    return [float(text.count("e")) for text in completions]


tokenizer = AutoTokenizer.from_pretrained(demo_model.path())
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(demo_model.path(), dtype=torch.float32)
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    max_steps=STEPS,
    num_generations=GENERATIONS,
    per_device_train_batch_size=2 * GENERATIONS,
    max_completion_length=NEW_TOKENS,
    use_cpu=True,
    bf16=False,
    report_to="none",
    logging_strategy="no",
    save_strategy="no",
    disable_tqdm=True,
)
prompts = Dataset.from_dict({"prompt": ["Once upon a time", "The little dog", "In the garden", "One day"]})
GRPOTrainer(model, reward, args=config, train_dataset=prompts, processing_class=tokenizer, rollout_func=rollout).train()

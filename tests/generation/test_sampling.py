"""Draws and penalties for all rows at once, against what they mean; the fields of SamplingParams; prompts."""

import copy
import gc
import math
import weakref
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, SamplingParams, sampling
from paged_ops.generation.distribution import draw, key_of, penalize, random_key, uniforms
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, B, D, K, V, assert_empty, make_loop, toy_step

GENERATOR = torch.Generator().manual_seed(5)


def keys(count: int) -> Tensor:
    return torch.tensor([random_key(key_of(7, 0), position) for position in range(count)])


def drawn_by_definition(scores: Tensor, temperature: float, key: int, k: int, top_p: float, min_p: float) -> list[int]:
    """The token of one row by the rule of distribution.py, in exact arithmetic over float64's likelihoods; none where
    it is so close that rounding decides."""
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))
    likely = [Fraction(math.exp((float(each) - float(scores[order[0]])) / temperature)) for each in scores]
    if k:
        order = [token for token in order if scores[token] >= scores[order[min(k, len(order)) - 1]]]
    limit = Fraction(top_p) * sum(likely[token] for token in order)
    left = [token for token in order if likely[token] >= min_p]
    while True:
        number = Fraction(float(uniforms(torch.tensor([key]))))
        total, reached = sum(likely[token] for token in left), Fraction(0)
        for token in sorted(left):
            reached += likely[token]
            if reached > number * total:
                break
        before = sum((likely[each] for each in left[: left.index(token)]), Fraction(0))
        target, first = number * total, reached - likely[token]
        if min(reached - target, target - first) < total / 10**6 or (before and abs(before - limit) < limit / 10**6):
            return []
        if top_p == 1 or not before or before < limit:
            return [token]
        left, key = left[: left.index(token)], key + 0x9E3779B97F4A7C15 & 2**64 - 1
        key -= key >> 63 << 64


DRAWS = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.1, "temperature": 2.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize("limits", DRAWS, ids=str)
def test_draws_by_definition(limits: dict[str, Any]) -> None:
    """One by one, with many equal scores and with masked ones."""
    count, limits = 20, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    scores = torch.randn(count, 300, generator=GENERATOR).mul(2).bfloat16().float()
    scores[::3, ::2] = -torch.inf
    columns = {name: torch.full((count,), value) for name, value in limits.items()}
    columns["top_p"] = torch.full((count,), limits["top_p"], dtype=torch.float64)
    found = draw(scores, keys=keys(count), largest_k=limits["top_k"], **columns).tolist()
    wanted = [
        drawn_by_definition(row, limits["temperature"], int(key), limits["top_k"], limits["top_p"], limits["min_p"])
        for row, key in zip(scores, keys(count), strict=True)
    ]
    assert sum(map(len, wanted)) >= count - 2
    assert [[each] for each, token in zip(found, wanted, strict=True) if token] == [each for each in wanted if each]


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.6, 0.95])
def test_top_p_leaves_the_distribution_of_the_fewest_likeliest_tokens(top_p: float) -> None:
    """Against float64, with equal scores at the edge, of which the first stay."""
    draws, scores = 20_000, torch.tensor([0.1, 1.0, 0.5, -3.0, 0.5, 0.5, 2.0, -torch.inf, 0.5, 0.1, -1.0, 2.0])
    p = torch.softmax(scores.double(), -1)
    order = p.sort(descending=True, stable=True).indices
    before = torch.zeros_like(p).scatter(0, order, p[order].cumsum(0) - p[order])
    expected = p.masked_fill((before >= top_p) & (before > 0), 0)
    expected /= expected.sum()
    limits = torch.full((draws,), top_p, dtype=torch.float64)
    found = draw(scores.expand(draws, -1), torch.ones(draws), keys(draws), top_p=limits).bincount(minlength=12) / draws
    assert bool((found[expected == 0] == 0).all())
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert bool(((found - expected).abs() <= 4 * deviation).all())


def test_rows_without_a_likeliest_token_end() -> None:
    scores = torch.randn(4, 600, generator=GENERATOR)
    scores[0], scores[1, 5], scores[2, 7] = -torch.inf, torch.inf, torch.nan
    tokens = draw(scores, torch.ones(4), keys(4), top_p=torch.full((4,), 0.5, dtype=torch.float64))
    assert bool(((tokens >= 0) & (tokens < 600)).all())


def test_draws_keep_to_what_is_left() -> None:
    draws = 3000
    scores = torch.randn(V, generator=GENERATOR) * 2
    scores[::2] = -torch.inf
    rows, one = scores.expand(draws, V), torch.ones(draws)
    best = int(scores.argmax())

    def drawn(temperature: float = 1.0, **limits: Tensor) -> set[int]:
        return set(draw(rows, one * temperature, keys(draws), **limits, largest_k=5).tolist())

    everything = set(scores.isfinite().nonzero().flatten().tolist())
    assert drawn(1e39) == everything, "as likely as each other, and none that is masked"
    assert drawn(1e-40) == {best}
    assert drawn(3.0, top_k=torch.full((draws,), 5)) == set(scores.topk(5).indices.tolist())
    assert drawn(1.0, top_p=torch.full((draws,), 1e-46, dtype=torch.float64)) == {best}
    floor = scores.max() + torch.tensor(0.3).log()
    assert drawn(1.0, min_p=one * 0.3) == set((scores >= floor).nonzero().flatten().tolist())
    tied = scores.clone()
    tied[[1, 3, 5]] = 9.0
    assert set(draw(tied.expand(draws, V), one, keys(draws), torch.full((draws,), 2), largest_k=2).tolist()) == {
        1,
        3,
        5,
    }


def test_a_draw_depends_on_its_row_alone() -> None:
    scores = torch.randn(6, 20_000, generator=GENERATOR)
    limits = {
        "top_k": torch.tensor([0, 5, 0, 1000, 50, 0]),
        "top_p": torch.tensor([1.0, 0.9, 0.3, 1.0, 0.5, 0.9], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.01, 0.0]),
    }
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1e-3])
    together = draw(scores, temperature, keys(6), **limits, largest_k=1000)
    for row in range(6):
        own = {name: each[row : row + 1] for name, each in limits.items()}
        for largest in (int(limits["top_k"][row]), 1000):
            at = slice(row, row + 1)
            assert draw(scores[at], temperature[at], keys(6)[at], **own, largest_k=largest) == together[row]


def test_weights_of_a_draw_have_the_same_bits_in_every_place() -> None:
    """torch's exponential over contiguous numbers, which draw takes, whatever lies around one, and with any threads."""
    numbers = -20 * torch.rand(70_001, generator=GENERATOR)
    expected, threads = numbers.clone().exp_(), torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for start, size in ((0, 70_001), (1, 70_000), (5, 1), (7, 15), (33, 33), (64, 1000), (69_995, 6)):
            place = slice(start, start + size)
            assert torch.equal(numbers[place].clone().exp_(), expected[place])
    torch.set_num_threads(threads)


def test_penalties() -> None:
    scores = torch.randn(3, V, generator=GENERATOR)
    tokens = [torch.tensor([4, 5, 4, 7, 7, 7]), torch.tensor([1]), torch.tensor([2, 2, 9])]
    num_prompt, penalties = [3, 1, 0], ([1.5, 2.0, 1.0], [0.5, 0.25, 0.0], [0.125, 0.0, 2.0])
    wanted = scores.clone()
    for row, (repetition, presence, frequency) in enumerate(zip(*penalties, strict=True)):
        for token in set(tokens[row].tolist()):
            wanted[row, token] *= repetition if wanted[row, token] < 0 else 1 / repetition
        for token in set(tokens[row][num_prompt[row] :].tolist()):
            count = tokens[row][num_prompt[row] :].tolist().count(token)
            wanted[row, token] -= presence + frequency * count
    penalize(scores, tokens, num_prompt, *penalties)
    assert torch.allclose(scores, wanted, atol=1e-6)


def test_ids_of_a_prompt_that_have_no_logits_change_no_scores() -> None:
    """An embedding may have more rows than the model has logits."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def step(input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Any) -> Tensor:
        return logits.expand(len(last_rows), 4).clone()

    params = SamplingParams(max_new_tokens=2, repetition_penalty=9.0, presence_penalty=0.1)
    for prompts in ([[4], [3]], [[3], [4]], [[9], [4, 9], [3]]):
        loop = GenerationLoop(step, KVCache(1, 16, B, K, D))
        assert loop.generate(prompts, params) == [[0, 1]] * len(prompts)
    loop = GenerationLoop(step, KVCache(1, 16, B, K, D))
    assert loop.generate([[4, 0, 4], [4]], params) == [[1, 0], [0, 1]], "other ids of such a prompt are penalised"


@cache
def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=V, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama_loop(**fields: Any) -> GenerationLoop:
    from paged_ops.integrations.transformers import PagedCausalLM

    paged = PagedCausalLM(copy.deepcopy(llama()))
    return GenerationLoop(paged, paged.allocate_kv_cache(64), generation_config=fields)


def test_penalties_have_one_order_whoever_computes_them() -> None:
    """With processors of the request or of transformers: first the repetition penalty, then the others."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.25}
    prompts = PROMPTS[:8]
    wanted = llama_loop(**penalties).generate(prompts)
    assert wanted != llama_loop(repetition_penalty=1.3).generate(prompts)
    same = SamplingParams(logits_processor=lambda input_ids, scores: scores)
    assert llama_loop(**penalties).generate(prompts, same) == wanted
    longer = llama_loop(**penalties, no_repeat_ngram_size=99)
    assert longer.generate(prompts) == longer.generate(prompts, same) == wanted


def test_top_p_0_of_a_config_beside_a_processor_of_transformers() -> None:
    fields = {"do_sample": True, "top_p": 0.0, "top_k": 0, "temperature": 3.0}
    wanted = llama_loop().generate(PROMPTS)
    assert llama_loop(**fields).generate(PROMPTS) == wanted
    assert llama_loop(**fields, renormalize_logits=True).generate(PROMPTS) == wanted
    fields["top_p"] = 1.0
    assert llama_loop(**fields, renormalize_logits=True).generate(PROMPTS) != wanted, "0 of top-k and min-p is off"


def requests_of(loop: GenerationLoop) -> list[Any]:
    """The requests that were submitted; no step has run."""
    loop._inbox.deliver()
    requests = list(loop._scheduler.unfinished)
    assert requests
    return requests


class Calls(TorchDispatchMode):
    """Counts the calls of ops that read at least a row of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(each, Tensor) and each.numel() >= 20_000 for each in args)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_new_tokens": 4},
        {"logprobs": 3},
    ],
)
def test_the_work_over_the_vocabulary_is_done_for_all_rows_at_once(fields: dict[str, Any]) -> None:
    counts = []
    for rows in (2, 17):
        loop = make_loop()
        for i in range(rows):
            loop.submit(PROMPTS[i % 3], SamplingParams(max_new_tokens=4, seed=i, stop_token_ids=(1, 2), **fields))
        requests = requests_of(loop)
        logits = torch.randn(rows, 20_000, generator=GENERATOR)
        with Calls() as calls:
            assert len(sampling.choose(logits, range(rows), requests).tokens) == rows
        counts.append(calls.count)
    assert counts[0] == counts[1] > 0


class Ops(TorchDispatchMode):
    """The names of the ops that are called, and of the functions that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})

    def launch(self, name: str, compute: Any) -> Any:
        """A function in place of one that launches kernels."""

        def call(*args: Any) -> Any:
            before = len(self.names)
            result = compute(*args)
            self.names[before:] = [name]
            return result

        return call


DRAW, LOWER = ["likeliest", "table", "draw"], ["table", "penalties", "likeliest"]
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([{}], ["likeliest"]),
        ([{"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}], DRAW),
        ([PENALTIES], LOWER),
        ([{**PENALTIES, "temperature": 1.0}], [*LOWER, "table", "draw"]),
        ([{}, {"temperature": 1.0}], [*DRAW, "table", "index_put_"]),
        ([{}, PENALTIES], [*LOWER, "likeliest", "table", "index_add_", "index_put_"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [2, 16])
def test_what_a_step_issues_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, rows: int, fields: list[dict[str, Any]], expected: list[str]
) -> None:
    """Kernels of this package, tables that are copied to the GPU, and nothing else, for any number of rows."""
    pytest.importorskip("triton")
    from paged_ops.lowerings.gpu import draw, penalties

    ops = Ops()
    by_torch = {
        (draw, "likeliest"): lambda logits: logits.max(-1),
        (draw, "launch"): lambda logits, best, table: torch.ones(table.shape[1], dtype=torch.int64),
        (penalties, "launch"): lambda logits, table, *more: logits[table[:, 0]].float(),
    }
    for (module, name), compute in by_torch.items():
        shown = name if name != "launch" else module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, name, ops.launch(shown, compute))
    monkeypatch.setattr(sampling, "by_kernels", lambda logits: True)
    loop = make_loop()
    for i in range(rows):
        how = fields[i % len(fields)]
        loop.submit(PROMPTS[i % 3], SamplingParams(max_new_tokens=4, seed=i, stop_token_ids=(), **how))
    requests, logits = requests_of(loop), torch.randn(rows, V, generator=GENERATOR)
    sampling.choose(logits, range(rows), requests)  # copies the prompts, if there are penalties
    for request in requests:
        request.tokens.append(3)
    ops.names.clear()
    with ops:
        chosen = sampling.choose(logits, range(rows), requests)
    assert len(chosen.tokens) == rows
    views = ("alias", "detach", "slice", "view")
    issued = ["table" if name == "lift_fresh" else name for name in ops.names if name not in views]
    assert issued == expected


HIDES_NAN = {"logits_processor": lambda input_ids, scores: scores.nan_to_num(0.0, 0.0, 0.0)}
GIVES_NAN = {"logits_processor": lambda input_ids, scores: torch.full_like(scores, torch.nan)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [{}, PENALTIES])
@pytest.mark.parametrize(
    "fields",
    [{}, PENALTIES, {**PENALTIES, "temperature": 1.0}, {"min_new_tokens": 3}, HIDES_NAN, GIVES_NAN],
    ids=["none", "penalties", "drawn with penalties", "min_new_tokens", "hides NaN", "gives NaN"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_without_a_finite_likeliest_logit_has_no_token(
    dtype: torch.dtype, fields: dict[str, Any], others: dict[str, Any], value: float
) -> None:
    """Whatever else is in the step, and even if a processor or min_new_tokens hides the number."""
    loop = make_loop()
    for how in (others, fields, others):
        loop.submit([3, 5, 3], SamplingParams(max_new_tokens=4, seed=1, stop_token_ids=(7,), **how))
    logits = torch.randn(3, V, generator=GENERATOR).to(dtype)
    logits[0, 4] = 60_000.0  # of float16 the sum of two would be inf
    if fields is not GIVES_NAN:
        logits[1, slice(None) if value < 0 else 7] = value
    chosen = sampling.choose(logits, range(3), requests_of(loop))
    tokens = (chosen.read() if isinstance(chosen, sampling.Chosen) else chosen).tokens
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


# Fields


REFUSED = [
    *(("temperature", value) for value in (10**400, -(10**400), True + 0j)),
    *(("top_k", value) for value in (-1, 2.5, "3")),
    *(("min_p", value) for value in (-0.1, 1.1, float("nan"))),
    *(("repetition_penalty", value) for value in (0, -1.0, float("inf"))),
    *((name, float("nan")) for name in ("presence_penalty", "frequency_penalty")),
    *(("min_new_tokens", value) for value in (-1, 1.5)),
    *(("seed", value) for value in (2**70, 2**64, -(2**63) - 1)),
    *(("stop_token_ids", value) for value in ((2**70,), (-1,), iter([1, 2.5]))),
    *(("stop_strings", value) for value in ("", ["a", 3], 5, iter(["a", ""]))),
    *(("prompt_logprobs", value) for value in (-1, 1.5)),
    ("logits_processor_factory", 3),
    ("logits_processor", iter([3])),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)])
def test_fields_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        SamplingParams(**{name: value})


def test_iterators_are_read_once() -> None:
    seen: list[int] = []

    def notes(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.shape[1])
        return scores

    stop = EXPECTED[5][4]
    params = SamplingParams(
        max_new_tokens=12,
        stop_token_ids=map(int, [stop]),
        logits_processor=iter([notes]),
        stopping_criteria=(each for each in [lambda ids, scores: ids.shape[1] == len(PROMPTS[4]) + 3]),
    )
    for _ in range(2):
        outputs = make_loop().generate([PROMPTS[5], PROMPTS[4]], params)
        assert outputs == [EXPECTED[5][:5], EXPECTED[4][:3]]
        assert len(seen) == 5 + 3
        seen.clear()


def test_a_factory_makes_a_processor_for_each_sample() -> None:
    class Grammar:
        """Counts the tokens of one sequence, and takes no other."""

        def __init__(self) -> None:
            self.length = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert input_ids.shape[1] == len(PROMPTS[5]) + self.length
            self.length += 1
            return scores

    made: list[Grammar] = []

    def factory() -> Grammar:
        made.append(Grammar())
        return made[-1]

    params = SamplingParams(max_new_tokens=4, n=3, logits_processor_factory=factory)
    assert make_loop().generate([PROMPTS[5]], params) == [EXPECTED[5][:4]] * 3
    assert [each.length for each in made] == [4, 4, 4]
    assert make_loop().generate([PROMPTS[5]] * 2, params) == [EXPECTED[5][:4]] * 6
    assert len(made) == 9


def test_memory_and_functions_are_let_go_at_the_end() -> None:
    loop = make_loop()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        ids.append(weakref.ref(input_ids.untyped_storage()))
        return scores

    ids: list[Any] = []
    kept = weakref.ref(processor)
    first = loop.submit(PROMPTS[4], SamplingParams(max_new_tokens=2, logits_processor=processor))
    second = loop.submit(PROMPTS[5], SamplingParams(max_new_tokens=9, logits_processor=processor))
    loop.step()
    assert any(each() is not None for each in ids)
    del processor
    loop.abort(second)
    loop.run()
    gc.collect()
    assert kept() is None
    assert not any(each() is not None for each in ids)
    assert (loop.output(first), loop.output(second).finish_reason) == (EXPECTED[4][:2], "abort")


# Outputs


def test_log_probabilities_of_a_prompt() -> None:
    prompt = PROMPTS[7]
    whole: list[Tensor] = []

    def keeps(input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Any) -> Tensor:
        whole.append(toy_step(input_ids, metadata, torch.arange(len(input_ids)), kv_caches))
        return whole[-1][last_rows]

    GenerationLoop(keeps, KVCache(1, 64, B, K, D)).generate([prompt], SamplingParams(max_new_tokens=1))
    expected = torch.log_softmax(whole[0].double(), -1)
    for sizes in (
        {},
        {"max_num_tokens": 7, "max_num_seqs": 2},
        {"num_blocks": 18, "max_num_tokens": 16, "max_num_seqs": 4},
    ):
        loop = make_loop(**{"num_host_blocks": 4, **sizes})
        assert loop.generate([prompt[:17]], GREEDY)[0].prompt_logprobs is None
        params = SamplingParams(max_new_tokens=12, prompt_logprobs=2, n=2)
        others = [PROMPTS[8], PROMPTS[6]]
        outputs = loop.generate([prompt, *others], [params, GREEDY, GREEDY])
        assert outputs[0] == outputs[1] == EXPECTED[7]
        assert outputs[2:] == [EXPECTED[8], EXPECTED[6]]
        for output in outputs[:2]:
            found = output.prompt_logprobs
            assert found is not None and len(found) == len(prompt) and found[0] is None
            for at, each in enumerate(found[1:]):
                assert each is not None
                assert abs(each.logprob - float(expected[at, prompt[at + 1]])) < 1e-5
                assert [token for token, _ in each.top] == expected[at].topk(2).indices.tolist()
        assert outputs[0].num_cached_tokens == 0, "the prefix that is in the cache has no logits"
        assert_empty(loop)
    single = make_loop().generate([[3]], SamplingParams(max_new_tokens=1, prompt_logprobs=0))[0]
    assert single.prompt_logprobs == [None]


def test_prompt_logprobs_of_ids_without_a_logit() -> None:
    """A model's input may have more ids than its logits: such an id of a prompt has no probability."""

    def step(input_ids: Tensor, *others: Any) -> Tensor:
        return toy_step(input_ids % V, *others)

    prompt = [3, V + 5, 4, 2**62]
    (output,) = GenerationLoop(step, KVCache(1, 64, B, K, D)).generate(
        [prompt], SamplingParams(max_new_tokens=3, prompt_logprobs=1)
    )
    found = output.prompt_logprobs
    assert found is not None and [each and each.logprob > -torch.inf for each in found] == [None, False, True, False]
    assert all(each is None or len(each.top) == 1 for each in found) and len(output) == 3


def test_the_likeliest_tokens_do_not_depend_on_the_other_rows() -> None:
    """Of equal log-probabilities, which are frequent in 16 bits, the lower ids come first, also of NaN and -inf."""
    logits = torch.randint(0, 4, (6, 999), generator=GENERATOR).float()
    logits[1], logits[2, 50:] = 0, -torch.inf
    logits[3, 500:] = torch.nan
    counts = [2, 3, 60, 1, 999, 0]
    together = sampling.logprobs_of(logits, [0] * 6, counts)
    for row, count in enumerate(counts):
        (alone,) = sampling.logprobs_of(logits[row : row + 1], [0], [count])
        by_id = torch.log_softmax(logits[row], -1).sort(descending=True, stable=True)
        assert [token for token, _ in alone.top] == by_id.indices[:count].tolist()
        assert repr(alone) == repr(together[row])


def test_cached_tokens_of_each_output() -> None:
    loop = make_loop(max_num_seqs=4)
    prompt = PROMPTS[8]
    assert loop.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    outputs = loop.generate([prompt, prompt[:10], PROMPTS[4]], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [32, 8, 0]
    samples = loop.generate([PROMPTS[9]], SamplingParams(max_new_tokens=1, n=3))
    assert [output.num_cached_tokens for output in samples] == [0, 41, 41]
    waiting = loop.generate([PROMPTS[7]], SamplingParams(max_new_tokens=12, n=6))
    assert [output.num_cached_tokens for output in waiting] == [0, 30, 30, 30, 28, 28]
    tight = make_loop(num_blocks=18, max_num_tokens=40)
    outputs = tight.generate(PROMPTS, GREEDY)
    assert tight.stats.recomputed
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS), "a later run does not count"


# Prompts


@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids", "inputs_embeds", "special_tokens_mask"])
def test_nothing_that_a_prompt_holds_is_dropped(name: str) -> None:
    loop = make_loop()
    encoding = {"input_ids": [PROMPTS[3]], "attention_mask": [[1] * len(PROMPTS[3])], name: torch.zeros(1, 5)}
    for call in (loop.generate, loop.submit, loop.stream, lambda each: loop.generate([each, PROMPTS[1]])):
        with pytest.raises(ValueError, match=f"{name}: expected input_ids and attention_mask alone, got {name} too; "):
            call(encoding)
    assert not loop.has_work
    assert loop.generate({**encoding, name: None}, GREEDY) == [EXPECTED[3]]


def test_keys_and_ids_that_are_refused() -> None:
    loop = make_loop()
    for key in (torch.ones(2), torch.ones(()), ("a", torch.ones(2)), frozenset({("b", float("nan"))}), [1]):
        with pytest.raises(ValueError, match="extra_key: expected something"):
            loop.submit(PROMPTS[1], extra_key=key)
    for prompt in ([2**70], [3, 2**63]):
        with pytest.raises(ValueError, match=r"prompt: expected token ids below 2\^63, got \d+ at"):
            loop.submit(prompt)
    assert not loop.has_work
    for key in ("a", 3, ("b", 2.5), frozenset({1}), None, b"c"):
        loop.submit(PROMPTS[1], GREEDY, extra_key=key)
    assert set(map(tuple, loop.run().values())) == {tuple(EXPECTED[1])}

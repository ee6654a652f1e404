"""Hugging Face transformers on paged_ops: an attention function, and a causal language model as a step of generation.

::

    model = AutoModelForCausalLM.from_pretrained(...)
    paged = PagedCausalLM(model)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(num_blocks=1024), compile=True)
    outputs = loop.generate([tokenizer(prompt).input_ids for prompt in prompts])
    paged.unwrap()  # restores the model

Importing this module registers the attention implementation ``"paged_ops"`` (``attention_function.py``): a model that
uses it takes the whole batch as one row of T tokens, writes its keys and values into the caches, and attends to them
through the block tables. Caches and metadata are keyword arguments of ``forward``, so they are all inputs of the
compiled graph.

Letters: T tokens of the batch, S sequences, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_ops.cache.hybrid import HybridCache, pools_by_reach
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.shard import UNSHARDED
from paged_ops.checks import expect, flag, is_integer
from paged_ops.integrations.transformers import few_rows, index_windows, indexers
from paged_ops.integrations.transformers.all_reduce_fusion import LAST_NORMS, AllReduceReport, Watch
from paged_ops.integrations.transformers.attention_function import PROBE
from paged_ops.integrations.transformers.generation_config import GenerationFields
from paged_ops.integrations.transformers.invariant import expect_known, replace_layers
from paged_ops.integrations.transformers.latent import as_they_are, latent_modules
from paged_ops.integrations.transformers.own_attention import (
    carry_step,
    dense_implementation,
    has_own_attention,
    replace_attention,
)
from paged_ops.integrations.transformers.probe import CacheSpec, NoArgumentsError, Probe, masks_by_type, run_probe
from paged_ops.integrations.transformers.prompt_ranges import ranges_of_prompt
from paged_ops.integrations.transformers.recurrent import StateLayer, StateLayers, allocate_states, cache_argument
from paged_ops.integrations.transformers.refusals import (
    expect_arguments_of_attention,
    expect_cache_of_model,
    expect_windows_of_cache,
    refuse,
    refuse_context,
    refuse_layers,
)
from paged_ops.integrations.transformers.rotary import FrozenRotary, length_dependent, stretch
from paged_ops.integrations.transformers.scoring import token_logprobs
from paged_ops.integrations.transformers.trial import DenseRun, DifferentLogitsError, run_dense, why_different
from paged_ops.integrations.transformers.weights import Weights
from paged_ops.integrations.transformers.wrapping import NAME, CompiledLayer, CompiledRun, StepCache, Wrapping
from paged_ops.layouts import Layout, has_row_scales
from paged_ops.lowerings.warm_up import prepare
from paged_ops.metadata import AttentionMetadata
from paged_ops.parallel.context import Context, groups_of_context
from paged_ops.parallel.rendezvous import RankError, Ranks
from paged_ops.parallel.tensor import process_group_of, repeated_heads
from paged_ops.registry import apart_from_caller

WRAP_LIMIT = 300.0  # seconds that ranks wait for each other during wrapping


class PagedCausalLM:
    """A causal language model of transformers as a :class:`paged_ops.generation.ModelStep`.

    Sets the model's attention to ``"paged_ops"``, in place; until :meth:`unwrap`, ``model.generate`` raises an error.
    Wrapping runs a few tokens, eagerly and paged, to detect the caches and masks that the model needs; both runs must
    give the same logits. Compiled experts synchronise with the device unless they are bfloat16, so they cannot be
    captured in a graph; after ``model.set_experts_implementation("batched_mm")`` they do not. ``copy.deepcopy`` and
    pickle give an independent model, which compiles its layers again. Not if it is sharded, or on a Hopper GPU after
    ``use_overlapping_products``: unwrap it first.

    Args:
        model: in evaluation mode, on its device.
        max_model_len: the longest sequence, prompt and output; by default the model's context length. Position
            embeddings that depend on the sequence length (longrope, dynamic) use this length for all sequences.
        context: the ranks that shard the tokens of sequences (context parallelism): a process group, a device mesh with
            a dimension "cp" next to the dimensions that shard the model, or a
            :class:`paged_ops.parallel.context.Context`. All ranks wrap the model together.
        latent: for layers of latent attention (MLA), cache latents; False: keys and values of all heads, which take
            many times the memory. Latents cannot be sharded: with a context it is False.
        batch_invariant: make the logits of a token the same, bit for bit, in every batch: docs/numerics.md. Replaces
            linear layers, norms, experts, activations and rotary embeddings; fuse projections before. Models with other
            layers are refused, and sharded ones.

    Attributes:
        layers: heads, head sizes, window and chunk of each cache.
        num_layers: the number of caches.
        pool_of_layer: the pool of each cache, if layers with different windows have pools of their own.
        num_kv_heads, head_size, value_head_size: one number if all layers agree, else one per cache. For latents
            1, R + P and R.
        layout: LATENT if the caches hold latents; None if they may have any other layout.
        states: the layers that keep state instead of keys; None if there are none.
        process_group: the ranks that run a step together, from ``tp_plan="auto"`` and the context; or None. All wrap
            the model together; heads and caches are this rank's, and key/value heads are repeated if there are fewer
            than ranks.
        sums: for a sharded model, which of its all-reduces are fused with the norm after them.
        context: how tokens are sharded, or None.
        max_model_len: as given, or from the config; None if neither.
        prompts_see_ahead: whether all tokens of a prompt see each other, text tokens too (PaliGemma). A step of prompts
            then needs ``bidirectional_ranges``.

    Raises:
        ValueError: the model has layers, position embeddings or attention that a paged batch cannot serve. The model
            is unchanged then.
        RankError: the model is sharded, and a rank is gone or late.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        context: Any = None,
        latent: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant, latent = flag("batch_invariant", batch_invariant), flag("latent", latent)
        refuse(model, has_own_attention)
        self._step_argument = cache_argument(model.forward) if has_own_attention(model) else None
        if model.device.type == "cuda":
            prepare()
        previous: Wrapping | None = getattr(model, "paged_wrapping", None)
        if previous is not None:  # before reading anything that it replaced, such as position embeddings
            previous.undo()
        if batch_invariant:
            expect_known(model)
        limit, freezes = _position_limit(model), list(length_dependent(model))
        most = None if limit is None else int(limit * max((stretch(rotary) for *_, rotary in freezes), default=1.0))
        fits = max_model_len is None or (is_integer(max_model_len, 1) and max_model_len <= (most or max_model_len))
        expect(fits, "max_model_len", f"1 to {most}, the model's positions", max_model_len)
        self.model = model
        self.max_model_len: int | None = limit if max_model_len is None else int(max_model_len)
        forward = inspect.signature(model.forward).parameters
        self._takes_rows, self._takes_positions = "logits_to_keep" in forward, "position_ids" in forward
        self._takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in forward.values())
        self.process_group = process_group_of(model)
        of_context, everyone = groups_of_context(context, self.process_group)
        whole = not batch_invariant or everyone is None is self.process_group
        expect(whole, "batch_invariant", "False with a sharded model or a context", batch_invariant)
        self.collective_groups = tuple(each for each in (self.process_group, of_context) if each is not None)
        self._wrapping = Wrapping(model)
        self.states: StateLayers | None = None
        self.sums: AllReduceReport | None = None
        self.num_layers, self._window = 0, 1
        probes: list[Probe] = []

        def wrap() -> None:
            probes.append(apart_from_caller(self._wrap)(freezes, latent and context is None))
            if of_context is not None:
                refuse_context(model, self.states, probes[0])

        try:
            if (together := everyone or self.process_group) is None:
                wrap()
            else:
                Ranks(together, time_limit=WRAP_LIMIT, collectives=self.collective_groups).agree(wrap)
        except BaseException as error:
            self._wrapping.undo()
            if isinstance(error, DifferentLogitsError) and together is None:
                raise ValueError(f"{error}: {why_different(model)}") from None
            known = ValueError, RankError, torch.OutOfMemoryError
            if isinstance(error, known) or not isinstance(error, Exception):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"model: {type(model).__name__} cannot be served: {reason}") from error
        (probe,) = probes
        reaches = probe.reaches()
        self.context: Context | None = None
        if of_context is not None:
            widest = max(spec.value_head_size for spec in probe.specs)
            made = context if isinstance(context, Context) else None
            self.context = made or Context(of_context, model.device, head_size=widest, dtype=model.dtype)
            self.process_group = everyone
        handle = None if self.context is None else self.context.handle
        self.pool_of_layer = tuple(pools_by_reach(reaches)[1])
        for module, call in probe.calls.items():
            attending = probe.attending(call)
            noted: dict[str, Any] = {"pool": self.pool_of_layer[attending.cache], "context": handle}
            self._wrapping.note(module, dataclasses.replace(attending, **noted))
        self._wrapping.leave_others()
        self._wrapping.arm()
        self._weights = Weights(model)
        self.layers: tuple[CacheSpec, ...] = tuple(
            spec._replace(window=window, chunk=chunk)
            for spec, (window, chunk) in zip(probe.specs, reaches, strict=True)
        )
        self.num_layers = len(self.layers)
        self.layout = Layout.LATENT if any(spec.latent for spec in self.layers) else None
        sizes = zip(*self.layers, strict=True) if self.layers else ((),) * len(CacheSpec._fields)
        self.num_kv_heads, self.head_size, self.value_head_size, *_ = map(_common, sizes)

    def _wrap(self, freezes: Sequence[tuple[nn.Module, str, nn.Module]], latent: bool) -> Probe:
        """Change the model, and run the trial."""
        model = self.model
        for module, whole, num_groups in repeated_heads(model):
            for name, linear in whole.items():
                self._wrapping.replace(module, name, linear)
            self._wrapping.set_attribute(module, "num_key_value_groups", num_groups)
        for parent, name, rotary in freezes:
            self._wrapping.replace(parent, name, FrozenRotary(rotary, model.config, self.max_model_len))
        self._wrapping.set_implementation(dense_implementation(model))
        group = self.process_group
        watch = few_rows.Watch(model, self.batch_invariant) if group is None else Watch(model, group)
        with watch:
            logits = run_dense(model)
        dense = DenseRun.of(model, logits)
        self.sums = watch.fuse(self._wrapping)
        self.states = StateLayers.find(model)
        refuse_layers(model, self.states, indexers.install(self._wrapping, model, self.max_model_len))
        self._window = index_windows.window_of(model)
        if self.states is not None:
            self._wrapping.keep_states(self.states)
        if self.batch_invariant:
            replace_layers(self._wrapping, model)
        self._wrapping.set_implementation(PROBE)
        for module in latent_modules(model) if latent else ():
            self._wrapping.set_attribute(module, "expand_kv", as_they_are)
        replace_attention(self._wrapping, model)
        how = self.states, self.batch_invariant, index_windows.whole_windows(self._window)
        run = functools.partial(run_probe, model, self._step, dense, self.max_model_len, *how)
        try:
            probe = run()
        except NoArgumentsError as error:
            carry_step(self._wrapping, model, error)
            self._step_argument = cache_argument(model.forward)
            probe = run()
        if probe.calls and not self._step_argument:
            expect_arguments_of_attention(model)
        expect_windows_of_cache(model, probe, self.max_model_len)
        # text tokens have type 0
        self.prompts_see_ahead = masks_by_type(model) and bool(ranges_of_prompt(model, [0] * 4))
        self._wrapping.set_implementation(NAME)
        return probe

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of the model's generation config."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)

    @property
    def generation_fields(self) -> GenerationFields:
        """The model's generation config; a loop reads it once, when it is created."""
        return GenerationFields(self.model)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model embeds; a loop refuses others."""
        return len(self.model.get_input_embeddings().weight)

    @property
    def pad_token_id(self) -> int | None:
        """The padding token of the model's generation config, if any; a loop refuses prompts padded with it."""
        given = getattr(self.model.generation_config, "pad_token_id", None)
        return None if given is None or given in self.stop_token_ids else int(given)

    def weights_version(self) -> Hashable:
        """Changes with the model's weights and active adapters; a loop reads it before each step.

        Writes through ``.data``, or to weights made in inference mode, do not change it.

        Raises:
            ValueError: the model is in training mode, or its attention has changed since it was wrapped.
        """
        self._wrapping.check()
        return self._weights.version()

    def unwrap(self) -> PreTrainedModel:
        """Restore the model: its attention, its uncompiled layers, its position embeddings.

        Afterwards this object cannot be called; the model can be wrapped again. Fused projections stay
        (:func:`paged_ops.integrations.transformers.projections.split_projections` undoes them).
        """
        self._wrapping.undo()
        return self.model

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int | None = None,
        *,
        num_window_blocks: int | None = None,
        keep_all: bool = False,
        num_host_blocks: int = 0,
        dtype: torch.dtype | None = None,
        kv_cache_dtype: str = "auto",
        layout: Layout | None = None,
        num_state_slots: int = 32,
        num_host_state_slots: int | None = None,
    ) -> KVCache | HybridCache:
        """A cache for this model on its device, in its dtype by default (float8 dtypes work without scales).

        Layers with a window or chunk free blocks that no later token sees. If layers differ in this, each window or
        chunk has its own pool of blocks.

        Args:
            num_blocks, num_host_blocks: per pool.
            block_size, layout: as in ``KVCache``; by default blocks have 16 tokens on each rank of the context. Latents
                always have the layout LATENT.
            kv_cache_dtype: ``"fp8_ds_mla"`` keeps latents of 512 + 64 columns as rows of 656 bytes that hold their
                scales; ``dtype`` is then uint8 by default.
            num_window_blocks: per pool with a window or chunk, if other pools see everything;
                :func:`paged_ops.blocks_within_reach` gives a sufficient number.
            keep_all: use one pool, which keeps all blocks.
            num_state_slots: if layers keep state, the number of sequences at once: at least a loop's ``max_num_seqs``.
            num_host_state_slots: likewise, the number of swapped-out sequences; by default the same if there are host
                blocks.
        """
        device = self.model.device
        shard = UNSHARDED if self.context is None else self.context.shard
        block_size = index_windows.whole_windows(self._window) * shard.size if block_size is None else block_size
        sizes = self.num_layers, num_blocks, block_size, self.num_kv_heads, self.head_size
        row_scales = has_row_scales(kv_cache_dtype)
        options: dict[str, Any] = {
            "value_head_size": self.value_head_size,
            "dtype": (torch.uint8 if row_scales else self.model.dtype) if dtype is None else dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "device": device,
            "layout": layout if self.layout is None else self.layout,
            "num_host_blocks": num_host_blocks,
            "shard": shard,
        }
        fits = layout is None or self.layout is None or Layout(layout) is self.layout
        expect(fits, "layout", "LATENT, or PagedCausalLM(model, latent=False)", layout)
        one_pool = len(set(self.pool_of_layer)) == 1
        whole = not (flag("keep_all", keep_all) and shard.size > 1 and not one_pool)
        expect(whole, "keep_all", "False with a context, because layers with a window are not sharded", keep_all)
        if not keep_all and self.layers:
            windows, chunks = [spec.window for spec in self.layers], [spec.chunk for spec in self.layers]
            options["sliding_window"] = windows[0] if one_pool else windows
            options["attention_chunk"] = chunks[0] if one_pool else chunks
        states = allocate_states(self.states, num_state_slots, num_host_state_slots, num_host_blocks, device)
        if states is None and (keep_all or one_pool):
            expect(num_window_blocks is None, "num_window_blocks", "None, as the model has one pool", num_window_blocks)
            return KVCache(*sizes, **options)
        return HybridCache.for_layers(*sizes, num_window_blocks=num_window_blocks, states=states, **options)

    def check_kv_cache(self, kv_cache: KVCache | HybridCache) -> None:
        """Raise ValueError for a cache that does not fit this model's device or its layers' sizes, windows and
        chunks."""
        expect_cache_of_model(self, kv_cache)

    def compile_layers(self, *, dynamic: bool | None = True, **options: Any) -> PagedCausalLM:
        """Compile the decoder layers, in place, once per kind of layer; returns itself.

        For a model of many layers this takes a fraction of the time of compiling the whole model, and inside a CUDA
        graph it runs equally fast. The rotary embedding and the last norm are compiled separately. Layers that keep
        state run compiled code only in decodes. Call it after
        :func:`paged_ops.integrations.transformers.projections.fuse_projections`.

        Args:
            dynamic: sizes of a batch are dynamic, so one graph serves all; with False each size is compiled separately.
            options: other arguments of ``torch.compile``; ``fullgraph`` is on.

        Raises:
            ValueError: a layer with attention is in no list of layers.
        """
        self._wrapping.check()
        options = {"fullgraph": True, "dynamic": dynamic, **options}
        attending, states = self._wrapping.attending, () if self.states is None else self.states.layers
        decoders: dict[nn.Module, None] = {}
        layers: dict[nn.Module, tuple[list[nn.Module], list[StateLayer]]] = {}

        def of(module: nn.Module) -> tuple[list[nn.Module], list[StateLayer]]:
            decoder, layer = self._wrapping.place_of(module)
            decoders[decoder] = None
            return layers.setdefault(layer, ([], []))

        for module in attending:
            of(module)[0].append(module)
        for state in states:
            of(state.module)[1].append(state)
        kinds: dict[Any, Callable[..., Any]] = {}
        for layer, (modules, keeping) in layers.items():
            noted = [attending[module] for module in modules]
            forms = tuple(each.form for each in noted)
            fusion = getattr(layer, "paged_fusion", None)
            fused = None if fusion is None else (fusion.attention is None, fusion.mlp is None)
            kept = tuple((each.keys, each.continues) for each in keeping)
            kind = type(layer), fused, forms, kept, hasattr(layer, "paged_few_rows")
            if kind not in kinds:
                kinds[kind] = CompiledRun(options)
            caches: list[int] = []
            for module, how in zip(modules, noted, strict=True):
                self._wrapping.note(module, dataclasses.replace(how, place=len(caches)))
                caches += how.caches
            for place, each in enumerate(keeping):
                each.position = place
            places = [each.index for each in keeping]
            if fusion is not None and layer is next(iter(layers)):
                self._wrapping.compile(layer.get_submodule("input_layernorm"), **options)
            latent = any(each.latent and not each.selects for each in noted)
            self._wrapping.replace_forward(layer, CompiledLayer(kinds[kind], layer, caches, places, latent))
        for decoder in decoders:
            for name, part in decoder.named_children():
                # torch's own layers are already one kernel
                if ("rotary" in name or name in LAST_NORMS) and not type(part).__module__.startswith("torch."):
                    self._wrapping.compile(part, **options)
        return self

    def bidirectional_ranges(self, token_type_ids: Sequence[int] | Tensor) -> list[tuple[int, int]]:
        """The ranges of a prompt's tokens that see each other, for its request in :class:`paged_ops.Batch`.

        They come from the model's masks for such a prompt: image tokens of Gemma-3, the prefix of PaliGemma.

        Args:
            token_type_ids: ``[n]``, from the model's processor, for the whole prompt.

        Raises:
            ValueError: the model's masks do not depend on them, or paged attention has no such masks (such as for an
                image longer than Gemma-3's window).
        """
        return ranges_of_prompt(self.model, token_type_ids)

    def __call__(
        self,
        input_ids: Tensor,
        metadata: AttentionMetadata,
        last_rows: Tensor,
        kv_caches: Sequence[Tensor],
        **inputs: Any,
    ) -> Tensor:
        """Logits ``[S, V]``: see :class:`paged_ops.generation.ModelStep`.

        Args:
            inputs: other arguments of the model's forward, such as ``pixel_values`` of the images whose tokens are in
                ``input_ids``, in that order. The metadata has the ranges of tokens that see each other.

        Raises:
            ValueError: the model is in training mode, its attention has changed since it was wrapped, a mask is given,
                or images whose tokens see each other have no ranges.
        """
        self._wrapping.check()
        if metadata.bidirectional_ranges is None and (
            masks_by_type(self.model) if inputs else self.prompts_see_ahead and metadata.max_query_len > 1
        ):
            raise ValueError(
                f"metadata: expected bidirectional_ranges with {', '.join(inputs) or 'a prompt'}, because tokens of"
                f" {type(self.model).__name__} see later ones; pass them to the Batch, and their maximal number to its"
                " builder (max_bidirectional_ranges)"
            )
        for name in ("attention_mask", "token_type_ids"):
            if inputs.get(name) is not None:
                raise ValueError(
                    f"{name}: expected none, because the metadata says which tokens see each other"
                    " (PagedCausalLM.bidirectional_ranges); leave it out"
                )
        return self._step(input_ids, metadata, last_rows, kv_caches, **inputs)

    def token_logprobs(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """The log-probability of each token but the first, given those before it: float32 ``[n - 1]``.

        One forward pass over the whole sequence, without gradients. With ``batch_invariant`` they have the bits of the
        ``logprobs`` of a :class:`paged_ops.generation.GenerationLoop` over this object: docs/numerics.md.
        Models with states, a context, or prompts that see ahead are refused.
        """
        return token_logprobs(self, token_ids)

    def _step(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Any, **inputs: Any
    ) -> Tensor:
        arguments: dict[str, Any] = {**({"logits_to_keep": last_rows} if self._takes_rows else {}), **inputs}
        if self._takes_positions:
            arguments["position_ids"] = index_windows.positions_for(metadata.positions, self._window)
        if self.states is None:
            window = 1 if isinstance(kv_caches, Probe) else self._window  # a probe needs the mask that is made of it
            arguments["attention_mask"] = index_windows.unread_mask(input_ids, window)
        else:
            tensors = kv_caches.states if isinstance(kv_caches, Probe) else kv_caches[self.num_layers :]
            arguments[self.states.argument] = self.states.step(metadata, len(input_ids), tensors)
        if self._step_argument:
            arguments[self._step_argument] = StepCache(kv_caches, metadata)
        elif self._takes_more:
            arguments.update(kv_caches=kv_caches, attention_metadata=metadata)
        logits = self.model(input_ids=input_ids[None], use_cache=False, **arguments).logits[0]
        return logits if self._takes_rows else logits[last_rows]


def _position_limit(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # of MPT
    return int(limit) if limit else None


def _common(sizes: tuple[int, ...]) -> Any:
    return sizes[0] if len(set(sizes)) == 1 else sizes

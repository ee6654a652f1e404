"""Compiles kernels for a GPU that need not be present.

A variant is a call of a lowering on tensors that only claim to be on a GPU. Triton's driver is replaced by one that
names the target, so each launch is specialised exactly as on that GPU; it is compiled, not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from paged_ops.lowerings.gpu import counters, precompile_workers
from paged_ops.lowerings.gpu.target import target_of

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx90a", "hip:gfx942", "hip:gfx950", "hip:gfx1100")
NUM_PROCESSORS = {
    "cuda:80": 108, "cuda:90": 132, "cuda:100": 148,
    "hip:gfx90a": 104, "hip:gfx942": 304, "hip:gfx950": 256, "hip:gfx1100": 48,
}  # fmt: skip
SHARED_MEMORY = {"cuda:80": 163 << 10, "cuda:90": 227 << 10, "cuda:100": 227 << 10}
NAMES = {"cuda:90": "NVIDIA H200"}  # devices with tiles of their own; elsewhere the default's are compiled
# cuda:90 and gfx942 compile every variant; others those in which they may differ. These AMD GPUs: fp8, the most
# registers and shared memory. cuda:80 and cuda:100: masks and numbers of heads are the same code on all.
SOME = {
    **dict.fromkeys(
        ("hip:gfx90a", "hip:gfx950", "hip:gfx1100"), r"e4m3(?!-out)|e5m2|(?<!invariant-)bf16|-d256$|latent"
    ),
    "cuda:80": "^(?!attention-(g71|narrow|decode-masks|d192))",
    "cuda:100": "^(?!attention-(g71|narrow|decode-masks|d192|invariant))",
}


def both(*calls):
    """Several calls as one variant."""

    def call():
        for each in calls:
            each()

    return call


@dataclasses.dataclass(frozen=True)
class Variant:
    """One call of a lowering.

    Attributes:
        name: unique.
        call: calls the lowering on tensors made by :func:`gpu` (their values are not read).
        expect: prefix of a target ("cuda", "cuda:90", "hip:gfx942") -> regular expressions, each of which the assembly
            of some kernel of the call must match.
        refused: prefix of a target -> a regular expression that the ValueError raised there must match.
        may_spill: prefixes of targets where a kernel of the call may spill registers, with the reason in a comment.
        spills: Triton -> the most bytes that a kernel of the call may spill on cuda:90 with it. Those of Tritons newer
            than the one that kernels were measured with (3.6) are what they spill, until they are measured there.
        targets: that compile it; all, if none is named. For variations of a variant that all targets compile.
    """

    name: str
    call: Callable[[], Any]
    expect: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_spill: tuple[str, ...] = ()
    spills: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    targets: tuple[str, ...] = ()


class OnGPU(torch.Tensor):
    """A CPU tensor that says it is on the first GPU; so do its views and what is made from it."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of zeros that claims to be on the GPU; int32 and int64 ones too."""
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGPU)


class Driver(precompile_workers.Driver):
    """Names the GPU, and can do nothing else."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


launched: list[Any] = []  # the compiled kernels of a variant
ptxas_logs: dict[str, str] = {}  # a kernel's hash -> what ptxas printed, if this process compiled it


def properties(target: str) -> SimpleNamespace:
    """The properties that torch reports for such a GPU; on ROCm they have no shared memory."""
    backend, _, arch = target.partition(":")
    reported = {"name": NAMES.get(target, f"{target} (compiled ahead of time)")}
    reported["multi_processor_count"] = NUM_PROCESSORS[target]
    if backend == "hip":
        return SimpleNamespace(major=9, minor=4, gcnArchName=f"{arch}:sramecc+:xnack-", **reported)
    major, minor = divmod(int(arch), 10)
    return SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=SHARED_MEMORY[target], **reported)


def install(target: str) -> None:
    """Make this process believe in the target."""
    backend, _, arch = target.partition(":")
    is_cuda = backend == "cuda"
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    number = int(arch) if is_cuda else arch
    warp = 32 if is_cuda or arch.startswith("gfx1") else 64
    triton.runtime.driver.set_active(Driver(GPUTarget(backend, number, warp)))
    reported = properties(target)
    torch.version.hip = None if is_cuda else "6.4"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: reported
    torch.cuda.get_device_name = lambda device=None: reported.name
    torch.cuda.get_device_capability = lambda device=None: (reported.major, reported.minor)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda stream: None)
    torch.Tensor.pin_memory = lambda tensor: tensor
    counters._new = lambda place: gpu(place[1], dtype=torch.int32)
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            return tensor.as_subclass(OnGPU)
        return move(tensor, *args, **kwargs)

    torch.Tensor.to = to

    if hasattr(triton, "knobs"):
        # A program may set a hook, as vLLM does; Triton then writes the constants of each kernel as JSON.
        triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: None
    run = triton.JITFunction.run

    # As in the interpreter, None comes back: there is nothing to launch again.
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            launched.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        ptxas_logs.setdefault(launched[-1].hash, printed.getvalue())

    triton.JITFunction.run = compile_only


def spills(kernel: Any) -> int | None:
    """Bytes (CUDA) or registers (AMD) that a kernel spills, None if the tools are missing.

    Scalar registers of AMD do not count: they spill into lanes of vector registers, not to memory.
    """
    if "amdgcn" in kernel.asm:
        counts = re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        return sum(map(int, counts)) if counts else None
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"STACK:(\d+)", usage)
    return sum(map(int, found)) if found else None


# Instructions of sm_90 that write the uniform register they name first.
WRITES_UNIFORM = ("U", "R2UR", "S2UR", "VOTEU", "REDUX", "LDCU")
GLOBAL_MEMORY = "c[0x0][0x208]"  # where sm_90 has the descriptor of global memory


def instructions(kernel: Any) -> list[tuple[str, list[str], str]]:
    """The instructions of a cubin in order: name, operands, and the whole line with its predicate. Labels are among
    them under the name LABEL."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if "cubin" not in kernel.asm or not tool.exists():
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False).stdout
    line = r"^(\.L_\w+):|/\*[0-9a-f]{4,5}\*/\s+((?:@!?U?P\w+\s+)?([^\s@]\S*)\s*(.*?)\s*);"
    found = re.findall(line, text, re.MULTILINE)
    return [
        ("LABEL", [label], label) if label else (name, [each.strip() for each in rest.split(",")], whole)
        for label, whole, name, rest in found
    ]


def unset_registers(listed: list[tuple[str, list[str], str]]) -> list[str]:
    """Instructions that compute with uniform registers which nothing has set: an error of ptxas.

    A copy of such a register is no error, since ptxas saves and restores pairs of which one half is set later. What it
    copies to counts as not set. Descriptors (``gdesc[UR4]``) name four registers and do not read all of them, so they
    are not counted.
    """
    known: set[str] = set()  # uniform registers with a value
    empty: set[str] = set()  # other registers with a copy of one without
    unset = []
    for name, operands, instruction in listed:
        operands = without_predicate(name, operands)
        uniform = [f"UR{number}" for number in uniform_written(name, operands)]
        sources = " ".join(each for each in operands[bool(uniform) :] if "desc[" not in each)
        missing = [each for each in re.findall(r"\bUR\d+\b", sources) if each not in known]
        missing += empty.intersection(re.findall(r"\bR\d+\b", " ".join(operands[1:])))
        if missing and copies(name, operands):
            known.difference_update(uniform)
            empty.update(operands[: not uniform])
            continue
        unset += [instruction] * bool(missing)
        known.update(uniform)
        first = re.fullmatch(r"R(\d+)", operands[0]) if operands else None
        empty.difference_update(f"R{int(first[1]) + n}" for n in range(4 if first else 0))
    return unset


def copies(name: str, operands: list[str]) -> bool:
    """Whether an instruction copies a register."""
    return name in ("MOV", "UMOV", "R2UR") or (name.startswith("IMAD.") and operands[1:3] == ["RZ", "RZ"])


def without_predicate(name: str, operands: list[str]) -> list[str]:
    """The operands of an instruction but for the predicate that ULOP3 may write before its register."""
    return operands[1:] if name.startswith("ULOP3") and operands[0].startswith("UP") else operands


def uniform_written(name: str, operands: list[str]) -> range:
    """The numbers of the uniform registers that an instruction writes."""
    operands = without_predicate(name, operands)
    first = re.fullmatch(r"UR(\d+)", operands[0]) if name.startswith(WRITES_UNIFORM) else None
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return range(int(first[1]), int(first[1]) + width) if first else range(0)


def lost_descriptors(listed: list[tuple[str, list[str], str]]) -> list[str]:
    """Instructions that address global memory by uniform registers (``desc[UR4]``) which, on some path, no longer hold
    its descriptor: an error of ptxas. Copies of the descriptor are followed, also to the stack and back."""
    at: dict[str, dict[str, str]] = {}  # label -> what is held there, on all ways
    while True:
        before = dict(at)
        lost = _lost(listed, at)
        if at == before:
            return lost


def _lost(listed: list[tuple[str, list[str], str]], at: dict[str, dict[str, str]]) -> list[str]:
    """One pass; ``at`` has the registers' content per label and is narrowed by each branch to it."""
    holds: dict[str, str] = {}  # register, or place on the stack -> the half of the descriptor in it
    lost, reached = [], True
    for name, operands, instruction in listed:
        if name == "LABEL":
            if reached or instruction in at:
                brought = at.get(instruction, holds)
                holds, reached = _common(brought, holds if reached else brought), True
                at[instruction] = dict(holds)
            continue
        for label in re.findall(r"\.L_\w+", instruction) if reached and name.startswith(("BR", "CALL")) else ():
            at[label] = _common(at.get(label, holds), holds)
        # loads that are evicted first (EF) have a descriptor that the code makes
        used = None if ".EF" in name else re.search(r"(?<!g)desc\[UR(\d+)\]", instruction)
        if used and (holds.get(f"UR{used[1]}"), holds.get(f"UR{int(used[1]) + 1}")) != ("low", "high"):
            lost.append(instruction)
        source = operands[-1].removesuffix(".reuse")
        written = [f"UR{number}" for number in uniform_written(name, operands)] or operands[:1]
        halves = (
            ("low", "high")
            if operands[1:] == [GLOBAL_MEMORY]
            else (holds.get(source, "") if copies(name, operands) else "",)
        )
        if name.startswith(("STL", "LDL")):
            written, read = (_words(each, name) for each in operands[:2])
            halves = tuple(holds.get(each, "") for each in read)
        for n, register in enumerate(written):
            holds.pop(register, None)
            if n < len(halves) and halves[n]:
                holds[register] = halves[n]
        if name in ("BRA", "BRX", "EXIT") and instruction.startswith(name):  # without a predicate
            holds, reached = {}, False
    return lost


def _common(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    """What both hold."""
    return dict(first.items() & second.items())


def _words(operand: str, name: str) -> list[str]:
    """The registers, or places on the stack, of an operand of STL or LDL."""
    count = 4 if ".128" in name else 2 if ".64" in name else 1
    register = re.fullmatch(r"R(\d+)", operand)
    if register:
        return [f"R{int(register[1]) + n}" for n in range(count)]
    offset = re.search(r"\+(0x[0-9a-f]+)\]", operand)
    return [f"stack {(int(offset[1], 16) if offset else 0) + 4 * n}" for n in range(count)]


def serialized(kernel: Any) -> list[str]:
    """The warnings of ptxas about wgmma instructions that it serialises, which takes up to twice the time. Only Gluon
    kernels are checked: their warpgroups have register budgets that can be too small."""
    text = kernel.asm.get("ptx", "")
    if "setmaxnreg" not in text:
        return []
    said = ptxas_logs.get(kernel.hash, "")
    if "ptxas info" not in said:  # the kernel came from Triton's cache
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kernel.ptx").write_text(text)
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.o"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        said = done.stderr
        assert done.returncode == 0, said
    return [line for line in said.splitlines() if "Potential Performance Loss" in line]


def fingerprint(kernel: Any) -> str:
    """A hash of a kernel's assembly without its name, comments and empty lines."""
    text = (kernel.asm.get("ptx") or kernel.asm.get("amdgcn")).replace(kernel.metadata.name, "KERNEL")
    dropped = r"//.*" if "ptx" in kernel.asm else r"^\s*\.name:.*\n"
    lines = (line.rstrip() for line in re.sub(dropped, "", text, flags=re.MULTILINE).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def named(kernels: list[Any]) -> dict[str, Any]:
    """Kernels by name; the second of a name is "name 2"."""
    found: dict[str, Any] = {}
    for kernel in kernels:
        name = kernel.metadata.name
        same = sum(each.metadata.name == name for each in found.values())
        found[f"{name} {same + 1}" if same else name] = kernel
    return found


def compile_variant(variant: Variant, target: str) -> dict[str, Any]:
    """The result of one variant, as plain data."""
    launched.clear()
    error, start = None, time.perf_counter()
    try:
        variant.call()
    except ValueError as refusal:
        error = f"ValueError: {refusal}"
    except Exception as failure:
        innermost: BaseException = failure  # a kernel's error hides in the helper that it calls
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        error = f"{type(innermost).__name__}: {innermost}"[-2000:]
    expected = [
        pattern for prefix, patterns in variant.expect.items() if target.startswith(prefix) for pattern in patterns
    ]
    kernels = named(launched)
    listed = {name: instructions(kernel) for name, kernel in kernels.items() if target == "cuda:90"}
    assembly = "\n".join(kernel.asm.get("ptx") or kernel.asm.get("amdgcn") for kernel in launched)
    return {
        "name": variant.name,
        "error": error,
        "kernels": {name: spills(kernel) for name, kernel in kernels.items()},
        "shared": {name: kernel.metadata.shared for name, kernel in kernels.items()},
        "space": target_of(torch.device("cuda", 0)).shared_memory,
        "unset": {name: unset_registers(each)[:4] for name, each in listed.items()},
        "lost": {name: lost_descriptors(each)[:4] for name, each in listed.items()},
        "serialized": {name: serialized(kernel) for name, kernel in kernels.items() if target == "cuda:90"},
        "assembly": [(kernel.metadata.name, fingerprint(kernel)) for kernel in launched],
        "missing": [pattern for pattern in expected if not re.search(pattern, assembly)],
        "seconds": round(time.perf_counter() - start, 2),
    }

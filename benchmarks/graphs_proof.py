"""Runs what captured graphs promise on a GPU, and writes what came of it as one data file.

    python benchmarks/graphs_proof.py --commit $(git rev-parse --short HEAD) --out benchmarks/data/graphs_proof.json

Parts (--parts, each within about two minutes): ``tests`` of captured and compiled steps, two runners on two streams
among them, and of transformers models; ``replays``, 10^5 of them with random changes of the batch in between;
``demo`` and ``generate`` of the command line with graphs and without; ``examples``; ``readme``, the code of README.md.
An example that fails is recorded with why, and fails the run after the others; ``export_aoti.py`` runs once more, with
the system's C++ runtime loaded first, where torch cannot load a package of one ``nn.Linear`` either, and both is said.
Parts that run later with the same commit are added to the file. The speed of a step is ``decode_step.py``'s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_proof import run_pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {  # what each must print
    "compile_decode.py": "the same as without a cache: True",
    "cuda_graphs.py": "the same tokens as without graphs: True",
    "export_aoti.py": "equal to eager: True",
}
# Where the linker finds the C++ runtime in torch's libraries, a process that loads a package dies in torch's loader:
# whether it does with a package of one layer of torch.
LOADER = """
import subprocess, sys, tempfile, torch
layer = torch.nn.Linear(8, 8).eval()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    exported = torch.export.export(layer, (torch.ones(2, 8),))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=folder + "/linear.pt2")
    load = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    print("exit", subprocess.run([sys.executable, "-c", load, package]).returncode)
"""
PRELOADED = {"LD_PRELOAD": "libstdc++.so.6"}  # then it does not
NUMBERS = ("tokens_match_reference", "tokens_checked", "steps", "replayed_steps", "replayed_sizes", "replayed_padding")
NUMBERS += ("tokens_per_second", "graphs", "graph_breaks", "recompiles", "cache_copies", "compile_seconds", "device")


def run(*command: str, folder: Path = ROOT, **variables: str) -> str:
    """The output of a Python program, with more variables of the environment; its failure is this program's."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr[-2000:].replace(f"{ROOT}/", "")
        raise RuntimeError(f"{' '.join(command)[:80]}: exit {done.returncode}: {said}")
    return done.stdout


def command_line(*arguments: str) -> dict[str, Any]:
    numbers = json.loads(run("-m", "paged_ops", *arguments, "--device", "cuda", "--json").splitlines()[-1])
    return {name: numbers[name] for name in (*NUMBERS, "texts") if name in numbers}


def run_demo() -> dict[str, Any]:
    found = {name: command_line("demo", *options) for name, options in {"graphs": [], "none": ["--no-graphs"]}.items()}
    assert all(numbers["tokens_match_reference"] for numbers in found.values()), found
    assert found["graphs"]["replayed_steps"] > 0 == found["none"]["replayed_steps"], found
    return found


def run_generate() -> dict[str, Any]:
    model = str(ROOT / "paged_ops" / "demo_model")
    prompts = ["--prompt", "She had never been", "--prompt", "He opened the door and"]
    arguments = ["generate", "--model", model, *prompts, "--dtype", "float32", "--max-new-tokens", "48"]
    found = {"graphs": command_line(*arguments), "none": command_line(*arguments, "--no-graphs")}
    assert found["graphs"]["texts"] == found["none"]["texts"], found
    assert found["graphs"]["replayed_steps"] > 0 == found["none"]["replayed_steps"], found
    return found


def run_example(name: str, **variables: str) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        printed = run(name, folder=ROOT / "examples", **variables)
        assert EXAMPLES[name] in printed, printed
    except (AssertionError, RuntimeError) as error:
        return {"error": str(error)[-1000:]}
    return {"printed": printed.splitlines(), "seconds": round(time.perf_counter() - began)}


def run_examples() -> dict[str, Any]:
    """Each example; that of a package, if it fails where torch cannot load one of its own either, with one runtime."""
    with ThreadPoolExecutor(len(EXAMPLES) + 1) as pool:
        loader = pool.submit(run, "-c", LOADER)
        found: dict[str, Any] = dict(zip(EXAMPLES, pool.map(run_example, EXAMPLES), strict=True))
        exit_code = loader.result().split()[-1]
    package = found["export_aoti.py"]
    package["torch alone with a package of one nn.Linear"] = f"exit {exit_code}"
    if "error" in package and exit_code != "0":
        why = {"without": package.pop("error"), **PRELOADED}
        package |= {**run_example("export_aoti.py", **PRELOADED), **why}
    failed = [name for name in EXAMPLES if "error" in found[name]]
    return {**found, "error": f"failed: {', '.join(failed)}"} if failed else found


def run_readme() -> dict[str, Any]:
    """The blocks of Python in README.md, in one program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return {"blocks": len(blocks), "printed": run("-c", "\n".join(blocks)).splitlines()}


def run_tests() -> dict[str, Any]:
    return run_pytest(["-m", "not slow", "tests/test_graphs_gpu.py"], workers=6, seconds=400)


def run_transformers() -> dict[str, Any]:
    return run_pytest(["-m", "gpu", "tests/test_transformers.py", "tests/test_projections.py"], workers=6, seconds=400)


def run_replays() -> dict[str, Any]:
    return run_pytest(["-m", "slow", "tests/test_graphs_gpu.py"], workers=1, seconds=400)


PARTS = {
    "tests": run_tests,
    "transformers": run_transformers,
    "replays": run_replays,
    "demo": run_demo,
    "generate": run_generate,
    "examples": run_examples,
    "readme": run_readme,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d")}
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if found.get("commit") != options.commit:
        found = about
    failed = []
    for part in options.parts:
        began = time.perf_counter()
        try:
            found[part] = PARTS[part]()
        except (AssertionError, RuntimeError) as error:
            found[part] = {"error": str(error)[-3000:]}
        if any(found[part].get(key) for key in ("error", "failures", "errors", "timed_out")):
            failed.append(part)
        print(part, f"{time.perf_counter() - began:.0f} s", json.dumps(found[part])[:2000], flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

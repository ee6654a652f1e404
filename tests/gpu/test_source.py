"""What the oldest supported Triton asks of the kernels' source: CI compiles them with the newest."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "paged_ops"
FILES = sorted(path for path in ROOT.rglob("*.py") if "@triton.jit" in path.read_text())


def kernels(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_min_and_max_of_python(path):
    """Triton 3.5 (torch 2.9) makes tensors of them even if both are constants, which then are none."""
    functions = list(kernels(path))
    assert functions
    for function in functions:
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                assert call.func.id not in ("min", "max"), f"{path.name}:{call.lineno}, in {function.name}"

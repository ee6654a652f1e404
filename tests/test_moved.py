"""Module paths of the last release: they import, warn once, and have the same objects."""

import importlib
import subprocess
import sys
import warnings

import pytest

from paged_ops.moved import MOVED, RENAMED

NEEDS = {"transformers": "transformers", "vllm": "vllm"}  # a folder, and the library that its modules import


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_has_the_objects_of_the_new(old):
    library = next((NEEDS[part] for part in MOVED[old].split(".") if part in NEEDS), None)
    if library is not None:
        pytest.importorskip(library)
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"^{old} is {MOVED[old]} now"):
        module = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    names = [name for name, value in vars(new).items() if getattr(value, "__module__", None) == new.__name__]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)
    assert all(getattr(module, name) is getattr(new, present) for name, present in RENAMED.get(old, {}).items())
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        importlib.import_module(old)


def test_both_forms_of_import():
    code = """
import importlib, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from paged_ops.parallel.spread import Spread
    import paged_ops.sampling
    from paged_ops.states import StateCache
    from paged_ops import sampling
    from paged_ops import allocator
    paged_ops.hybrid
    importlib.import_module("paged_ops.request")
    paged_ops.split_kv_cache
assert [each.category for each in caught] == [DeprecationWarning] * 7, caught
assert {each.filename for each in caught} == {"<string>"}, caught
import paged_ops.cache.shard, paged_ops.generation
assert Spread is paged_ops.cache.shard.TokenShard
assert paged_ops.sampling.SamplingParams is sampling.SamplingParams is paged_ops.generation.SamplingParams
assert StateCache is paged_ops.cache.StateCache
from paged_ops.cache import KVCache
assert KVCache is paged_ops.KVCache
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_nothing_of_the_package_uses_an_old_path():
    code = """
import importlib, pkgutil, sys, paged_ops, paged_ops.moved
for each in pkgutil.walk_packages(paged_ops.__path__, "paged_ops.", onerror=lambda name: None):
    if not each.name.endswith("__main__"):
        try:
            importlib.import_module(each.name)
        except ImportError:
            pass  # an optional library
assert not set(paged_ops.moved.MOVED) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_star_import_attributes_and_pickles():
    code = """
import pickle, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from paged_ops.allocator import *
from paged_ops.parallel.reduce import *
import paged_ops
assert BlockAllocator is paged_ops.BlockAllocator
assert RowSums is paged_ops.parallel.all_reduce.AllReduce and row_sums.__name__ == "prepare_all_reduce"
assert paged_ops.states.StateCache is paged_ops.StateCache
for path in ("paged_ops.request Request", "paged_ops.batch Batch", "paged_ops.sampling SamplingParams"):
    module, name = path.split()
    assert pickle.loads(f"c{module}\\n{name}\\n.".encode()).__name__ == name
assert not hasattr(paged_ops, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""``python -m tests.aot cuda:90 [NAME]`` compiles the variants for one target in this process.

NAME is a regular expression: only variants whose names match are compiled. Prints one JSON line per variant: its
kernels, their spills, expected instructions that are missing, and a hash of their assembly. With
``TRITON_DISABLE_LINE_INFO=1`` in the environment, equal hashes show that a change of the source left the compiled
kernels as they were.
"""

import json
import re
import sys

from tests.aot import compiler
from tests.aot.variants import variants

if __name__ == "__main__":
    target, name = sys.argv[1], "".join(sys.argv[2:3])
    compiler.install(target)
    for variant in variants(target):
        if re.search(name, variant.name):
            print(json.dumps(compiler.compile_variant(variant, target)), flush=True)

"""An op's result depends on its arguments alone: every ambient state, over every 16th case of the registry.

``make fuzz CAMPAIGNS=ambient`` runs all cases.
"""

import pytest
import torch
from fuzz import ambient

from paged_ops import registry, testing

EVERY = 16
ALL = [(op, case) for op, cases in testing.CASES.items() for case in cases][::EVERY]


@pytest.mark.parametrize("path", ambient.PATHS)
@pytest.mark.parametrize("op", sorted(testing.CASES))
def test_no_state_changes_a_result(op, path, device):
    cases = [case for name, case in ALL if name == op]
    if path == "torch" and "attention" not in op:
        pytest.skip("one path")
    found = [line for case in cases for line in ambient.findings(op, case, device, path)]
    assert not found, "\n".join(found)

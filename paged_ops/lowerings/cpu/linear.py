"""Linear layers on the CPU: torch's matmul."""

import torch.nn.functional as F
from torch import Tensor


def few_row_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)

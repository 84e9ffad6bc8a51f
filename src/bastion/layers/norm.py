"""Root-mean-square normalisation in few operations."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """`x / sqrt(mean(x**2) + epsilon) * weight` for inference, over the last dimension.

    torch's own is made of some nine small operations on a CPU, whose calls are what a pass of one row pays for; here it
    is a norm, a hypotenuse, a quotient and a product. As in transformers the normalisation is in float32 and
    rounded before the weight is applied.
    """

    __slots__ = ("epsilon", "root", "weight")

    def __init__(self, weight: Tensor, epsilon: float):
        self.weight = weight
        self.root = weight.shape[0] ** -0.5
        self.epsilon = torch.tensor(epsilon**0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d]."""
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.mul_(self.root).hypot_(self.epsilon)
        normed: Tensor = x / scale
        return normed.to(x.dtype).mul_(self.weight)

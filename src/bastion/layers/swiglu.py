"""The gated feed-forward network of Llama and Qwen layers, for training."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`; parameter names are those of transformers."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

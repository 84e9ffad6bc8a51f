"""The TreeFlash network: a DFlash body, and a correction of its guesses for the token before (arXiv 2606.03819)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bastion.drafters.checkpoint import weights_digest
from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.treeflash.config import TreeFlashConfig

EPSILON = 1e-6  # of the correction's norm, whatever the body's


class Correction(nn.Module):
    """Adds to a hidden state what the token before the slot tells: `h + SwiGLU([norm(embedding); final_norm(h)])`."""

    def __init__(self, config: TreeFlashConfig):
        """A correction of nothing: the last layer is zero, and training starts at the body's own guesses."""
        super().__init__()
        hidden = config.body.hidden
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.ug = nn.Linear(2 * hidden, 2 * config.intermediate)
        self.d = nn.Linear(config.intermediate, hidden, bias=False)
        nn.init.normal_(self.ug.weight, std=config.body.body.initializer_range)
        nn.init.zeros_(self.ug.bias)
        nn.init.zeros_(self.d.weight)

    def forward(self, hidden: Tensor, normed: Tensor, previous: Tensor) -> Tensor:
        """Corrected hidden states [..., hidden], before the final norm.

        All [..., hidden]: the body's before and after the final norm, and embeddings of the tokens before the slots.
        """
        up, gate = self.ug(torch.cat((self.norm(previous), normed), -1)).chunk(2, -1)
        corrected: Tensor = hidden + self.d(functional.silu(gate) * up)
        return corrected


class TreeFlashModel(nn.Module):
    """A TreeFlash drafter without embeddings and head; parameter names are those of the public project."""

    def __init__(self, config: TreeFlashConfig):
        """Make a drafter with a random body, and a correction that does nothing yet."""
        super().__init__()
        self.config = config
        self.model = DFlashModel(config.body)
        self.ar_approximation = Correction(config)

    def digest(self) -> str:
        """SHA-256 of configuration and weights. Take it before `for_inference`, which hides the weights."""
        return weights_digest(self.config.raw, self.state_dict())

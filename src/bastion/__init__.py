"""Exact, budget-aware speculative decoding for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bastion.errors import BastionError

if TYPE_CHECKING:
    from bastion.integrations.transformers import custom_generate
    from bastion.model import GenerationResult, Model, load

__all__ = ["BastionError", "GenerationResult", "Model", "custom_generate", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, and `bastion --help` needs neither."""
    if name == "custom_generate":
        from bastion.integrations.transformers import custom_generate

        return custom_generate
    if name in __all__:
        from bastion import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""EAGLE-3: one decoder layer that drafts a token a pass (arXiv 2503.01840)."""

from bastion.drafters.eagle3.checkpoint import load_model, save_model
from bastion.drafters.eagle3.config import Eagle3Config
from bastion.drafters.eagle3.drafter import Eagle3Drafter
from bastion.drafters.eagle3.model import Eagle3Model

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Model", "load_model", "save_model"]

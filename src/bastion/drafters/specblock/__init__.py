"""SpecBlock: each pass drafts a block of positions that depend on each other (arXiv 2605.07243)."""

from bastion.drafters.specblock.checkpoint import load_model, save_model
from bastion.drafters.specblock.config import SpecBlockConfig
from bastion.drafters.specblock.drafter import SpecBlockDrafter
from bastion.drafters.specblock.model import SpecBlockModel

__all__ = ["SpecBlockConfig", "SpecBlockDrafter", "SpecBlockModel", "load_model", "save_model"]

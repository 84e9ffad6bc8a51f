"""DFlash: block diffusion drafts all positions in one pass (arXiv 2602.06036)."""

from bastion.drafters.dflash.checkpoint import load_model, save_model
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.dflash.model import DFlashModel

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashModel", "load_model", "save_model"]

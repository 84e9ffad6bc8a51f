"""TreeFlash: a DFlash drafter whose guesses are corrected for the token before them (arXiv 2606.03819)."""

from bastion.drafters.treeflash.checkpoint import load_model, save_model
from bastion.drafters.treeflash.config import TreeFlashConfig
from bastion.drafters.treeflash.drafter import TreeFlashDrafter
from bastion.drafters.treeflash.model import TreeFlashModel

__all__ = ["TreeFlashConfig", "TreeFlashDrafter", "TreeFlashModel", "load_model", "save_model"]

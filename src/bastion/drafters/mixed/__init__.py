"""A drafter and the n-gram index in one tree."""

from bastion.drafters.mixed.drafter import MixedDrafter, MixedProposal, alone
from bastion.drafters.mixed.trust import Trust

__all__ = ["MixedDrafter", "MixedProposal", "Trust", "alone"]

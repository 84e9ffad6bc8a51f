"""The training-free n-gram drafter."""

from bastion.drafters.ngram.drafter import NgramDrafter, NgramProposal

__all__ = ["NgramDrafter", "NgramProposal"]

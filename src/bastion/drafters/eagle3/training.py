"""Training an EAGLE-3 drafter: chains that it unrolls itself, as in drafting (arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bastion.drafters.eagle3.checkpoint import load_model, save_model
from bastion.drafters.eagle3.config import Eagle3Config
from bastion.drafters.eagle3.model import Eagle3Model
from bastion.drafters.loading import checkpoint_source
from bastion.drafters.pairing import check_target
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.features import Features
from bastion.training.ingredients import check_sizes, frequent_tokens, head_weights, target_layers
from bastion.training.losses import decay_loss
from bastion.training.measures import Outcome
from bastion.training.recipe import FeatureRecipe, block_outcome

DECAY = 0.8  # what a step counts, over the one before


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """What an EAGLE-3 drafter learns from, and how. Raises BastionError for values that make no sense."""

    anchors: int = 16  # chains of each conversation in a step
    steps: int = 7  # that a chain is unrolled
    distill: float = 0.0  # share of the target's distribution in the labels; the rest is the token it wrote

    def __post_init__(self) -> None:
        if self.anchors < 1 or self.steps < 1 or not 0 <= self.distill <= 1:
            raise BastionError("anchors and steps must be 1 or more, and distill between 0 and 1")


def new_model(
    target: Target, conversations: Sequence[Conversation], draft_vocab: int | None = None, taps: int = 5
) -> Eagle3Model:
    """A drafter in the sizes of its target's layers; its head begins as the target's, the rest is random.

    Raises BastionError for sizes that make no sense, and for a target that verifies no drafts.
    """
    shape = target.shape
    check_sizes(target, draft_vocab)
    layers = target_layers(shape.layers, taps)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": draft_vocab or shape.vocab,
        # Ours, and what other readers look for: the layers whose inputs are read.
        "eagle_config": {
            "target_layer_ids": list(layers),
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers],
            "use_aux_hidden_state": True,
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": target.max_context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": shape.layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }
    model = Eagle3Model(Eagle3Config.from_dict(raw), len(layers))
    if model.config.draft_vocab is not None and draft_vocab is not None:
        model.d2t.copy_(frequent_tokens(conversations, draft_vocab) - torch.arange(draft_vocab))
    with torch.no_grad():
        model.lm_head.weight.copy_(head_weights(target, model.token_ids(), torch.device("cpu"))[0])
    return model


def existing_model(source: str) -> Eagle3Model:
    """A drafter to train further, in float32: a folder, a hub id, or one that comes with the package."""
    return load_model(checkpoint_source(source), torch.device("cpu"), torch.float32)


class Eagle3Recipe(FeatureRecipe):
    """An EAGLE-3 drafter in training, as `training.trainer.Trainer` takes it."""

    def __init__(
        self,
        model: Eagle3Model,
        target: Target,
        conversations: Sequence[Conversation],
        features: Features,
        settings: Eagle3Settings,
        device: torch.device,
    ):
        """Join what is needed; `features` are those of the model's target layers for all conversations."""
        check_target(model.config.for_target(target.shape.layers), target)
        super().__init__(model, target, conversations, features, settings, device)

    def save(self, folder: Path) -> None:
        """Export the drafter in bfloat16."""
        save_model(self.exported().to(torch.bfloat16), folder)

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits of random chains of some conversations. `module` is the model, as wrapped for training."""
        drafts = self.draw(indices, self.settings.steps, generator)
        hidden = module(
            drafts.before,
            self.embed(drafts.tokens),
            drafts.features,
            drafts.positions,
            self.embed(drafts.behind),
            drafts.sees(),
        )
        return block_outcome(
            partial(nn.functional.linear, weight=self.body.lm_head.weight),
            hidden,
            drafts,
            lambda objective, valid, _: decay_loss(objective, valid, -1 / math.log(DECAY)),
            self.settings.distill,
        )

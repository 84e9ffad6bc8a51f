"""A toy target, texts that a drafter can learn, and a trainer for it."""

from pathlib import Path

import torch
from accelerate import Accelerator

from bastion.drafters.dflash.training import DFlashRecipe, DFlashSettings, new_model
from bastion.training.data import Conversation
from bastion.training.trainer import Trainer, TrainerSettings
from dflash_support import CPU


def counting(length: int, start: int) -> Conversation:
    """A text that a drafter can learn: numbers in steps that the prompt names."""
    step = 1 + start % 2
    return Conversation((90 + step, *((start + i * step) % 23 + 2 for i in range(length))), 2, "", 0.0)


def make_trainer(toy, folder: Path, max_steps: int, seed: int = 0, draft_vocab: int | None = 20, **settings) -> Trainer:
    target, conversations, features = toy
    torch.manual_seed(seed)
    model = new_model(target, conversations, layers=2, block_size=4, draft_vocab=draft_vocab)
    recipe = DFlashRecipe(model, target, conversations, features, DFlashSettings(**({"anchors": 8} | settings)), CPU)
    run = TrainerSettings(
        batch=4,
        learning_rate=3e-3,
        max_steps=max_steps,
        held_back=0.1,
        evaluate_every=10,
        checkpoint_every=10,
        seed=seed,
    )
    return Trainer(recipe, run, folder, Accelerator(cpu=True))

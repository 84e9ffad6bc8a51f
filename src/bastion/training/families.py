"""The families of drafters that can be trained, and what each of them makes of the options of `bastion train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bastion.drafters.dflash import training as dflash
from bastion.drafters.eagle3 import training as eagle3
from bastion.drafters.pairing import check_target
from bastion.drafters.specblock import training as specblock
from bastion.drafters.treeflash import training as treeflash
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.features import Features
from bastion.training.trainer import Recipe

Build = Callable[[Features, torch.device], Recipe]


@dataclass(frozen=True, slots=True)
class Options:
    """What a drafter is made from. None: not given; then the family's default holds."""

    init: str | None = None
    layers: int | None = None
    block_size: int | None = None
    draft_vocab: int | None = None
    intermediate: int | None = None
    anchors: int | None = None
    loss: str | None = None
    gamma: float | None = None
    distill: float | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named options that are given."""
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}


@dataclass(frozen=True, slots=True)
class Plan:
    """A drafter that is to be trained."""

    layers: tuple[int, ...]  # of the target, whose features it reads
    build: Build


def plan(family: str, target: Target, conversations: Sequence[Conversation], options: Options) -> Plan:
    """Prepare a drafter of a family. Raises BastionError for options that it does not take, or that make no sense."""
    taken, prepare = FAMILIES[family]
    refused = [name for name in options.given(*asdict(options)) if name not in taken]
    if refused:
        raise BastionError(f"{family} takes no --{refused[0].replace('_', '-')}: leave it out")
    sizes = options.given("layers", "block_size", "draft_vocab")
    if options.init is not None and sizes:
        raise BastionError("--init brings its own sizes: leave out --layers, --block-size and --draft-vocab")
    return prepare(target, conversations, options)


def _dflash(target: Target, conversations: Sequence[Conversation], options: Options) -> Plan:
    settings = dflash.DFlashSettings(**options.given("anchors", "loss", "gamma", "distill"))
    if options.init is None:
        sizes = options.given("layers", "block_size", "draft_vocab")
        model = dflash.new_model(target, conversations, **sizes)
    else:
        model = dflash.existing_model(options.init)
    check_target(model.config, target)
    return Plan(
        model.config.target_layers,
        lambda features, device: dflash.DFlashRecipe(model, target, conversations, features, settings, device),
    )


def _treeflash(target: Target, conversations: Sequence[Conversation], options: Options) -> Plan:
    settings = dflash.DFlashSettings(**options.given("anchors", "loss", "gamma", "distill"))
    if options.init is None:
        raise BastionError("treeflash corrects a DFlash drafter: name it with --init")
    model = treeflash.new_model(dflash.existing_model(options.init), **options.given("intermediate"))
    check_target(model.config.body, target)
    return Plan(
        model.config.body.target_layers,
        lambda features, device: treeflash.TreeFlashRecipe(model, target, conversations, features, settings, device),
    )


def _eagle3(target: Target, conversations: Sequence[Conversation], options: Options) -> Plan:
    settings = eagle3.Eagle3Settings(**options.given("anchors", "distill"))
    if options.init is None:
        model = eagle3.new_model(target, conversations, options.draft_vocab)
    else:
        model = eagle3.existing_model(options.init)
    config = model.config.for_target(target.shape.layers)
    check_target(config, target)
    return Plan(
        config.target_layers,
        lambda features, device: eagle3.Eagle3Recipe(model, target, conversations, features, settings, device),
    )


def _specblock(target: Target, conversations: Sequence[Conversation], options: Options) -> Plan:
    settings = specblock.SpecBlockSettings(**options.given("anchors", "distill"))
    if options.init is None:
        model = specblock.new_model(target, conversations, **options.given("layers", "draft_vocab"))
    else:
        model = specblock.existing_model(options.init)
    check_target(model.config.body, target)
    return Plan(
        model.config.body.target_layers,
        lambda features, device: specblock.SpecBlockRecipe(model, target, conversations, features, settings, device),
    )


Prepare = Callable[[Target, Sequence[Conversation], Options], Plan]
FAMILIES: dict[str, tuple[frozenset[str], Prepare]] = {
    "dflash": (
        frozenset({"init", "layers", "block_size", "draft_vocab", "anchors", "loss", "gamma", "distill"}),
        _dflash,
    ),
    "treeflash": (frozenset({"init", "intermediate", "anchors", "loss", "gamma", "distill"}), _treeflash),
    "eagle3": (frozenset({"init", "draft_vocab", "anchors", "distill"}), _eagle3),
    "specblock": (frozenset({"init", "layers", "draft_vocab", "anchors", "distill"}), _specblock),
}

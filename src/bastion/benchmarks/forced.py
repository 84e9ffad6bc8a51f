"""Drafts whose acceptance is forced: what a tree costs when every guess is wrong, and brings when all are right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from bastion.benchmarks.methods import Messages, Method, Outcome, PolicyMethod, TextSettings
from bastion.decoding.budget import FixedBudget, Plain
from bastion.drafters.base import Candidates, DraftContext, Drafter, Frontier, Ids, Proposal
from bastion.errors import BastionError
from bastion.model import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes, root not counted
BASELINE = "ar"


class ForcedProposal:
    """A proposal with its own path probabilities, and so its own shape of tree, but other tokens.

    The first child of a node is the text's true token where `hits` says so; all other children are wrong.
    """

    def __init__(self, inner: Proposal, truth: Sequence[int], hits: Sequence[bool], vocab: int):
        """Take the true tokens of the next positions, as far as the text goes, and which of them are guessed."""
        self.depth, self.beam = inner.depth, inner.beam
        self._inner, self._truth, self._hits, self._vocab = inner, truth, hits, vocab
        self._guesses: Ids  # [m, k]: what the inner proposal last expanded to
        self._shown: Ids  # [m, k]: what was made of it

    @property
    def ready(self) -> int:
        """As the inner proposal has it."""
        return self._inner.ready

    @property
    def passes(self) -> int:
        """As the inner proposal has it."""
        return self._inner.passes

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The inner proposal's children with exchanged tokens; it is shown its own tokens, not those."""
        if frontier.depth:
            ranks = (self._shown[frontier.rows] == frontier.tokens[:, None]).argmax(1)
            frontier = Frontier(frontier.depth, self._guesses[frontier.rows, ranks], frontier.rows)
        found = self._inner.expand(frontier, width)
        self._guesses = found.tokens
        tokens = found.tokens.copy()
        if frontier.depth < len(self._truth) and tokens.shape[1]:
            true = self._truth[frontier.depth]
            rows, ranks = (tokens == true).nonzero()
            if self._hits[frontier.depth]:
                tokens[rows, ranks] = tokens[rows, 0]
                tokens[:, :1] = true
            else:  # siblings stay different, for a node is known by its token
                for row, rank in zip(rows.tolist(), ranks.tolist(), strict=True):
                    wrong = set(range(self._vocab)[: tokens.shape[1] + 1]) - {true, *tokens[row].tolist()}
                    tokens[row, rank] = min(wrong, default=(true + 1) % self._vocab)
        self._shown = tokens
        return Candidates(tokens, found.log_probs)


class ForcedDrafter:
    """Runs a drafter for what it costs, and guesses each token of one known text with a given probability."""

    def __init__(self, inner: Drafter, text: Sequence[int], acceptance: float, seed: int, vocab: int):
        """Take prompt and continuation in `text`.

        Whether a token is guessed is drawn once for each of the text's places. A round ends at its first miss, so no
        place counts twice and guesses are independent by depth; and for one seed a higher acceptance guesses all that
        a lower one does, whatever the trees, which keeps chance out of the comparison.
        """
        self.name, self.digest, self.depth = inner.name, inner.digest, inner.depth
        self.feature_layers = inner.feature_layers
        self._inner, self._text, self._vocab = inner, text, vocab
        self._hits: list[bool] = (np.random.default_rng(seed).random(len(text)) < acceptance).tolist()

    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Draft for every sequence; each is the known text so far."""
        proposals: list[Proposal] = []
        for inner, context in zip(self._inner.propose(contexts), contexts, strict=True):
            place = len(context.tokens)
            proposals.append(ForcedProposal(inner, self._text[place:], self._hits[place:], self._vocab))
        return proposals


class PlainTexts:
    """What the target writes without drafts, kept for the prompt that was asked for last."""

    def __init__(self, model: Model):
        self._model = model.with_policy(Plain())
        self._key: tuple[list[int], int] | None = None
        self._new: list[int] = []

    def write(self, messages: Messages, max_new_tokens: int) -> tuple[list[int], list[int]]:
        """The tokens of the prompt, and the new ones."""
        prompt = self._model.encode(messages)
        if self._key != (prompt, max_new_tokens):
            self._new = self._model.generate(messages, max_new_tokens=max_new_tokens, temperature=0.0).token_ids
            self._key = prompt, max_new_tokens
        return prompt, self._new


class ForcedMethod:
    """Trees of one size with one forced acceptance. Only the plain text of the prompt is written beforehand."""

    def __init__(self, model: Model, nodes: int, acceptance: float, texts: PlainTexts):
        self.name = method_name(nodes, acceptance)
        self._model, self._acceptance, self._texts = model.with_policy(FixedBudget(nodes)), acceptance, texts

    def write(self, messages: Messages, settings: TextSettings) -> Outcome:
        """Answer a conversation.

        Raises BastionError for a temperature above 0, and if in float32 the answer is not that of plain decoding.
        """
        if settings.temperature:
            raise BastionError(f"acceptance is forced at temperature 0 only, not at {settings.temperature:g}")
        prompt, new = self._texts.write(messages, settings.max_new_tokens)
        target = self._model.target
        drafter = ForcedDrafter(
            self._model.drafter, [*prompt, *new], self._acceptance, settings.seed, target.shape.vocab
        )
        model = self._model.with_policy(self._model.policy, drafter)
        outcome = PolicyMethod(self.name, model).write(messages, settings)
        if outcome.token_ids != new and target.dtype == torch.float32:
            raise BastionError(
                f"{self.name} wrote another text than plain decoding, in float32: look at it with bastion verify"
            )
        return outcome


def forced_methods(model: Model, acceptances: Sequence[float]) -> list[Method]:
    """Plain decoding, then all sizes of trees that the target can verify with each acceptance.

    All share one target and drafter, and run at temperature 0 only. Raises BastionError for acceptances that are no
    probabilities (see `check_acceptances`) and for a target that verifies no drafts.
    """
    check_acceptances(acceptances)
    support = model.target.tree_support
    if support == "none":
        raise BastionError(
            f"{model.target.name} decodes plainly: it verifies no drafts whose acceptance could be forced"
        )
    sizes = [nodes for nodes in SIZES if support == "tree" or nodes <= model.drafter.depth]
    texts = PlainTexts(model)
    forced = [ForcedMethod(model, nodes, acceptance, texts) for nodes, acceptance in product(sizes, acceptances)]
    return [PolicyMethod(BASELINE, model.with_policy(Plain())), *forced]


def check_acceptances(acceptances: Sequence[float]) -> None:
    """Raise BastionError unless they are different probabilities, at least one."""
    wrong = [value for value in acceptances if not 0 <= value <= 1]
    if not acceptances or wrong or len(set(acceptances)) < len(acceptances):
        given = ", ".join(f"{value:g}" for value in wrong or acceptances) or "none"
        raise BastionError(f"forced acceptances must be different numbers from 0 to 1, as in 0,0.5,1; not {given}")


def method_name(nodes: int, acceptance: float) -> str:
    """Such as "forced:16@0.5"."""
    return f"forced:{nodes}@{acceptance}"


def parse_name(name: str) -> tuple[int, float]:
    """Nodes and acceptance of a `method_name`."""
    nodes, _, acceptance = name.removeprefix("forced:").partition("@")
    return int(nodes), float(acceptance)

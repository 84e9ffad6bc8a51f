"""The mixture of a drafter and the n-gram index: honest probabilities, trust that learns, exact text."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion.decoding.budget import Chain, FixedBudget, Plain
from bastion.decoding.growth import grow
from bastion.decoding.loop import decode
from bastion.drafters.base import Candidates, DraftContext, Frontier
from bastion.drafters.mixed import MixedDrafter, Trust
from bastion.drafters.ngram import NgramDrafter
from bastion.drafters.ngram.index import SuffixIndex
from bastion.errors import BastionError
from tiny import FixedDrafter, generation, make_target

ROOT = Frontier(0, np.array([0]), np.array([0]))
VOCAB = 9

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)
opinions = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(0.01, 1.0), max_size=6).map(
    lambda shares: {token: share / max(1.0, sum(shares.values())) for token, share in shares.items()}
)


class Opinion:
    """Says the same about the children of every node, with padding behind it, `levels` of them a pass."""

    beam = 5

    def __init__(self, shares: dict[int, float], depth: int = 3, levels: int = 3):
        self.shares, self.depth, self.ready, self.levels, self.passes = shares, depth, levels, levels, 1

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        if frontier.depth == self.ready:
            self.passes, self.ready = self.passes + 1, self.ready + self.levels
        named = sorted(self.shares.items(), key=lambda pair: -pair[1])[:width]
        tokens = [token for token, _ in named] + [0, 0]
        log_probs = [math.log(share) for _, share in named] + [-math.inf] * 2
        shape = (len(frontier.tokens), len(tokens))
        return Candidates(np.broadcast_to(tokens, shape), np.broadcast_to(np.array(log_probs, np.float32), shape))


class Opinionated:
    """A drafter that says what it is told to; it keeps what it was given."""

    name, digest, depth, feature_layers = "opinion", "0", 3, (1, 2)

    def __init__(self, shares: dict[int, float]):
        self.shares = shares
        self.seen: list[tuple[list[torch.Tensor], object]] = []

    def propose(self, contexts):
        for context in contexts:
            self.seen.append((list(context.features), context.memory))
            context.features.clear()
            context.memory = (context.memory or 0) + 1
        return [Opinion(self.shares) for _ in contexts]


def children(candidates: Candidates, row: int = 0) -> dict[int, float]:
    pairs = zip(candidates.tokens[row].tolist(), np.exp(candidates.log_probs[row]).tolist(), strict=True)
    return {token: p for token, p in pairs if p > 0}


def weight(context: DraftContext, match: int) -> float:
    return context.memory.trust.weight(match)


def odds(context: DraftContext, match: int) -> float:
    return weight(context, match) / (1 - weight(context, match))


@given(texts, opinions, st.integers(1, 59), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_children_are_a_union_with_honest_probabilities(tokens, shares, start, width) -> None:
    drafter = Opinionated(shares)
    mixed, context = MixedDrafter(drafter), DraftContext(tokens[:start])
    mixed.propose([context])[0].expand(ROOT, 8)
    context.tokens = tokens  # what came is learned from
    (proposal,) = mixed.propose([context])
    index = context.memory.index
    frontier, suffixes, gains = ROOT, [index.suffix], [1.0]
    for depth in range(5):  # the drafter ends at 3
        candidates = proposal.expand(frontier, width)
        assert candidates.tokens.shape == candidates.log_probs.shape
        assert candidates.log_probs.dtype == np.float32
        for row, (suffix, gain) in enumerate(zip(suffixes, gains, strict=True)):
            found = children(candidates, row)
            listed = np.exp(candidates.log_probs[row])
            assert len(found) == (listed > 0).sum() <= width, "a token is named twice, or there are too many"
            assert (np.diff(listed) <= 0).all()
            assert listed.sum() <= 1 + 1e-5
            own = index.predict(suffix, 4, min(0.02 / gain, 1.0)) if gain >= 0.02 else index.predict((), 4, 1.0)
            drafted = dict(sorted(shares.items(), key=lambda pair: -pair[1])[:width]) if depth < 3 else {}
            trust = weight(context, own.match) if depth < 3 else 1.0
            kept = 1 - trust * (1 - own.escape)
            expected = {token: kept * share for token, share in drafted.items()}
            for token, p in own.likeliest:
                expected[token] = expected.get(token, 0.0) + trust * p
            best = sorted(expected.values(), reverse=True)[:width]
            assert list(found.values()) == pytest.approx(best, rel=1e-4)
            assert all(p == pytest.approx(expected[token], rel=1e-4) for token, p in found.items())
        rows, ranks = (column[::-1] for column in np.nonzero(candidates.log_probs > -math.inf))
        if not len(rows):
            return
        frontier = Frontier(depth + 1, candidates.tokens[rows, ranks][:8], rows[:8])
        places = list(zip(rows.tolist(), ranks.tolist(), strict=True))[:8]
        gains = [gains[row] * math.exp(candidates.log_probs[row, rank]) for row, rank in places]
        suffixes = [(*suffixes[row], candidates.tokens[row, rank].item())[-8:] for row, rank in places]


def test_text_that_repeats_itself_is_followed_beyond_the_block() -> None:
    phrase = list(range(40, 60))
    marginals = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    mixed = MixedDrafter(FixedDrafter(marginals))
    assert (mixed.name, mixed.depth, mixed.feature_layers) == ("fixed+ngram", 16, ())
    assert mixed.digest == f"fixed+{NgramDrafter().digest}"
    (proposal,) = mixed.propose([DraftContext([*phrase * 3, *phrase[:4]])])
    tree = grow(proposal, phrase[3], 64, width=1)
    assert tree.is_chain
    assert tree.tokens[1:].tolist() == phrase[4:]
    (proposal,) = mixed.propose([DraftContext([*phrase * 3, *phrase[:4]])])
    tree = grow(proposal, phrase[3], 24)
    assert tree.depths.max() == 16
    assert (tree.depths == 1).sum() > 1, "the drafter's own guesses belong to the tree too"


def test_a_chain_stays_one_where_the_index_is_alone() -> None:
    phrase = list(range(40, 50))
    (proposal,) = MixedDrafter(Opinionated({})).propose([DraftContext([*phrase, 60, *phrase, 61] * 2 + phrase[:4])])
    tree = grow(proposal, 43, 64, width=1)
    assert tree.is_chain
    assert tree.tokens[1:7].tolist() == phrase[4:]
    assert tree.tokens[7] in (60, 61)


def test_a_token_only_the_drafter_knows_is_followed_by_the_index() -> None:
    """After 7 always came 1, so far; the drafter says 5, after which 6 and 8 came."""
    (proposal,) = MixedDrafter(Opinionated({5: 0.9})).propose([DraftContext([7, 1, 2, 5, 6, 8, 7, 1, 3, 7])])
    first = proposal.expand(ROOT, 4)
    assert set(children(first)) == {5, 1}
    second = proposal.expand(Frontier(1, np.array([5]), np.array([0])), 4)
    third = proposal.expand(Frontier(2, np.array([6]), np.array([0])), 4)
    assert set(children(second)) == {5, 6}
    assert set(children(third)) == {5, 8}


def test_text_without_repeats_is_left_to_the_drafter() -> None:
    marginals = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    alone = FixedDrafter(marginals)
    contexts = [DraftContext(list(range(60)))]
    for policy in (8, 30):
        trees = [grow(drafter.propose(contexts)[0], 59, policy) for drafter in (alone, MixedDrafter(alone))]
        for name in ("tokens", "parents", "depths", "log_probs"):
            values = [getattr(tree, name) for tree in trees]
            assert (values[0] == values[1]).all()
        contexts[0].memory = None


def follow_text(drafter: Opinionated, tokens: list[int], start: int) -> DraftContext:
    """Propose before each token of a text, with the drafter being right."""
    mixed, context = MixedDrafter(drafter), DraftContext(tokens[:start])
    for token in tokens[start:]:
        drafter.shares = {token: 0.6, 90: 0.2}
        mixed.propose([context])[0].expand(ROOT, 4)
        context.tokens.append(token)
    mixed.propose([context])
    return context


def test_trust_falls_where_the_index_is_always_wrong_and_rises_where_it_is_right() -> None:
    """Behind the whole phrase always comes another token, inside it never."""
    drafter, phrase = Opinionated({}), list(range(1, 9))
    prior = follow_text(drafter, phrase, 8)
    learned = follow_text(drafter, [token for k in range(12) for token in (*phrase, 100 + k)], 8)
    assert odds(learned, 8) < 0.5 * odds(prior, 8)  # the index's own estimates fall too, so that this is enough
    assert odds(learned, 3) > 1.5 * odds(prior, 3)
    # and it is used: where the index was wrong, more is left to the drafter than its own estimate would leave
    learned.tokens += phrase
    drafter.shares = {50: 0.6}
    (doubted,) = MixedDrafter(drafter).propose([learned])
    found = children(doubted.expand(ROOT, 8))
    learned.memory.trust = Trust()
    (believed,) = MixedDrafter(drafter).propose([learned])
    before = children(believed.expand(ROOT, 8))
    assert found[50] > before[50]
    assert all(found[token] < before[token] for token in found if token != 50)


def test_tokens_that_came_are_compared_along_their_path() -> None:
    """5 and 6 came: the second is judged at the node of 5, in the frontier's order, and only where it was expanded."""
    scores = []
    for expanded in ([8, 5], [8]):
        drafter = Opinionated({5: 0.5, 8: 0.3})
        mixed, context = MixedDrafter(drafter), DraftContext([5, 6, 1, 5, 6, 2, 3])
        (proposal,) = mixed.propose([context])
        proposal.expand(ROOT, 4)
        proposal.expand(Frontier(1, np.array(expanded), np.zeros(len(expanded), np.int64)), 4)
        before = weight(context, 1)
        context.tokens += [5, 6]
        mixed.propose([context])
        scores.append(weight(context, 1) - before)
    assert scores[0] > 0.01
    assert scores[1] == 0


def test_two_contexts_keep_what_is_theirs() -> None:
    drafter = Opinionated({5: 0.5})
    mixed = MixedDrafter(drafter)
    contexts = [DraftContext([1, 2, 1], features=[torch.ones(2, 4)]), DraftContext([1, 3, 1], 0.7)]
    first, second = (set(children(one.expand(ROOT, 4))) for one in mixed.propose(contexts))
    assert (first, second) == ({2, 5}, {3, 5})
    assert contexts[0].features == []
    assert [len(features) for features, _ in drafter.seen] == [1, 0]
    assert contexts[1].memory.context.temperature == 0.7
    trust = weight(contexts[1], 1)
    contexts[0].tokens += [9]
    contexts[0].features.append(torch.ones(1, 4))
    mixed.propose(contexts)
    assert weight(contexts[0], 1) < trust == weight(contexts[1], 1)
    assert [(len(features), memory) for features, memory in drafter.seen[2:]] == [(1, 1), (0, 1)]


def sure_context(pays) -> DraftContext:
    """A text that the index knows by heart."""
    return DraftContext([*range(1, 9)] * 8, features=[torch.ones(2, 4)], pays=pays)


def test_the_drafter_is_left_out_where_it_does_not_pay() -> None:
    drafter, outlooks = Opinionated({50: 0.5}), []
    contexts = [sure_context(lambda outlook: outlooks.append(outlook)), DraftContext([1, 2, 3, 1])]
    alone, both = MixedDrafter(drafter).propose(contexts)
    assert (alone.passes, both.passes) == (0, 1)
    assert [len(features) for features, _ in drafter.seen] == [0]  # the second context's
    tree = grow(alone, 8, 24)
    assert tree.tokens[1:9].tolist() == list(range(1, 9))
    np.testing.assert_allclose(tree.gains[:12], outlooks[0].gains[:12], rtol=1e-5)
    assert outlooks[0].passes == 0
    assert outlooks[0].levels.tolist() == [3, 2, 1]  # below the root, 1 and 2
    # the features that came meanwhile wait for the drafter
    contexts[0].tokens.append(1)
    contexts[0].features.append(torch.ones(1, 4))
    contexts[0].pays = lambda outlook: True
    MixedDrafter(drafter).propose(contexts[:1])
    assert [len(block) for block in drafter.seen[1][0]] == [2, 1]


def test_what_the_index_leaves_open_is_what_the_drafter_can_gain() -> None:
    """Of 1 came 2 once, of 2 nothing yet: the root and the node of 2 are open, as far as a token unseen is likely."""
    outlooks = []
    context = DraftContext([1, 2, 1], pays=lambda outlook: outlooks.append(outlook))
    MixedDrafter(Opinionated({})).propose([context])
    index = SuffixIndex()
    index.extend([1, 2, 1])
    ((_, likely),) = index.predict((1,), 4, 0.02).likeliest
    (outlook,) = outlooks
    assert outlook.gains[0] == pytest.approx(likely, rel=1e-5)
    assert outlook.frontier[0] == pytest.approx(1 - likely, rel=1e-5)
    assert 0 < outlook.frontier[1] <= likely + 1e-6


def test_a_drafter_that_is_often_wrong_is_asked_less_and_tried_again() -> None:
    drafter, seen = Opinionated({50: 0.9}), []
    context = DraftContext([1], pays=lambda outlook: seen.append(outlook.survival) or outlook.survival > 0.3)
    mixed, passes = MixedDrafter(drafter), []
    for token in range(100, 220):  # nothing repeats, and the drafter is always wrong
        (proposal,) = mixed.propose([context])
        proposal.expand(ROOT, 4)
        passes.append(proposal.passes)
        context.tokens.append(token)
    assert min(seen) < 0.3 < seen[0]
    rests = "".join(map(str, passes)).split("1")
    assert passes[:10] == [1] * 10
    assert sum(map(bool, rests)) >= 3  # rests that ended, too
    right = Opinionated({})
    mixed, context = MixedDrafter(right), DraftContext([1], pays=lambda outlook: seen.append(outlook.survival) or True)
    for token in range(100, 160):
        right.shares = {token: 0.5}
        mixed.propose([context])[0].expand(ROOT, 4)
        context.tokens.append(token)
    assert seen[-1] > 0.9


def test_a_drafter_that_was_wrong_at_first_is_tried_in_time() -> None:
    """One that pays only where it is right more often than not, in a text that the index does not know."""
    context, passes = DraftContext([1], pays=lambda outlook: outlook.survival > 0.6), []
    mixed = MixedDrafter(Opinionated({}))
    for token in range(100, 300):
        mixed.drafter.shares = {token: 0.9} if token >= 150 else {50: 0.9}
        (proposal,) = mixed.propose([context])
        proposal.expand(ROOT, 4)
        passes.append(proposal.passes)
        context.tokens.append(token)
    assert passes[0] == 1  # for a start it is believed in
    assert 0 < sum(passes[20:50]) < 10  # it was wrong
    assert all(passes[-50:])  # and became right


def test_a_drafter_that_names_nobody_was_not_right() -> None:
    mixed, context = MixedDrafter(Opinionated({})), DraftContext([1])
    (proposal,) = mixed.propose([context])
    nothing = Candidates(np.zeros((1, 0), np.int64), np.zeros((1, 0), np.float32))
    proposal._proposal.expand = lambda frontier, width: nothing
    proposal.expand(ROOT, 4)
    before = context.memory.reach.share
    context.tokens.append(5)
    mixed.propose([context])
    assert context.memory.reach.share < before


def test_further_passes_are_the_drafters() -> None:
    class Deepening(Opinionated):
        def propose(self, contexts):
            return [Opinion(self.shares, 3, 1) for _ in contexts]

    (proposal,) = MixedDrafter(Deepening({5: 0.9, 6: 0.1})).propose([DraftContext([1, 2, 3, 1, 2, 3, 1])])
    asked = []
    assert (proposal.ready, proposal.passes, proposal.beam) == (1, 1, 5)
    grow(proposal, 1, 40, deepens=lambda outlook: not asked.append(outlook.passes))
    assert asked == [1, 2]
    assert (proposal.ready, proposal.passes) == (16, 3)


@pytest.mark.parametrize("drafter", [NgramDrafter(), MixedDrafter(Opinionated({}))])
def test_a_second_index_is_refused(drafter) -> None:
    with pytest.raises(BastionError, match="already"):
        MixedDrafter(drafter)


@pytest.mark.parametrize("policy", [Chain(), FixedBudget(12)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}])
def test_same_tokens_as_plain_decoding(policy, sampling) -> None:
    target = make_target()
    marginals = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    written = []
    for drafter, way in ((None, Plain()), (MixedDrafter(FixedDrafter(marginals)), policy)):
        batch = [generation(target, prompt, 40, **sampling) for prompt in ([5, 9, 11, 5, 9, 11, 5], [3, 4, 3, 4])]
        for _ in decode(target, drafter, way, batch):
            pass
        written.append([one.stream.tokens for one in batch])
    assert written[0] == written[1]
    if not sampling:
        assert all(one.stats.mean_accepted_length > 1 for one in batch)

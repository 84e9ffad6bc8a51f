"""The n-gram drafter against brute force, and its honesty on text that repeats itself and text that does not."""

import gzip
import json
import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion.drafters.base import Candidates, DraftContext, Frontier, Proposal
from bastion.drafters.ngram import NgramDrafter
from bastion.drafters.ngram.index import SuffixIndex
from bastion.errors import BastionError

ROOT = Frontier(0, np.array([0]), np.array([0]))
# loose tokens make short and ambiguous matches, a phrase that comes back makes long ones
phrases = st.lists(st.integers(0, 8), min_size=1, max_size=12)
pieces_of_text = phrases.flatmap(lambda phrase: st.lists(st.one_of(st.just(phrase), phrases), min_size=1, max_size=8))
texts = pieces_of_text.map(lambda pieces: [token for piece in pieces for token in piece])


def propose(tokens: list[int]) -> Proposal:
    return NgramDrafter().propose([DraftContext(tokens=tokens)])[0]


def children(candidates: Candidates, row: int = 0) -> list[tuple[int, float]]:
    """Tokens and probabilities of a row's candidates, without the padding."""
    pairs = zip(candidates.tokens[row].tolist(), np.exp(candidates.log_probs[row]).tolist(), strict=True)
    return [(token, p) for token, p in pairs if p > 0]


def all_children(candidates: Candidates, depth: int) -> Frontier:
    """The frontier of all candidates, in an order that is not theirs."""
    rows, ranks = (column[::-1] for column in (candidates.log_probs > -math.inf).nonzero())
    return Frontier(depth, candidates.tokens[rows, ranks], rows)


def found_among(candidates: Candidates, frontier: Frontier) -> list[float]:
    """The log-probability of each node of the frontier, by its row and token."""
    pairs = zip(frontier.rows, frontier.tokens, strict=True)
    return [candidates.log_probs[row][candidates.tokens[row] == token].max().item() for row, token in pairs]


class Naive:
    """The same estimates by scanning the text for every question."""

    def __init__(self, text: list[int]):
        self.text = text
        self.hits = dict.fromkeys(range(1, 9), 0)
        self.misses = dict.fromkeys(range(1, 9), 0)
        self.expected_hits = dict.fromkeys(range(1, 9), 0.0)
        self.expected_misses = dict.fromkeys(range(1, 9), 0.0)
        for end in range(1, len(text)):
            for length, total, distinct, followers in self.levels(text[:end], text[:end]):
                miss = self.miss(length, total, distinct, 1.0)
                self.expected_misses[length] += miss
                self.expected_hits[length] += 1 - miss
                if text[end] in followers:
                    self.hits[length] += 1
                    break
                self.misses[length] += 1

    @staticmethod
    def levels(text: list[int], suffix: list[int]) -> list[tuple[int, int, int, list[int]]]:
        result, excluded = [], set()
        for length in range(min(8, len(suffix)), 0, -1):
            ends = [e for e in range(length, len(text)) if text[e - length : e] == suffix[-length:]]
            followers = [text[e] for e in ends if text[e] not in excluded]
            if followers:
                result.append((length, len(followers), len(set(followers)), followers))
                excluded |= set(followers)
        return result

    @staticmethod
    def miss(length: int, total: int, distinct: int, correction: float) -> float:
        odds = correction * distinct / total * 4.0 / length**1.5
        return odds / (1 + odds)

    def predict(self, path: list[int]) -> dict[int, float]:
        left, result = 1.0, {}
        for length, total, distinct, followers in self.levels(self.text, self.text + path):
            odds = (2 + self.misses[length]) / (2 + self.hits[length])
            expected_odds = (2 + self.expected_misses[length]) / (2 + self.expected_hits[length])
            miss = self.miss(length, total, distinct, odds / expected_odds)
            for token in set(followers):
                result[token] = left * (1 - miss) * followers.count(token) / total
            left *= miss
        return result


def assert_same(got: list[tuple[int, float]], naive: dict[int, float], path_probability: float) -> None:
    """The four best of `naive` whose paths are probable enough; which of equals is open."""
    best = sorted((p for p in naive.values() if p * path_probability >= 0.02), reverse=True)[:4]
    assert [p for _, p in got] == pytest.approx(best, rel=1e-5)
    assert len({token for token, _ in got}) == len(got)
    for token, p in got:
        assert p == pytest.approx(naive[token], rel=1e-5)


@given(texts)
@settings(max_examples=60, deadline=None)
def test_candidates_of_three_depths_agree_with_brute_force(tokens: list[int]) -> None:
    proposal, naive = propose(tokens), Naive(tokens)
    frontier, paths = ROOT, [([], 1.0)]
    for depth in range(3):
        candidates = proposal.expand(frontier, 8)
        for row, (path, path_probability) in enumerate(paths):
            assert_same(children(candidates, row), naive.predict(path), path_probability)
        frontier = all_children(candidates, depth + 1)
        if len(frontier.tokens) == 0:
            return
        found = zip(frontier.rows, frontier.tokens, found_among(candidates, frontier), strict=True)
        paths = [([*paths[row][0], token.item()], paths[row][1] * math.exp(p)) for row, token, p in found]


@given(texts, st.data())
@settings(max_examples=60, deadline=None)
def test_index_does_not_depend_on_how_the_text_arrived(tokens: list[int], data: st.DataObject) -> None:
    whole = SuffixIndex()
    whole.extend(tokens)
    pieces = SuffixIndex()
    for cut in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        pieces.extend(tokens[:cut])
    pieces.extend(tokens)
    assert pieces == whole
    for suffix, counts in whole.successors.items():  # equality of dicts says nothing about their order
        assert list(pieces.successors[suffix]) == list(counts)


@given(texts, st.lists(st.integers(0, 8), max_size=10))
@settings(max_examples=60, deadline=None)
def test_probabilities_descend_and_leave_room_for_novel_tokens(tokens: list[int], path: list[int]) -> None:
    index = SuffixIndex()
    index.extend(tokens)
    predicted = index.predict(tuple((tokens + path)[-8:]), 100, 0.0)
    probabilities = [p for _, p in predicted.likeliest]
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(p > 0 for p in probabilities)
    assert sum(probabilities) == pytest.approx(1 - predicted.escape)
    assert predicted.escape > 0
    known = [length for length in range(1, 9) if tuple((tokens + path)[-length:]) in index.successors]
    assert predicted.match == max(known, default=0)


def test_frequent_token_proposes_its_latest_successors_of_many() -> None:
    index = SuffixIndex()
    index.extend([token for k in [*range(1, 41), 1] for token in (0, k)] + [0])
    predicted = index.predict((0,), 100, 0.0)
    assert [token for token, _ in predicted.likeliest] == [1, *range(40, 25, -1)]
    # those it leaves out keep their share, so that the rest are not overrated
    assert sum(p for _, p in predicted.likeliest) < 17 / 41


def chain(proposal: Proposal) -> tuple[list[int], float]:
    """The path of best children and its probability."""
    path: list[int] = []
    total, frontier = 0.0, ROOT
    while len(path) < proposal.depth:
        candidates = proposal.expand(frontier, 1)
        if candidates.tokens.shape[1] == 0:
            break
        path.append(int(candidates.tokens[0, 0]))
        total += candidates.log_probs[0, 0].item()
        frontier = Frontier(len(path), candidates.tokens[0], np.array([0]))
    return path, math.exp(total)


def test_repeated_phrase_is_followed_to_full_depth() -> None:
    phrase = list(range(100, 120))
    once, probability_once = chain(propose([1, 2, *phrase, 3, 4, *phrase[:4]]))
    assert once == phrase[4:]
    often, probability_often = chain(propose([1, 2, *phrase * 4, *phrase[:4]]))
    assert often == phrase[4:]
    assert probability_once < 0.3 < 0.6 < probability_often


def test_text_without_repeats_proposes_nothing() -> None:
    candidates = propose(list(range(500))).expand(ROOT, 8)
    assert candidates.tokens.shape == candidates.log_probs.shape == (1, 0)
    assert candidates.tokens.dtype == np.int64
    assert candidates.log_probs.dtype == np.float32


def test_single_repeats_are_trusted_little() -> None:
    # every token of the second half was seen once, in another company
    shuffled = [(37 * i) % 100 for i in range(100)]
    for end in range(1, 100):
        tokens = list(range(100)) + shuffled[:end]
        assert sum(p for _, p in children(propose(tokens).expand(ROOT, 8))) < 0.36


def test_confidence_follows_how_often_the_text_repeated_itself() -> None:
    question = [900, 901, 902, 900]  # 901 came after 900, once
    strange = [token for k in range(30) for token in (k, 500 + k, k, 600 + k)]
    faithful = [token for k in range(30) for token in (k, 500 + k, 600 + k, k, 500 + k, 700 + k)]
    doubt, prior, trust = (
        dict(children(propose(text + question).expand(ROOT, 8)))[901] for text in (strange, [], faithful)
    )
    assert doubt < 0.3 * prior
    assert trust > 3 * prior


def test_rows_with_fewer_children_are_padded_and_width_is_kept() -> None:
    proposal = propose([1, 2, 3, 4, 1, 2, 5, 1, 9, 1, 2, 6, 1])
    assert proposal.expand(ROOT, 1).tokens.tolist() == [[2]]
    first = proposal.expand(ROOT, 2)
    assert first.tokens.tolist() == [[2, 9]]
    second = proposal.expand(all_children(first, 1), 8)
    assert [len(children(second, row)) for row in (0, 1)] == [1, 3]
    assert second.log_probs[0, 1:].tolist() == [-math.inf] * 2


def test_sequences_of_a_batch_do_not_mix() -> None:
    drafter = NgramDrafter()
    contexts = [DraftContext(tokens=[1, 2, 1]), DraftContext(tokens=[1, 3, 1])]
    firsts = [proposal.expand(ROOT, 8).tokens.tolist() for proposal in drafter.propose(contexts)]
    assert firsts == [[[2]], [[3]]]
    index = contexts[0].memory
    contexts[0].tokens += [4, 1]
    firsts = [proposal.expand(ROOT, 8).tokens.tolist() for proposal in drafter.propose(contexts)]
    assert firsts == [[[4, 2]], [[3]]]
    assert contexts[0].memory is index, "the text must not be read again every round"


def test_depth_below_one_is_refused() -> None:
    with pytest.raises(BastionError, match="at least 1"):
        NgramDrafter(depth=0)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_expected_tokens_are_honest_on_real_answers(shared: Path, temperature: float) -> None:
    expected, accepted = 0.0, 0
    with gzip.open(shared / "data" / "smollm2_answers.jsonl.gz", "rt") as file:
        answers = (answer for answer in map(json.loads, file) if answer["temperature"] == temperature)
        for answer in islice(answers, 0, None, 50):
            tokens, drafter = answer["ids"], NgramDrafter(depth=2)
            context = DraftContext(tokens=tokens[: answer["prompt_length"]])
            for token, following in zip(
                tokens[answer["prompt_length"] :], tokens[answer["prompt_length"] + 1 :], strict=False
            ):
                proposal = drafter.propose([context])[0]
                first = proposal.expand(ROOT, 4)
                frontier = all_children(first, 1)
                if len(frontier.tokens):
                    second = proposal.expand(frontier, 4)
                    paths = np.array(found_among(first, frontier))[:, None] + second.log_probs
                    expected += float(np.exp(first.log_probs).sum() + np.exp(paths).sum())
                    hits = frontier.tokens == token
                    real = second.log_probs > -math.inf
                    accepted += int(hits.sum()) + int((hits[:, None] & real & (second.tokens == following)).sum())
                context.tokens.append(token)
    assert accepted > 300
    assert 0.6 * accepted < expected < 1.05 * accepted

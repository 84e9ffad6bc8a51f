"""Forced acceptance: the drafter's own trees, other tokens; the text stays plain decoding's."""

import json

import numpy as np
import pytest
import torch

import bastion
from bastion.benchmarks.datasets import Sample
from bastion.benchmarks.forced import (
    ForcedDrafter,
    ForcedProposal,
    PlainTexts,
    check_acceptances,
    forced_methods,
    method_name,
)
from bastion.benchmarks.forced_report import forced_table, summarize_forced, write_forced
from bastion.benchmarks.methods import TextSettings
from bastion.benchmarks.runner import plan, run
from bastion.decoding.growth import grow
from bastion.drafters.base import Candidates, DraftContext
from bastion.drafters.marginal import MarginalProposal
from bastion.errors import BastionError
from benchmarks.run_support import make_run
from benchmarks.support import make_line
from targets.loading_support import write_chat_llama
from tiny import FixedDrafter

DEPTH, TOKENS = 3, 14
MESSAGES = [{"role": "user", "content": "one two"}]
SETTINGS = TextSettings(TOKENS, 0.0, seed=5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return bastion.load(write_chat_llama(tmp_path_factory.mktemp("model")), policy="plain", dtype="float32")


@pytest.fixture
def model(loaded):
    """A tiny Llama that never ends a text, with a drafter of depth 3 whose guesses are mostly wrong."""
    loaded.end_ids = frozenset()
    loaded.drafter = FixedDrafter((torch.randn(DEPTH, loaded.target.shape.vocab) * 4).log_softmax(-1))
    return loaded


def outcomes(model, *acceptances):
    """What each method but plain decoding wrote, by name."""
    plain, *forced = forced_methods(model, acceptances)
    expected = plain.write(MESSAGES, SETTINGS).token_ids
    found = {method.name: method.write(MESSAGES, SETTINGS) for method in forced}
    assert all(outcome.token_ids == expected for outcome in found.values())
    return found


def chain_depth(model, nodes):
    """How deep the best chain of a tree reaches: the first candidates of each depth."""
    tree = grow(model.drafter.propose([DraftContext([0])])[0], 0, nodes)
    best = model.drafter.log_probs.argmax(1).tolist()
    node, depth = 0, 0
    while depth < DEPTH and (below := np.flatnonzero((tree.parents == node) & (tree.tokens == best[depth]))).size:
        node, depth = int(below[0]), depth + 1
    return depth


def test_all_right_goes_down_the_whole_chain_and_all_wrong_stays_at_the_root(model):
    found = outcomes(model, 1.0, 0.0)
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        wrong, right = (found[method_name(nodes, acceptance)] for acceptance in (0.0, 1.0))
        assert wrong.accepted_lengths == [1] * (TOKENS - 1)
        assert wrong.tree_sizes[:-DEPTH] == [nodes] * (TOKENS - 1 - DEPTH)
        depth = chain_depth(model, nodes)
        whole, rest = divmod(TOKENS - 1, depth + 1)
        assert right.accepted_lengths == [depth + 1] * whole + [rest] * bool(rest)
    assert chain_depth(model, 64) == DEPTH


def test_between_them_guesses_are_right_as_often_as_asked_and_never_fewer_for_more():
    text = np.random.default_rng(0).integers(0, 96, 3000).tolist()
    inner = FixedDrafter(torch.randn(DEPTH, 96).log_softmax(-1))
    right = {}
    for acceptance in (0.25, 0.75):
        drafter = ForcedDrafter(inner, text, acceptance, seed=1, vocab=96)
        places = range(1, len(text) - DEPTH, DEPTH)
        chains = [grow(drafter.propose([DraftContext(text[:place])])[0], 0, DEPTH, width=1) for place in places]
        right[acceptance] = np.array(
            [chain.tokens[1:] == text[place : place + DEPTH] for chain, place in zip(chains, places, strict=True)]
        )
        assert right[acceptance].mean(0) == pytest.approx([acceptance] * DEPTH, abs=0.05)
        assert np.corrcoef(right[acceptance].T) == pytest.approx(np.eye(DEPTH), abs=0.1)
    assert (right[0.25] <= right[0.75]).all()


class ByParent:
    """A proposal of depth 2 whose children depend on the parent's token, which it records."""

    depth = ready = 2
    passes, beam = 1, None

    def __init__(self):
        self.seen = []

    def expand(self, frontier, width):
        self.seen.append(frontier.tokens.tolist())
        tokens = 10 * frontier.tokens[:, None] + np.arange(1, 4)
        return Candidates(tokens, np.log(np.broadcast_to(np.float32([0.5, 0.3, 0.1]), tokens.shape)))


def test_trees_keep_the_drafters_shape_and_have_one_right_path():
    plain, inner = grow(ByParent(), 1, 12), ByParent()
    tree = grow(ForcedProposal(inner, [12, 113], [True, True], vocab=1000), 1, 12)
    assert (tree.parents == plain.parents).all()
    assert (tree.log_probs == plain.log_probs).all()
    assert inner.seen == [[1], [11, 12, 13]]
    below = {(int(tree.parents[node]), int(tree.tokens[node])): node for node in range(1, 13)}
    first = below[0, 12]
    assert tree.log_probs[first] == tree.log_probs[1:].max()
    assert (first, 113) in below
    assert sum(token == 12 for parent, token in below if parent == 0) == 1


def test_a_miss_leaves_no_right_token_among_the_candidates():
    tree = grow(ForcedProposal(ByParent(), [13, 131], [False, True], vocab=1000), 1, 12)
    assert 13 not in tree.tokens[tree.parents == 0]


def test_a_drafter_may_know_nothing_or_less_than_the_text_has_left():
    nothing = MarginalProposal(torch.zeros(2, 0))
    assert grow(ForcedProposal(nothing, [4, 5], [True, True], 9), 1, 4).size == 0
    tree = grow(ForcedProposal(ByParent(), [12], [True], 1000), 1, 3)
    assert tree.tokens[1] == 12


def test_a_text_that_is_not_the_plain_one_is_an_error_in_float32(model, monkeypatch):
    methods = forced_methods(model, [0.5])
    write = type(model.target).commit
    monkeypatch.setattr(type(model.target), "commit", lambda self, cache, nodes: write(self, cache, [0] * len(nodes)))
    with pytest.raises(BastionError, match=r"forced:64@0.5 wrote another text .* bastion verify"):
        methods[-1].write(MESSAGES, SETTINGS)


@pytest.mark.parametrize(
    ("acceptances", "given"),
    [((), "none"), ((0.5, 1.5), "1.5"), ((-0.1,), "-0.1"), ((0.5, 0.5), "0.5, 0.5"), ((float("nan"),), "nan")],
)
def test_acceptances_must_be_different_probabilities(model, acceptances, given):
    for check in (check_acceptances, lambda values: forced_methods(model, values)):
        with pytest.raises(BastionError, match=rf"numbers from 0 to 1, as in 0,0.5,1; not {given}$"):
            check(acceptances)


def test_the_plain_text_is_that_of_the_prompt_and_length_asked_for(model):
    texts, other = PlainTexts(model), [{"role": "user", "content": "three"}]
    for messages, length in ((MESSAGES, 4), (MESSAGES, 6), (other, 6), (other, 6)):
        expected = model.generate(messages, max_new_tokens=length, temperature=0.0).token_ids
        assert texts.write(messages, length) == (model.encode(messages), expected)


def test_what_cannot_be_forced_is_refused(model, monkeypatch):
    with pytest.raises(BastionError, match=r"at temperature 0 only, not at 0\.7"):
        forced_methods(model, [1.0])[1].write(MESSAGES, TextSettings(4, 0.7, 0))
    monkeypatch.setattr(model.target, "tree_support", "chain")
    assert [method.name for method in forced_methods(model, [1.0])] == ["ar", "forced:1@1.0", "forced:2@1.0"]
    monkeypatch.setattr(model.target, "tree_support", "none")
    with pytest.raises(BastionError, match="decodes plainly"):
        forced_methods(model, [1.0])


def test_runs_like_any_benchmark(model, tmp_path):
    methods = forced_methods(model, [0.0, 1.0])
    made = make_run([method.name for method in methods], ("chat",))
    settings = made.settings.model_copy(update={"max_new_tokens": 6})
    samples = {"chat": [Sample("a", ("one two", "three"))]}
    lines = list(run(plan(samples, settings), methods, settings))
    summary = summarize_forced(lines, made)
    assert summary.left_out == 0
    assert len(summary.points) == 14
    assert {point.prompts for point in summary.points} == {2}
    assert {point.accepted_length for point in summary.points if point.acceptance == 0} == {1}
    assert [one.nodes for one in summary.break_even] == [1, 2, 4, 8, 16, 32, 64]
    write_forced(summary, tmp_path)
    stored = json.loads((tmp_path / "forced.json").read_text())
    assert stored["run"]["provenance"]["target"]["digest"] == "feed"
    assert len(stored["points"]) == 14
    assert (tmp_path / "forced.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forced.json", "forced.png"]


def lines_of(seconds, **more):
    """Lines of the plain text, 1 s, and of trees of one size, whose times are given by acceptance."""
    lengths = {0.0: 1, 0.5: 2, 1.0: 5}
    return [make_line("ar", seconds=2.0)] + [
        make_line(method_name(4, acceptance), seconds=1 + time, accepted_lengths=[lengths[acceptance]] * 2, **more)
        for acceptance, time in seconds.items()
    ]


@pytest.mark.parametrize(
    ("seconds", "acceptance", "length"),
    [
        ({0.0: 2.0, 0.5: 0.5, 1.0: 0.25}, 1 / 6, 4 / 3),  # speed-ups 0.5, 2, 4
        ({0.0: 0.5, 0.5: 2.0, 1.0: 0.5}, 2 / 3, 3),  # the last crossing, where a measurement was disturbed
        ({0.0: 1.0, 0.5: 0.5, 1.0: 0.25}, 0, 1),
        ({1.0: 0.5, 0.0: 2.0}, 1 / 3, 7 / 3),  # in any order
        ({0.0: 2.0, 0.5: 1.5}, None, None),
    ],
)
def test_break_even_is_interpolated(seconds, acceptance, length):
    made = make_run(("ar", *(method_name(4, value) for value in seconds)), ("chat",))
    (found,) = summarize_forced(lines_of(seconds), made).break_even
    assert found.nodes == 4
    assert found.acceptance == (None if acceptance is None else pytest.approx(acceptance))
    assert found.accepted_length == (None if length is None else pytest.approx(length))


def test_texts_that_rounding_changed_are_left_out_and_counted():
    seconds = {0.0: 2.0, 0.5: 0.5}
    made = make_run(("ar", *(method_name(4, value) for value in seconds)), ("chat",))
    lines = lines_of(seconds)
    other = make_line(method_name(4, 0.5), "2", tokens=9, seconds=1.1, accepted_lengths=[9])
    summary = summarize_forced([*lines, make_line("ar", "2"), other], made)
    assert summary.left_out == 1
    assert summary.points == summarize_forced(lines, made).points


def test_the_table_shows_speedups_lengths_and_break_even(capsys):
    seconds = {0.0: 2.0, 0.5: 0.5, 1.0: 0.25}
    made = make_run(("ar", *(method_name(4, value) for value in seconds)), ("chat",))
    table = forced_table(summarize_forced(lines_of(seconds), made))
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["4", "0.50x (1.00)", "2.00x (2.00)", "4.00x (5.00)", "0.17", "1.33"]
    fast = {value: time / 10 for value, time in seconds.items()}
    cells = [next(iter(column.cells)) for column in forced_table(summarize_forced(lines_of(fast), made)).columns]
    assert cells[-2:] == ["<= 0.00", "<= 1.00"]


def test_texts_of_one_token_cannot_be_timed():
    made = make_run(("ar", method_name(4, 1.0)), ("chat",))
    lines = [make_line(method, tokens=1) for method in made.settings.methods]
    with pytest.raises(BastionError, match="no text has a second token"):
        summarize_forced(lines, made)


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    seconds = {0.0: 2.0, 0.5: 0.5}
    made = make_run(("ar", *(method_name(4, value) for value in seconds)), ("chat",))
    summary = summarize_forced(lines_of(seconds), made)
    with pytest.raises(BastionError, match="cannot write to"):
        write_forced(summary, tmp_path / "missing")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bastion.files.os.replace", full)
    with pytest.raises(BastionError, match="No space left"):
        write_forced(summary, tmp_path)
    assert not list(tmp_path.iterdir())

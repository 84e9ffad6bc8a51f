"""The TreeFlash drafter against the reference implementation's numbers, and what it leaves unchanged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion.decoding.budget import Chain, FixedBudget, Plain
from bastion.decoding.growth import grow
from bastion.decoding.loop import decode
from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.dflash.training import new_model as new_body
from bastion.drafters.treeflash import TreeFlashConfig, TreeFlashDrafter, load_model, save_model
from bastion.drafters.treeflash.drafter import TransitionProposal
from bastion.drafters.treeflash.training import new_model
from bastion.errors import BastionError
from bastion.targets.base import ModelShape
from decoding.test_distribution import expected_joint, sample
from dflash_support import CPU, StubTarget, close, edited, tokens_before
from goodness import p_value
from tiny import TableTarget, generation, make_target
from training_support import counting

M = 16
LENGTH = 19  # of the fixture's context


@pytest.fixture
def folder(shared: Path) -> Path:
    return shared / "fixtures" / "treeflash"


@pytest.fixture
def numbers(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "io.safetensors")


@pytest.fixture
def target(numbers: dict[str, Tensor]) -> StubTarget:
    weights = {
        "model.embed_tokens.weight": numbers["embed_tokens_weight"],
        "lm_head.weight": numbers["lm_head_weight"],
    }
    return StubTarget(weights, ModelShape(8, 64, 4, 2, 32, 96, 512))


def context(numbers: dict[str, Tensor], temperature: float = 0.0) -> DraftContext:
    tokens = tokens_before(numbers["root_token"][0], torch.tensor(LENGTH))
    return DraftContext(tokens, temperature, [numbers["target_hidden_features"]])


def table(numbers: dict[str, Tensor], name: str) -> Tensor:
    """A tensor of the fixture by slot and predecessor, [7, 16, k], as a proposal's rows: one for slot 1."""
    return torch.cat((numbers[name][0, :1], numbers[name][1:].flatten(0, 1)))


def level(depth: int, tokens: list[int]) -> Frontier:
    return Frontier(depth, np.array(tokens), np.zeros(len(tokens), np.int64))


def test_hidden_states_and_corrected_logits_match_the_reference(folder: Path, numbers: dict, target) -> None:
    drafter = TreeFlashDrafter.load(folder / "drafter", target)
    cache = drafter.model.new_cache()
    drafter.model.read(cache, numbers["target_hidden_features"])
    block = target.embed(numbers["block_ids"])
    close(drafter.model.draft_states(cache, block), numbers["hidden_pre_norm"])
    close(drafter.model.draft(cache, block), numbers["hidden_normed"])
    (proposal,) = drafter.propose([context(numbers)])
    assert (proposal.depth, proposal.ready, proposal.passes) == (7, 7, 1)
    assert (proposal.parents == numbers["marginal_topM_tokens"][1:].numpy()).all()
    close(proposal.log_probs, table(numbers, "corrected_logits").log_softmax(-1))


@pytest.mark.parametrize(("temperature", "prefix"), [(0.0, ""), (1.0, ""), (0.5, "temp0.5.")])
def test_tables_and_trees_match_the_reference(
    folder: Path, numbers: dict, target, temperature: float, prefix: str
) -> None:
    (proposal,) = TreeFlashDrafter.load(folder / "drafter", target).propose([context(numbers, temperature)])
    root, parents = int(numbers["root_token"]), numbers["marginal_topM_tokens"]
    for depth in range(7):
        frontier = level(depth, [root] if depth == 0 else parents[depth].tolist())
        found, rows = proposal.expand(frontier, M), len(frontier.tokens)
        close(torch.tensor(found.log_probs), numbers[prefix + "transition_log_probs"][depth, :rows])
        if not prefix:
            assert (found.tokens == numbers["transition_tokens"][depth, :rows].numpy()).all()
    tree = grow(proposal, root, 63, width=M)
    assert tree.tokens.tolist() == [root, *numbers[prefix + "tree_tokens"].tolist()[1:]]
    assert tree.depths.tolist() == numbers[prefix + "tree_depths"].tolist()
    assert (tree.visible() == numbers[prefix + "tree_mask"].numpy()).all()
    if not prefix:
        assert tree.parents.tolist() == numbers["tree_parents"].tolist()
        close(torch.tensor(tree.log_probs).double(), numbers["tree_cum_logprobs"])
        nodes = list(zip(tree.depths.tolist(), tree.tokens.tolist(), strict=True))[1:]
        childless = [node for node, (depth, token) in enumerate(nodes, 1) if token not in parents[depth].tolist()]
        assert len(childless) == 28
        assert not set(childless) & set(tree.parents.tolist())


def test_a_token_outside_its_depths_table_has_no_children(folder: Path, numbers: dict, target) -> None:
    (proposal,) = TreeFlashDrafter.load(folder / "drafter", target).propose([context(numbers)])
    known = proposal.parents[1].tolist()
    stranger = next(token for token in range(512) if token not in known)
    found = proposal.expand(level(2, [stranger, known[3], stranger, known[3]]), 5)
    assert np.isneginf(found.log_probs[[0, 2]]).all()
    assert found.log_probs.dtype == np.float32
    row = proposal.log_probs[1 + M + 3].topk(5)
    for place in (1, 3):
        assert found.tokens[place].tolist() == row.indices.tolist()
        assert found.log_probs[place].tolist() == row.values.tolist()
    wider = proposal.expand(level(2, [known[3]]), 600)  # wider than before, and than the vocabulary
    assert sorted(wider.tokens[0].tolist()) == list(range(512))


def test_sequences_drafted_together_get_what_each_gets_alone(folder: Path, numbers: dict, target) -> None:
    drafter = TreeFlashDrafter.load(folder / "drafter", target)

    def contexts() -> list[DraftContext]:
        return [context(numbers), DraftContext([0, 0, 7], 0.7, [numbers["target_hidden_features"][:2]])]

    target.asked.clear()
    together = drafter.propose(contexts())
    assert target.asked == [2 * 6, 2 * (1 + 6 * M)]
    for proposal, one in zip(together, contexts(), strict=True):
        (alone,) = drafter.propose([one])
        assert (proposal.parents == alone.parents).all()
        close(proposal.log_probs, alone.log_probs)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_reduced_vocabulary_and_draft_temperatures_hold_in_both_stages(
    folder: Path, numbers: dict, target, tmp_path: Path, temperature: float
) -> None:
    top = numbers["marginal_topM_tokens"][1:]
    ids = torch.cat((top.flatten(), torch.arange(40))).long().unique()  # so the predecessors stay what they are
    divisors = [0.5, 0.8, 1.0, 1.1, 1.3, 2.0, 3.0]
    dflash = {"mask_token_id": 500, "target_layer_ids": [1, 3, 5], "draft_temperatures": divisors}
    checkpoint = edited(folder / "drafter", tmp_path / "drafter", dflash_config=dflash, draft_vocab_size=len(ids))
    tensors = load_file(checkpoint / "model.safetensors") | {"d2t": ids - torch.arange(len(ids))}
    (checkpoint / "model.safetensors").unlink()
    save_file(tensors, checkpoint / "model.safetensors")
    save_model(load_model(checkpoint, CPU, torch.float32), tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == tensors.keys()

    (proposal,) = TreeFlashDrafter.load(tmp_path / "saved", target).propose([context(numbers, temperature)])
    assert (proposal.parents == top.numpy()).all()
    by_row = torch.tensor(divisors)[[0] + [slot for slot in range(1, 7) for _ in range(M)]]
    logits = table(numbers, "corrected_logits")[:, ids] / (temperature or by_row[:, None])
    close(proposal.log_probs, logits.log_softmax(-1))
    found = proposal.expand(level(1, [int(top[0, 2])]), 4)
    assert found.tokens[0].tolist() == ids[logits[3].topk(4).indices].tolist()


def test_blocks_may_be_as_short_as_one_token(folder: Path, numbers: dict, target) -> None:
    drafter = TreeFlashDrafter.load(folder / "drafter", target)
    for size in (2, 3):
        (proposal,) = drafter.with_block_size(size).propose([context(numbers)])
        assert proposal.depth == size - 1
        tree = grow(proposal, int(numbers["root_token"]), 40)
        assert tree.depths.max() == size - 1
        assert tree.size == 40


def test_saving_a_loaded_checkpoint_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    original = folder / "drafter"
    save_model(load_model(original, CPU, torch.float32), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    before, after = (json.loads((place / "config.json").read_text()) for place in (original, tmp_path))
    assert before == after


def test_the_digest_is_of_body_and_correction(folder: Path, target) -> None:
    model, digests = load_model(folder / "drafter", CPU, torch.float32), set()
    for weight in (model.model.fc.weight, model.ar_approximation.d.weight, model.ar_approximation.ug.bias):
        digests.add(TreeFlashDrafter(model, target).digest)
        with torch.no_grad():
            weight += 1
    assert len(digests | {model.digest()}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ar_approximation.d.weight": None}, "ar_approximation.d.weight is missing"),
        ({"model.fc.weight": None}, "model.fc.weight is missing"),
        ({"ar_approximation.ug.weight": torch.zeros(96, 128)}, r"has shape \[96, 128\] instead of \[192, 128\]"),
        ({"d2t": torch.zeros(9, dtype=torch.int64)}, "d2t is unexpected"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder: Path, target, tmp_path: Path, change: dict, message: str) -> None:
    checkpoint = edited(folder / "drafter", tmp_path / "drafter")
    tensors = load_file(checkpoint / "model.safetensors") | change
    (checkpoint / "model.safetensors").unlink()
    save_file({k: v for k, v in tensors.items() if v is not None}, checkpoint / "model.safetensors")
    with pytest.raises(BastionError, match=message):
        TreeFlashDrafter.load(checkpoint, target)


def test_a_drafter_of_another_target_is_refused(folder: Path, target) -> None:
    target.shape = ModelShape(8, 64, 4, 2, 32, 96, 600)
    with pytest.raises(BastionError, match="has a vocabulary of 512 tokens, stub of 600: use the drafter"):
        TreeFlashDrafter.load(folder / "drafter", target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "no treeflash_config: this is not a TreeFlash drafter"),
        ({"ar_approximation": None}, "ar_approximation None is not supported"),
        ({"ar_approximation": "swiglu", "top_m": 0}, "top_m is 0, but must be a whole number from 1 to 512"),
        ({"ar_approximation": "swiglu", "top_m": 513}, "top_m is 513"),
        ({"ar_approximation": "swiglu", "intermediate_size": 0}, "intermediate_size is 0, but must be a whole number"),
        ({"ar_approximation": "swiglu", "intermediate_size": True}, "intermediate_size is True"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(folder: Path, settings: dict | None, message: str) -> None:
    raw = json.loads((folder / "drafter" / "config.json").read_text())
    assert TreeFlashConfig.from_dict(raw | {"treeflash_config": {"ar_approximation": "swiglu"}}).top_m == 16
    with pytest.raises(BastionError, match=message):
        TreeFlashConfig.from_dict(raw | {"treeflash_config": settings})


@pytest.mark.parametrize("policy", [Chain(), FixedBudget(48)])
def test_a_random_drafter_changes_nothing(policy) -> None:
    """It is wrong nearly always; a wide tree is right now and then."""
    target = make_target()
    model = new_model(new_body(target, [counting(30, 0)], layers=1, block_size=5), top_m=24)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.model.norm.weight, std=2.0)  # sure enough of itself for trees deeper than one token
    drafter = TreeFlashDrafter(model, target)
    prompts = [torch.randint(2, 96, (length,)).tolist() for length in (9, 20, 14)]
    plain, drafted = ([generation(target, prompt, 40) for prompt in prompts] for _ in range(2))
    deepest = 0
    for batch, guesses, by in ((plain, None, Plain()), (drafted, drafter, policy)):
        for _, _, record in decode(target, guesses, by, batch):
            deepest = max(deepest, int(record.tree.depths.max())) if record else deepest
    assert [one.stream.tokens for one in drafted] == [one.stream.tokens for one in plain]
    assert deepest > 1
    if policy.max_nodes == 48:
        assert sum(one.stats.rounds for one in drafted) < sum(one.stats.rounds for one in plain)


def test_the_joint_distribution_is_that_of_the_target_whatever_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class TableDrafter:
        """Proposes the same transitions in every round; two tokens of five have children."""

        name, digest, feature_layers, depth = "table", "table", (), 4
        rows, parents = torch.randn(7, 5).log_softmax(-1), torch.tensor([[0, 3], [1, 4], [2, 3]])

        def propose(self, contexts: list[DraftContext]) -> list[TransitionProposal]:
            return [TransitionProposal(self.rows, self.parents) for _ in contexts]

    monkeypatch.setattr("decoding.test_distribution.SAMPLES", 3000)
    models = TableTarget(torch.randn(5, 5) * 1.2), TableDrafter()
    assert p_value(sample(models, FixedBudget(6)), expected_joint(models[0])) > 1e-3

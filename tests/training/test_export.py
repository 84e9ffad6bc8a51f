"""An exported drafter, read again by code that shares nothing with ours."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bastion.drafters.base import DraftContext
from bastion.drafters.dflash import DFlashDrafter, load_model, save_model
from bastion.drafters.dflash.training import DFlashRecipe, DFlashSettings, new_model
from bastion.training.data import Conversation
from bastion.training.features import compute_features
from dflash_support import CPU
from tiny import make_target


class Reference:
    """z-lab's format as it is published: Qwen3 layers whose keys and values also come from the target's features."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        self.weights = {}
        for name in names:
            with safe_open(folder / name, "pt") as file:
                self.weights |= {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.config["rms_norm_eps"]
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def heads(self, name: str, x: torch.Tensor, position: int | None) -> torch.Tensor:
        out = (self.weights[f"{name}_proj.weight"] @ x).view(-1, self.config["head_dim"])
        if position is None:
            return out
        return self.rotated(self.norm(f"{name}_norm", out), position)

    def draft(self, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Hidden states of a block [B, hidden] behind features [k, F], row by row."""
        count, groups = len(features), self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        context = [self.norm("hidden_norm", self.weights["fc.weight"] @ row) for row in features]
        x = list(block)
        for layer in range(self.config["num_hidden_layers"]):
            at = f"layers.{layer}.self_attn"
            inputs = [self.norm(f"layers.{layer}.input_layernorm", row) for row in x]
            rows = context + inputs
            keys = torch.stack([self.heads(f"{at}.k", row, place) for place, row in enumerate(rows)])
            values = torch.stack([self.heads(f"{at}.v", row, None) for row in rows])
            for slot, row in enumerate(inputs):
                mixed = []
                for head, query in enumerate(self.heads(f"{at}.q", row, count + slot)):
                    shares = (keys[:, head // groups] @ query / len(query) ** 0.5).softmax(0)
                    mixed.append(shares @ values[:, head // groups])
                x[slot] = x[slot] + self.weights[f"{at}.o_proj.weight"] @ torch.cat(mixed)
                mlp = f"layers.{layer}.mlp"
                inner = self.norm(f"layers.{layer}.post_attention_layernorm", x[slot])
                gate = self.weights[f"{mlp}.gate_proj.weight"] @ inner
                up = self.weights[f"{mlp}.up_proj.weight"] @ inner
                x[slot] = x[slot] + self.weights[f"{mlp}.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return torch.stack([self.norm("norm", row) for row in x])


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_an_exported_drafter_is_what_another_reader_computes(tmp_path: Path, shards: str) -> None:
    target = make_target()
    texts = [Conversation(tuple(torch.randint(2, 90, (30,)).tolist()), 4, "", 0.0) for _ in range(6)]
    model = new_model(target, texts, layers=2, block_size=5, draft_vocab=50)
    features = compute_features(target, texts, model.config.target_layers, tmp_path / "features")
    recipe = DFlashRecipe(model, target, texts, features, DFlashSettings(anchors=4), CPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        recipe.run(model, range(6), torch.Generator().manual_seed(step)).loss.backward()
        optimizer.step()
    recipe.save(tmp_path / "trained")
    save_model(load_model(tmp_path / "trained", CPU, torch.bfloat16), tmp_path / "drafter", shards)
    assert len(list((tmp_path / "drafter").glob("*.safetensors"))) > (shards == "20KB")

    reference = Reference(tmp_path / "drafter")
    mask, root = reference.config["dflash_config"]["mask_token_id"], 7
    block = target.embed(torch.tensor([root, *[mask] * 4])).clone()
    hidden = reference.draft(features.of(0)[:12].float(), block)
    ids = reference.weights["d2t"].long() + torch.arange(50)
    expected = (hidden[1:] @ target.head(torch.eye(target.shape.hidden)))[:, ids].log_softmax(-1)

    drafter = DFlashDrafter.load(tmp_path / "drafter", target)
    (proposal,) = drafter.propose([DraftContext([0] * 12 + [root], 0.0, [features.of(0)[:12].float()])])
    torch.testing.assert_close(proposal.log_probs, expected, rtol=1e-3, atol=1e-3)

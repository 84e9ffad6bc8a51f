"""What the DFlash tests share: a stub target, the fixture's rounds, edited checkpoints."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bastion.drafters.dflash import DFlashConfig
from bastion.targets.base import ModelShape

CPU = torch.device("cpu")


@dataclass
class StubTarget:
    """Embeddings and head of a fixture's target; nothing that DFlash does not need."""

    weights: dict[str, Tensor]
    shape: ModelShape
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    name: str = "stub"
    asked: list[int] = field(default_factory=list)  # rows of each call of head
    feature_layers: tuple[int, ...] = ()

    def set_feature_layers(self, layers: Sequence[int]) -> None:
        self.feature_layers = tuple(layers)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][tokens]

    def head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        self.asked.append(len(hidden))
        rows = self.weights["lm_head.weight"]
        return hidden @ (rows if token_ids is None else rows[token_ids]).T


def stub(folder: Path, **shape: int) -> StubTarget:
    config = json.loads((folder / "target" / "config.json").read_text())
    sizes = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "intermediate": config["intermediate_size"],
        "vocab": config["vocab_size"],
    }
    return StubTarget(load_file(folder / "target" / "model.safetensors"), ModelShape(**(sizes | shape)))


def rounds(numbers: dict[str, Tensor]) -> list[list[dict[str, Tensor]]]:
    """The fixture's rounds of each prompt."""
    prompts = []
    for prompt in range(2):
        found = []
        while f"p{prompt}.round{len(found)}.start" in numbers:
            prefix = f"p{prompt}.round{len(found)}."
            found.append({k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)})
        assert len(found) >= 2
        prompts.append(found)
    return prompts


def tokens_before(root: Tensor, start: Tensor) -> list[int]:
    """A context whose root stands at `start`; DFlash reads no other token."""
    return [0] * int(start) + [int(root)]


def edited(source: Path, into: Path, **changes: object) -> Path:
    """A copy of a checkpoint with some keys of its config changed."""
    shutil.copytree(source, into, copy_function=shutil.copyfile)
    into.chmod(0o755)
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return into


def small_config(qwen3: Path, **changes: object) -> DFlashConfig:
    return DFlashConfig.from_dict(json.loads((qwen3 / "drafter" / "config.json").read_text()) | changes)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)

"""What a target says about conversations, computed once and kept in files that are mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bastion.errors import BastionError
from bastion.files import locked, write_text, writing
from bastion.targets.base import Rows, Target
from bastion.training.data import Conversation, digest, feed

ROWS = 1024  # tokens in one forward pass
RECORD = "features.json"
RANKED = 32  # candidates kept of the target's distribution, for distillation
FILES = ("features.bin", "ranked_ids.bin", "ranked_logits.bin")


class Features:
    """The target's features of every token, and the head of its distribution after it.

    In bfloat16, 2 * F bytes a token on disk (and 8 * `RANKED` more where the distribution is kept). The system pages
    them in as they are read, and drops them when memory is short.
    """

    def __init__(self, folder: Path, conversations: Sequence[Conversation], width: int, ranked: bool):
        ends = np.cumsum([len(one.ids) for one in conversations])
        self._bounds = np.concatenate(([0], ends)).tolist()
        tokens = self._bounds[-1]
        self._features = _mapped(folder / FILES[0], tokens, width, torch.bfloat16)
        self._ids = self._logits = None
        if ranked:
            self._ids = _mapped(folder / FILES[1], tokens, RANKED, torch.int32)
            self._logits = _mapped(folder / FILES[2], tokens, RANKED, torch.float32)

    def of(self, index: int) -> Tensor:
        """Features [n, F] in bfloat16 of the tokens of conversation `index`."""
        return self._features[self._bounds[index] : self._bounds[index + 1]]

    def scale(self) -> Tensor:
        """The typical size [F] of each channel: the median of its absolute values over some of the tokens."""
        tokens = len(self._features)
        some = self._features[:: max(tokens // 4096, 1)].float().abs().median(0).values
        return some.clamp(min=1e-3 * float(some.mean()))

    def ranked(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and logits [n, RANKED] of the most probable tokens after each token; zeros inside the prompt."""
        if self._ids is None or self._logits is None:
            raise ValueError("the target's distribution was not kept")
        rows = slice(self._bounds[index], self._bounds[index + 1])
        return self._ids[rows], self._logits[rows]


def compute_features(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    ranked: bool = False,
    budget: float = 32e9,
    progress: Callable[[float], None] = lambda share: None,
) -> Features:
    """The features of `layers` for all conversations, from `folder` as far as they are there already.

    An interrupted run continues where it stopped, and one for which conversations were added behind the others goes on
    with those, and with the distribution if the folder has it already. Raises BastionError if they need more than
    `budget` bytes, or the folder holds those of other conversations or another target.
    """
    width = len(layers) * target.shape.hidden
    tokens = sum(len(one.ids) for one in conversations)
    needed = tokens * (2 * width + 8 * RANKED * ranked)
    if not needed <= budget:  # nor if it is no number
        raise BastionError(
            f"the features of {tokens:,} tokens take {needed / 1e9:.1f} GB, above the {budget / 1e9:.1f} GB allowed: "
            "raise --feature-budget, or use less data"
        )
    target.set_feature_layers(layers)  # refuses what it cannot give, before anything is written
    with locked(folder), writing(folder), ExitStack() as stack:
        stack.callback(target.set_feature_layers, ())
        stored, done = _record(folder)
        if stored.get("ranked") and done < len(conversations):
            ranked = True
        elif not ranked:
            stored["ranked"] = False  # they may hold more than is wanted
        key = {"target": target.digest, "dtype": str(target.dtype), "layers": list(layers), "ranked": ranked}
        if done:
            _check(folder, stored, key | {"data": digest(conversations[:done])})
        widths = [2 * width, 4 * RANKED, 4 * RANKED][: 3 if ranked else 1]  # bytes a token, of each file
        ready = sum(len(one.ids) for one in conversations[:done])
        paths = [folder / name for name, _ in zip(FILES, widths, strict=False)]
        sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
        if any(size < ready * width for size, width in zip(sizes, widths, strict=True)):
            done = ready = 0  # a file is gone or damaged
        if done < len(conversations):
            files = [stack.enter_context(path.open("ab")) for path in paths]
            said = hashlib.sha256()
            feed(said, conversations[:done])
            for file, size in zip(files, widths, strict=True):
                file.truncate(ready * size)
        while done < len(conversations):
            batch = _batch(conversations, done)
            for tensors in _run(target, batch, ranked):
                for file, tensor in zip(files, tensors, strict=True):
                    file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            for file in files:
                file.flush()
            done += len(batch)
            feed(said, batch)
            write_text(folder / RECORD, json.dumps({"key": key | {"data": said.hexdigest()}, "done": done}))
            progress(done / len(conversations))
    return Features(folder, conversations, width, ranked)


def _batch(conversations: Sequence[Conversation], start: int) -> list[Conversation]:
    batch, rows = [conversations[start]], len(conversations[start].ids)
    for one in conversations[start + 1 :]:
        rows += len(one.ids)
        if rows > ROWS:
            break
        batch.append(one)
    return batch


def _run(target: Target, batch: list[Conversation], ranked: bool) -> list[list[Tensor]]:
    """For each conversation its features, and the ranked ids and logits if wanted, on the CPU."""
    rows = []
    for one in batch:
        tokens = torch.tensor(one.ids, device=target.device)
        positions = torch.arange(len(one.ids), device=target.device)
        first = min(one.prompt_length, len(one.ids) - 1) if ranked else len(one.ids) - 1
        rows.append(Rows(tokens, positions, target.new_cache(len(one.ids)), None, first, len(one.ids)))
    found = []
    for row, result in zip(rows, target.forward(rows), strict=True):
        assert result.features is not None
        tensors = [result.features.to(torch.bfloat16).cpu()]
        if ranked:
            values, ids = result.logits.float().topk(min(RANKED, target.shape.vocab), -1)
            for tensor, dtype in ((ids, torch.int32), (values, torch.float32)):
                whole = torch.zeros(len(row.tokens), RANKED, dtype=dtype)
                whole[row.first_logit :, : tensor.shape[1]] = tensor.cpu()
                tensors.append(whole)
        found.append(tensors)
    return found


def _mapped(path: Path, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=False, size=rows * columns, dtype=dtype).view(rows, columns)


def _record(folder: Path) -> tuple[dict[str, object], int]:
    """What the features in a folder depend on, and of how many conversations, from the first on, they are."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return dict(record["key"]), int(record["done"])
    except FileNotFoundError:
        return {}, 0
    except (ValueError, TypeError, LookupError):
        raise BastionError(f"{folder / RECORD} is damaged: delete {folder}") from None


def _check(folder: Path, stored: dict[str, object], key: dict[str, object]) -> None:
    if changed := sorted(name for name, value in key.items() if stored.get(name) != value):
        raise BastionError(
            f"the features in {folder} differ in {', '.join(changed)}: give another folder, or delete it"
        )

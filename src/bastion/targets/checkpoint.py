"""Reading the safetensors files of a model folder, one at a time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bastion.errors import BastionError

INDEX = "model.safetensors.index.json"
SAMPLE = 32  # bytes taken from the beginning, the middle and the end of a tensor


class SafetensorsFolder:
    """The parameters of a model folder: call it with a name to get the tensor, or None if there is none.

    Only the file that was read last stays open, so parameters asked for in the order of the layers keep a few
    pages of one shard in memory, not the whole checkpoint.
    """

    def __init__(self, folder: Path):
        """Raises BastionError if there are no safetensors files, or if one or the index is missing or damaged."""
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            try:
                self._file_of: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
                self.files = sorted({str(file) for file in self._file_of.values()})
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise BastionError(f"{index} is damaged: fetch it again") from error
            if not self.files:
                raise BastionError(f"{index} names no files: fetch it again")
        else:
            self._file_of = {}
            self.files = ["model.safetensors"]
        for file in self.files:
            if not (folder / file).is_file():
                raise BastionError(f"{folder} has no {file}: it takes a complete safetensors checkpoint")
        self._name = self.files[0]
        self._open = self._opened(self._name)
        if not self._file_of:
            self._file_of = dict.fromkeys(self._open.keys(), self._name)

    def __call__(self, name: str) -> Tensor | None:
        """The parameter, backed by the file; None if the checkpoint does not have it."""
        file = self._file_of.get(name)
        if file is None:
            return None
        if file != self._name:
            self._open, self._name = self._opened(file), file
        tensor: Tensor = self._open.get_tensor(name)
        return tensor

    def _opened(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:  # an unreadable file is "not found" too
            raise BastionError(f"{self.folder / file} is damaged or unreadable ({error}): fetch it again") from error

    def digest(self) -> str:
        """Hexadecimal SHA-256 over the config, the tensors' names and shapes, and a few bytes of each."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name in self.files:
            with (self.folder / name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")  # of the JSON header; tensors follow it
                header = file.read(length)
                digest.update(header)
                for key, entry in json.loads(header).items():
                    if key == "__metadata__":
                        continue
                    begin, end = entry["data_offsets"]
                    for offset in (begin, (begin + end) // 2, max(begin, end - SAMPLE)):
                        file.seek(8 + length + offset)
                        digest.update(file.read(min(SAMPLE, end - offset)))
        return digest.hexdigest()

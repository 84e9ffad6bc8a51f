"""Where the package keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_root() -> Path:
    """The folder for files that can be made again: $BASTION_CACHE, or else the user's cache folder.

    It need not exist yet.
    """
    if override := os.environ.get("BASTION_CACHE"):
        return Path(override).expanduser()
    return platformdirs.user_cache_path("bastion")

"""The drafter that comes with the package, from prompts to checkpoint, within a time budget; on a GPU or a CPU.

    python recipes/smollm2_135m_dflash.py --data-dir DIR --out OUT --minutes 10 [--init smollm2-135m-dflash]
    python recipes/smollm2_135m_dflash.py --data-dir DIR --out OUT --ship       # put OUT's drafter into the package

DIR holds the training prompts, gsm8k_train.jsonl and mbpp_train.jsonl; the target writes others itself. Run it again
and it goes on: answers are added, and the last drafter is trained further on all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from bastion.drafters.dflash.checkpoint import load_model, save_model
from bastion.drafters.loading import shipped_folder

NAME = "smollm2-135m-dflash"
SYNTHESIS, TRAINING = 0.35, 0.5  # shares of the time; the rest goes to the target's features and to loading
GPU = torch.cuda.is_available()
SIDE_BY_SIDE = 512 if GPU else 64
BATCH, ANCHORS = ("32", "64") if GPU else ("8", "16")
FRESH = ["--layers", "3", "--block-size", "8", "--draft-vocab", "8192"]


def bastion(*arguments: object) -> None:
    """Run a command of the package; its failure ends the recipe."""
    command = [sys.executable, "-c", "from bastion.cli import main; main()", *map(str, arguments)]
    print("bastion", *arguments, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Synthesise, compute features, train, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="answers of this target made before")
    parser.add_argument("--init", help="train this drafter further instead of a random one")
    parser.add_argument("--ship", action="store_true", help="only copy the drafter of OUT into the package")
    arguments = parser.parse_args()
    out = arguments.out
    runs = sorted(config.parent for config in out.glob("drafter-*/config.json"))
    if not arguments.ship:
        init = arguments.init or (runs[-1] if runs else None)
        runs.append(out / f"drafter-{len(runs):02d}")
        bastion(
            "synthesize", "--target", "smollm2-135m", "--out", out / "answers", "--batch", SIDE_BY_SIDE,
            "--prompts", arguments.data_dir / "gsm8k_train.jsonl", "--prompts", arguments.data_dir / "mbpp_train.jsonl",
            "--licence", "MIT (GSM8K), CC BY 4.0 (MBPP)", "--self-prompted", 8000,
            "--time-budget", SYNTHESIS * arguments.minutes,
        )  # fmt: skip
        bastion(
            "train", "dflash", "--target", "smollm2-135m", "--out", runs[-1],
            *(part for path in (out / "answers", *arguments.answers) for part in ("--data", path)),
            "--batch", BATCH, "--anchors", ANCHORS, "--time-budget", TRAINING * arguments.minutes,
            *(["--init", init] if init else FRESH),
        )  # fmt: skip
    model = load_model(runs[-1], torch.device("cpu"), torch.bfloat16)
    save_model(model, shipped_folder(NAME) if arguments.ship else out / "export", max_shard_size="15MB")


if __name__ == "__main__":
    main()

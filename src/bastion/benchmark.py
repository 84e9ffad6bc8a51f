"""The benchmark of the public BASTION release: plain decoding, the DFlash chain and BASTION (`benchmarks.release`).

python -m bastion.benchmark --model Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16 --dataset gsm8k
torchrun --nproc_per_node=8 -m bastion.benchmark ...
"""

from __future__ import annotations

import typer

from bastion.cli import run


def main() -> None:
    """Parse and run."""
    from bastion.benchmarks.release import command

    typer.run(command)


if __name__ == "__main__":
    run(main)

"""Accepted lengths and speed of a drafter on prompts that it was not trained on.

    python benchmarks/drafter.py answers --data-dir DIR --out FOLDER     # what the target writes by itself, once
    python benchmarks/drafter.py speed --data-dir DIR --drafter FOLDER   # tokens/s of policies, interleaved

`bastion evaluate-drafter --data FOLDER` then gives the accepted lengths of chain and trees without decoding again.
Prompt sets are JSON-lines files with `turns`: gsm8k.jsonl, humaneval.jsonl, mt-bench.jsonl in DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import bastion
from bastion.demo import compare
from bastion.training.data import Conversation

SETS = {"gsm8k": 64, "humaneval": 64, "mt-bench": 80}  # first turns, taken evenly from the whole set
SIDE_BY_SIDE = 32


def prompts(folder: Path, name: str, count: int) -> list[str]:
    """`count` first turns, evenly spread over the file."""
    turns = [json.loads(line)["turns"][0] for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
    return [turns[i * len(turns) // count] for i in range(min(count, len(turns)))]


def answers(arguments: argparse.Namespace) -> None:
    """Write the target's plain greedy answers, one file a set; files that are there are left as they are."""
    model = bastion.load(arguments.target, "ngram", "plain", dtype=arguments.dtype)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in SETS.items():
        path = arguments.out / f"{name}.jsonl"
        if path.exists():
            continue
        texts = prompts(arguments.data_dir, name, count)
        lines = []
        for start in range(0, len(texts), SIDE_BY_SIDE):
            batch = texts[start : start + SIDE_BY_SIDE]
            results = model.generate_batch(batch, max_new_tokens=arguments.max_new_tokens)
            for text, result in zip(batch, results, strict=True):
                ids = model.encode(text)
                lines.append(Conversation((*ids, *result.token_ids), len(ids), name, 0.0).line())
            print(f"{name}: {len(lines)} of {len(texts)}", flush=True)
        path.write_text("".join(lines), encoding="utf-8")


def speed(arguments: argparse.Namespace) -> None:
    """Tokens/s after the prefill under each policy, as ratios to the first one, medians over prompts."""
    model = bastion.load(arguments.target, arguments.drafter, "plain", dtype=arguments.dtype)
    for name in SETS:
        texts = prompts(arguments.data_dir, name, arguments.prompts)
        rows = compare(
            model,
            {str(i): text for i, text in enumerate(texts)},
            arguments.policies,
            arguments.max_new_tokens,
            arguments.repeats,
        )
        for policy in arguments.policies:
            mine = [row for row in rows if row.policy == policy]
            speedups, rates = [row.speedup for row in mine], [row.tokens_per_second for row in mine]
            length = statistics.mean(row.accepted_length for row in mine)
            size = statistics.mean(row.tree_size for row in mine)
            print(
                f"{name:10} {policy:10} {statistics.median(speedups):.2f}x, mean {statistics.mean(speedups):.2f}x, "
                f"least {min(speedups):.2f}x; {statistics.median(rates):.1f} tokens/s; accepted length {length:.2f} of "
                f"{size:.1f} nodes; same text {sum(row.same_text for row in mine)}/{len(mine)}",
                flush=True,
            )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["answers", "speed"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="folder for the answers")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--policies", nargs="+", default=["plain", "chain", "fixed:4", "fixed:8", "fixed:16", "auto"])
    parser.add_argument("--prompts", type=int, default=8, help="of each set, for speed")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.what == "answers" and arguments.out is None:
        parser.error("answers needs --out")
    {"answers": answers, "speed": speed}[arguments.what](arguments)


if __name__ == "__main__":
    main()

"""A small, fair comparison of policies: same prompts, same model, interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bastion.decoding.stats import GenerationStats
from bastion.drafters.mixed import alone
from bastion.model import Model

METHODS = {"chain": "{} (DFlash)", "fixed": "{} (DDTree)", "roofline": "{} (BASTION)", "auto": "{} (default)"}


@dataclass(slots=True)
class Row:
    """One prompt under one policy; medians over repeats."""

    prompt: str
    policy: str
    tokens_per_second: float  # after the prefill
    speedup: float  # median of the repeats' ratios to the first policy's
    accepted_length: float  # bonus token included
    tree_size: float  # nodes, root not counted
    same_text: bool  # as under the first policy


def compare(
    model: Model, prompts: dict[str, str], policies: Sequence[str], max_new_tokens: int, repeats: int
) -> list[Row]:
    """Run all prompts under all policies, the first being the baseline, in turn within each repeat.

    The policy `auto` has the model's drafter, the others, which are papers' methods, the same without the n-gram index.
    """
    ways = {
        policy: model.with_policy(policy, model.drafter if policy == "auto" else alone(model.drafter))
        for policy in policies
    }
    runs: dict[tuple[str, str], list[GenerationStats]] = {}
    texts: dict[tuple[str, str], list[int]] = {}
    for _ in range(repeats):
        for prompt, text in prompts.items():
            for policy, way in ways.items():
                result = way.generate(text, max_new_tokens=max_new_tokens)
                runs.setdefault((prompt, policy), []).append(result.stats)
                texts[prompt, policy] = result.token_ids
    rows = []
    for (prompt, policy), stats in runs.items():
        base = runs[prompt, policies[0]]
        pairs = zip(stats, base, strict=True)
        ratios = [s.decode_tokens_per_second / (b.decode_tokens_per_second or float("nan")) for s, b in pairs]
        rows.append(
            Row(
                prompt,
                policy,
                statistics.median(s.decode_tokens_per_second for s in stats),
                statistics.median(ratios),
                stats[0].mean_accepted_length,
                stats[0].mean_tree_size,
                texts[prompt, policy] == texts[prompt, policies[0]],
            )
        )
    return rows


def comparison_table(rows: list[Row], title: str) -> Table:
    """The rows as a table."""
    table = Table(
        "prompt", "policy", "tokens/s", "speed-up", "accepted length", "mean tree size", "same text",
        title=title,
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.prompt,
            METHODS.get(row.policy.partition(":")[0], "{}").format(row.policy),
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.accepted_length:.2f}",
            f"{row.tree_size:.1f}",
            "yes" if row.same_text else "no",
        )
    return table

"""What a verification found, to read and to process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from bastion.model import Model
from bastion.policies import describe
from bastion.verification import LEVEL, Verification


def summary(found: Verification) -> str:
    """The outcome in one line."""
    total = len(found.comparisons)
    parts = [f"{found.count('identical')} of {total} identical"]
    if near := found.count("near-tie"):
        parts.append(f"{near} near-tie{'s' if near > 1 else ''}")
    if wrong := found.count("violation"):
        parts.append(f"{wrong} VIOLATION{'S' if wrong > 1 else ''}")
    test = found.distribution
    if test is not None:
        verdict = f", below {LEVEL:g}: VIOLATION" if test.violation else ""
        parts.append(f"distribution of {test.tokens} tokens in {test.draws} texts: p = {test.p_value:.3g}{verdict}")
    length, nodes = found.tokens / found.rounds, found.nodes / found.rounds
    return f"{', '.join(parts)} ({length:.2f} tokens a round from {nodes:.1f} nodes)"


def differences_table(found: Verification, tokenizer: Any) -> Table:
    """A row for each prompt whose texts are not identical."""
    table = Table("prompt", "outcome", "position", "plain", "speculative", "gap", "in float32")
    for one in found.comparisons:
        if (difference := one.difference) is not None:
            table.add_row(
                one.prompt,
                one.outcome,
                str(difference.position),
                *(_token(tokenizer, token) for token in (difference.plain, difference.speculative)),
                *("" if gap is None else f"{gap:.3g}" for gap in (difference.gap, difference.gap_float32)),
            )
    return table


def faults(found: Verification) -> list[str]:
    """A line for each violation: why rounding does not explain it."""
    pairs = ((one.prompt, one.difference) for one in found.comparisons)
    return [f"{prompt}: {difference.fault}" for prompt, difference in pairs if difference and difference.fault]


def as_dict(found: Verification, model: Model) -> dict[str, Any]:
    """All of it, as JSON values."""
    return {
        "target": model.target.name,
        "drafter": model.drafter.name,
        "policy": describe(model.policy),
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "device": str(model.target.device),
        "passed": found.passed,
        "identical": found.count("identical"),
        "near_ties": found.count("near-tie"),
        "violations": found.count("violation"),
        "distribution": None if found.distribution is None else asdict(found.distribution) | {"level": LEVEL},
        "rounds": found.rounds,
        "nodes": found.nodes,
        "tokens": found.tokens,
        "prompts": [{"outcome": one.outcome} | asdict(one) for one in found.comparisons],
    }


def _token(tokenizer: Any, token: int | None) -> str:
    return "(end)" if token is None else f"{token} {tokenizer.decode([token])!r}"

"""`bastion generate`: write a text."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from bastion.cli import options
from bastion.errors import BastionError

if TYPE_CHECKING:
    from bastion.decoding.stats import GenerationStats


def command(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    policy: options.Policy = "auto",
    budget: options.Budget = None,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most probable tokens; 0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the smallest set with this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least probability, relative to the highest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeats become rarer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, no chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of the text as it comes.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write one JSON line a round to this file.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Write a text, several tokens a round."""
    from bastion.policies import describe

    text = sys.stdin.read() if prompt == "-" else prompt
    given = {
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed
    }  # fmt: skip
    sampling = {name: value for name, value in given.items() if value is not None}
    model = options.load(target, drafter, policy, budget, device, dtype)
    request: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "stop": stop or (), "raw": raw, "temperature": temperature, **sampling
    }  # fmt: skip
    with ExitStack() as stack:
        if trace is not None:
            from bastion.trace import TraceWriter

            request["on_round"] = TraceWriter(stack.enter_context(_opened(trace)), model)
        if not as_json:
            result = model.generate(text, on_text=_print_piece, **request)
            print()
            print(_summary(result.stats, describe(model.policy)), file=sys.stderr)
            return
        result = model.generate(text, **request)
    report = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "target": model.target.name,
        "drafter": model.drafter.name,
        "policy": describe(model.policy),
        "stats": _figures(result.stats),
    }
    print(json.dumps(report, ensure_ascii=False))


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise BastionError(f"cannot write the trace to {path}: {error.strerror}") from error


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _figures(stats: GenerationStats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "mean_accepted_length": stats.mean_accepted_length,
        "mean_tree_size": stats.mean_tree_size,
        "accepted_lengths": stats.accepted_lengths,
        "tree_sizes": stats.tree_sizes,
        "tokens_per_second": stats.tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "seconds": stats.seconds,
    }


def _summary(stats: GenerationStats, policy: str) -> str:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stats.seconds.items() if seconds)
    return (
        f"[{policy}: {stats.new_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s after the prefill; "
        f"{stats.rounds} rounds of {stats.mean_accepted_length:.2f} tokens from {stats.mean_tree_size:.1f} nodes; "
        f"seconds: prefill {stats.prefill_seconds:.2f}, {stages}]"
    )

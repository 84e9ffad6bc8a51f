"""What the engine's claims of speed rest on: run it on your own machine.

    python benchmarks/engine.py plain      plain decoding against transformers' generate, same weights and dtype
    python benchmarks/engine.py ngram      n-gram trees under policy auto against plain decoding
    python benchmarks/engine.py host       where the time of a round of 32 nodes goes
    python benchmarks/engine.py products   what the layers' products cost by rows, with weights packed and as they are
    python benchmarks/engine.py memory     peak memory of loading the target and writing one text

Everything that is compared runs in one process, in turn, prompt by prompt. Figures are medians over prompts of ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch

import bastion
from bastion.decoding.stats import STAGES
from bastion.targets.loading import resolve_source

REPEATING = Path(__file__).with_name("repeating.jsonl")
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
)


def read(path: Path, count: int) -> list[str]:
    """The first turns of the first `count` prompts of a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0] for line in lines]


def plain(options: argparse.Namespace) -> None:
    """Tokens/s, prefill included, since generate() does not tell the two apart."""
    from transformers import AutoModelForCausalLM

    ours = bastion.load(options.target, "ngram", "plain", dtype=options.dtype)
    theirs = AutoModelForCausalLM.from_pretrained(resolve_source(options.target), dtype=ours.target.dtype).eval()
    ratios = []
    for repeat in range(options.repeats + 1):
        for question in QUESTIONS:
            ids = torch.tensor([ours.encode(question)])
            start = time.perf_counter()
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.max_new_tokens, do_sample=False
            )
            reference = (out.shape[1] - ids.shape[1]) / (time.perf_counter() - start)
            rate = ours.generate(question, max_new_tokens=options.max_new_tokens).stats.tokens_per_second
            if repeat:  # the first warms both up
                ratios.append(rate / reference)
                print(f"transformers {reference:6.2f} tokens/s   bastion {rate:6.2f} tokens/s   {ratios[-1]:.2f}x")
    print(f"plain decoding, {ours.target.dtype}: median {statistics.median(ratios):.2f}x of transformers' generate")


def ngram(options: argparse.Namespace) -> None:
    """Plain against `auto` with the n-gram drafter, after the prefill and with it."""
    model = bastion.load(options.target, "ngram", dtype=options.dtype)
    model.calibrate()
    sets = {"repeating": read(REPEATING, options.prompts)}
    if options.mt_bench is not None:
        sets["mt-bench"] = read(options.mt_bench, options.prompts)
    for name, prompts in sets.items():
        decode, whole = [], []
        for prompt in prompts:
            pairs = []
            for _ in range(options.repeats):
                runs = {}
                for policy in ("plain", options.policy):
                    model.set_policy(policy)
                    runs[policy] = model.generate(prompt, max_new_tokens=options.max_new_tokens)
                before, after = runs["plain"], runs[options.policy]
                if before.token_ids != after.token_ids:
                    print(f"! other text under {options.policy}: {prompt[:40]!r}")
                pairs.append((before.stats, after.stats))
            decode.append(statistics.median(a.decode_tokens_per_second / b.decode_tokens_per_second for b, a in pairs))
            whole.append(statistics.median(a.tokens_per_second / b.tokens_per_second for b, a in pairs))
            stats = pairs[0][1]
            print(
                f"{name}: {decode[-1]:.2f}x ({whole[-1]:.2f}x with prefill), {stats.new_tokens} tokens, "
                f"accepted length {stats.mean_accepted_length:.2f}, {stats.mean_tree_size:.1f} nodes",
                flush=True,
            )
        print(
            f"{name}, {options.policy} against plain, {model.target.dtype}: median {statistics.median(decode):.2f}x, "
            f"mean {statistics.mean(decode):.2f}x, least {min(decode):.2f}x after the prefill; "
            f"median {statistics.median(whole):.2f}x with it"
        )


def host(options: argparse.Namespace) -> None:
    """Shares of a round's stages at a fixed budget of 32 nodes."""
    model = bastion.load(options.target, "ngram", "fixed:32", dtype=options.dtype)
    totals, rounds, nodes = dict.fromkeys(STAGES, 0.0), 0, 0.0
    for prompt in read(REPEATING, options.prompts):
        records = []
        model.generate(prompt, max_new_tokens=options.max_new_tokens, on_round=records.append)
        for record in records:
            if record.tree.size >= 24:  # rounds whose tree is nearly full; the others would flatter us
                rounds, nodes = rounds + 1, nodes + record.tree.size
                for stage, seconds in record.seconds.items():
                    totals[stage] += seconds
    total = sum(totals.values())
    for stage, seconds in totals.items():
        print(f"{stage:8} {1e3 * seconds / rounds:8.2f} ms a round {seconds / total:7.1%}")
    outside = total - totals["draft"] - totals["verify"]
    print(f"{rounds} rounds of {nodes / rounds:.0f} nodes: {outside / total:.1%} of the time outside the two forwards")


def products(options: argparse.Namespace) -> None:
    """Milliseconds of the products of all layers by rows, as the engine runs them and by torch's own; in turn."""
    target = bastion.load(options.target, "ngram", "plain", dtype=options.dtype).target
    linears = [one for layer in target.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    weights = [linear.plain() for linear in linears]

    def engine(rows: int) -> None:
        for linear, weight in zip(linears, weights, strict=True):
            linear(inputs[weight.shape[1]][:rows])

    def torchs(rows: int) -> None:
        for weight in weights:
            inputs[weight.shape[1]][:rows].mm(weight.t())

    print(f"{target.dtype}, packed: {linears[0].packed}; milliseconds")
    with torch.inference_mode():
        inputs = {width: torch.randn(64, width, dtype=target.dtype) for width in {w.shape[1] for w in weights}}
        for rows in (1, 2, 4, 8, 16, 32, 64):
            seconds: dict[str, list[float]] = {"engine": [], "torch": []}
            for _ in range(max(2, options.repeats)):
                for name, run in (("engine", engine), ("torch", torchs)):
                    start = time.perf_counter()
                    run(rows)
                    seconds[name].append(time.perf_counter() - start)
            medians = (f"{name} {1e3 * statistics.median(found[1:]):6.1f}" for name, found in seconds.items())
            print(f"{rows:3} rows: {', '.join(medians)}")


def memory(options: argparse.Namespace) -> None:
    """Peak resident memory of this process."""
    model = bastion.load(options.target, "ngram", "plain", dtype=options.dtype)
    model.generate(QUESTIONS[0], max_new_tokens=options.max_new_tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory, {model.target.dtype}: {peak / 1e9:.2f} GB")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "ngram", "host", "products", "memory"])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16; default: what is fastest here")
    parser.add_argument("--policy", default="auto", help="of the n-gram runs")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--mt-bench", type=Path, help="a file of MT-Bench prompts as JSON lines")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs = {"plain": plain, "ngram": ngram, "host": host, "products": products, "memory": memory}
    runs[options.what](options)


if __name__ == "__main__":
    main()

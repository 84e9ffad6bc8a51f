"""Lines of benchmarks that never ran."""

from bastion.benchmarks.methods import Outcome
from bastion.benchmarks.records import Line, Settings, Text

SETTINGS = Settings(
    datasets=("chat",),
    prompts_sha256="feed",
    methods=("ar", "dflash"),
    temperatures=(0.0,),
    max_samples=None,
    max_new_tokens=8,
    seed=0,
    repeats=1,
)


def make_line(
    method, sample="1", *, dataset="chat", temperature=0.0, repeat=0, seconds=2.0, prefill=1.0, tokens=11, **more
):
    """The line of a text of `tokens` tokens that took `seconds`, `prefill` of them for the first."""
    text = Text(dataset=dataset, sample=sample, turn=0, temperature=temperature, repeat=repeat, method=method)
    return Line.of(text, 0, Outcome("answer", list(range(tokens)), 5, prefill, seconds, **more))

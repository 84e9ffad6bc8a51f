"""Runs of benchmarks that never took place."""

from collections.abc import Sequence
from datetime import UTC, datetime

from bastion.benchmarks.provenance import CalibrationRecord, Part, Provenance
from bastion.benchmarks.records import Line, Run, Settings
from bastion.benchmarks.statistics import summarize
from bastion.benchmarks.tables import Summary


def make_run(
    methods: Sequence[str], datasets: Sequence[str] = ("gsm8k",), temperatures: Sequence[float] = (0.0,)
) -> Run:
    """A run with all that provenance can hold."""
    return Run(
        settings=Settings(
            datasets=tuple(datasets),
            prompts_sha256="feed",
            methods=tuple(methods),
            temperatures=tuple(temperatures),
            max_samples=None,
            max_new_tokens=21,
            seed=0,
            repeats=1,
        ),
        provenance=Provenance(
            command="bastion bench --prompts 'a<b>.jsonl'",
            date=datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC),
            versions={"python": "3.11.7", "torch": "2.13.0"},
            commit="0123abcd",
            platform="Linux-6.1",
            processor="Some CPU",
            device="Some GPU",
            threads=2,
            dtype="float32",
            attention="sdpa",
            target=Part(name="tiny-target", digest="feed"),
            drafters=(Part(name="tiny-drafter", digest="beef"),),
            calibrations=(
                CalibrationRecord(
                    drafter_digest="beef",
                    date=datetime(2025, 1, 1, tzinfo=UTC),
                    errors={"roofline": 0.05, "profile": 0.03},
                ),
            ),
        ),
    )


def make_summary(run: Run, lines: Sequence[Line]) -> Summary:
    return Summary(run=run, peak_memory=3 * 2**20, figures=summarize(lines, run.settings))

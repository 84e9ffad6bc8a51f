"""The training loop, the same for every drafter."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from bastion.errors import BastionError
from bastion.files import append, replacing, write_text, writing
from bastion.training.data import Conversation, prompt_key
from bastion.training.measures import Measures, Outcome

STATE = "training_state.pt"
LOG = "log.jsonl"
CLIP = 1.0
MEASURED = 64  # held-back conversations that are looked at in each measurement


class Recipe(Protocol):
    """A drafter in training."""

    model: nn.Module
    conversations: Sequence[Conversation]

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits on these conversations; what is random in it comes from the generator alone."""

    def save(self, folder: Path) -> None:
        """Export the drafter."""

    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that it continues."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How long and how fast to learn. Raises BastionError for values that make no sense."""

    batch: int = 8  # conversations a step and process
    learning_rate: float = 1e-3
    warmup: float = 0.04  # share of the run
    max_steps: int | None = None
    time_budget: float | None = None  # seconds; with max_steps too, what comes first ends the run
    held_back: float = 0.04  # share of the prompts whose conversations are measured, never trained on
    evaluate_every: int = 200  # steps
    checkpoint_every: int = 200  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_steps is None and self.time_budget is None:
            raise BastionError("say how long to train: --max-steps, --time-budget, or both")
        checks: dict[str, tuple[bool, str]] = {
            "batch": (self.batch >= 1, "1 or more"),
            "max_steps": (self.max_steps is None or self.max_steps >= 1, "1 or more"),
            "evaluate_every": (self.evaluate_every >= 1, "1 or more"),
            "checkpoint_every": (self.checkpoint_every >= 1, "1 or more"),
            "learning_rate": (0 < self.learning_rate < math.inf, "a number above 0"),
            "time_budget": (self.time_budget is None or 0 < self.time_budget < math.inf, "a number above 0"),
            "warmup": (0 <= self.warmup < 1, "from 0 to below 1"),
            "held_back": (0 < self.held_back < 1, "a share between 0 and 1"),
            "seed": (0 <= self.seed < 2**63, "a whole number of 63 bits"),
        }
        for name, (valid, wanted) in checks.items():
            if not valid:
                raise BastionError(f"{name} must be {wanted}, not {getattr(self, name)}")


@dataclass(slots=True)
class State:
    """Where a run is, for a progress bar."""

    share: float  # of the run
    record: dict[str, Any] | None  # a line of the log, when one was written


class Trainer:
    """Trains a recipe with AdamW and a cosine schedule; keeps log, checkpoint and exported drafter in one folder."""

    def __init__(self, recipe: Recipe, settings: TrainerSettings, folder: Path, accelerator: Any):
        """Prepare a run. `accelerator` is accelerate's: it says how many processes share the work, and on what."""
        self.recipe, self.settings, self.folder, self.accelerator = recipe, settings, folder, accelerator
        self.held_back, self.trained = split(recipe.conversations, settings.held_back)
        self.held_back = self.held_back[:MEASURED]
        optimizer = torch.optim.AdamW(
            recipe.model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.module, self.optimizer = accelerator.prepare(recipe.model, optimizer)
        self.step = 0
        self.seconds = 0.0  # of training, over all runs that were resumed
        self._orders: dict[int, list[int]] = {}

    @property
    def done(self) -> float:
        """The share of the run that is over, 0 to 1."""
        settings = self.settings
        steps = self.step / settings.max_steps if settings.max_steps else 0.0
        spent = self.seconds / settings.time_budget if settings.time_budget else 0.0
        return min(max(steps, spent), 1.0)

    def train(self, on_progress: Callable[[State], None] = lambda progress: None) -> None:
        """Train to the end of the run. What is random in a step depends on seed and step only."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._cut_log()
        trained = Measures()
        while self.done < 1:
            began = time.perf_counter()
            trained.add(self._train_step())
            self.step += 1
            self.seconds = self._agreed(self.seconds + time.perf_counter() - began)
            over, record = self.done >= 1, None
            if over or self.step % self.settings.evaluate_every == 0:
                record = self._log(trained)
                trained = Measures()
            if over or self.step % self.settings.checkpoint_every == 0:
                self.save()
            on_progress(State(self.done, record))

    def _train_step(self) -> Outcome:
        rank, world, batch = self.accelerator.process_index, self.accelerator.num_processes, self.settings.batch
        number = self.step * world + rank
        indices = [self._conversation(number * batch + i) for i in range(batch)]
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._schedule()
        with self.accelerator.autocast():
            outcome = self.recipe.run(self.module, indices, self._generator(number))
        self.accelerator.backward(outcome.loss)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), CLIP)  # of all processes, so all see the same
        if not norm.isfinite():
            raise BastionError(
                f"the gradient is not finite at step {self.step}: start again with a lower --learning-rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return outcome

    def _schedule(self) -> float:
        """The learning rate's factor: linear warmup, then a cosine down to zero."""
        warmup, done = self.settings.warmup, self.done
        if done < warmup:
            return max(done / warmup, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))

    def _conversation(self, number: int) -> int:
        """Which conversation is the number-th to be seen: each epoch has an order of its own."""
        epoch, place = divmod(number, len(self.trained))
        if epoch not in self._orders:
            self._orders = {epoch: torch.randperm(len(self.trained), generator=self._generator(-1 - epoch)).tolist()}
        return self.trained[self._orders[epoch][place]]

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.settings.seed * 1_000_003 + number) % 2**63)

    @torch.no_grad()
    def evaluate(self) -> Measures:
        """The held-back conversations, always the same blocks of them."""
        measures, batch = Measures(), self.settings.batch
        for start in range(0, len(self.held_back), batch):
            generator = torch.Generator().manual_seed(start)
            with self.accelerator.autocast():
                measures.add(self.recipe.run(self.module, self.held_back[start : start + batch], generator))
        return measures

    def _agreed(self, seconds: float) -> float:
        """The same clock for all processes, or they would not end together."""
        if self.accelerator.num_processes == 1:
            return seconds
        clock = torch.tensor(seconds, device=self.accelerator.device, dtype=torch.float64)
        return float(self.accelerator.reduce(clock, "mean"))

    def _log(self, trained: Measures) -> dict[str, Any]:
        """Measure, and append a line to the log."""
        record = {
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "learning_rate": self.settings.learning_rate * self._schedule(),
            "train": trained.summary(),
            "held_back": self.evaluate().summary(),
        }
        if self.accelerator.is_main_process:
            append(self.folder / LOG, json.dumps(record) + "\n")
        return record

    def save(self) -> None:
        """Export the drafter and write the state from which `resume` continues, each in one step."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "model": self.recipe.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "run": self._run,
        }
        try:
            with writing(self.folder), replacing(self.folder / STATE) as beside:
                torch.save(state, beside)
            self.recipe.save(self.folder)
        except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a full disk
            reason = str(error).partition("\n")[0]
            raise BastionError(f"cannot write to {self.folder} ({reason}): make room, then use --resume") from error

    @property
    def _run(self) -> dict[str, Any]:
        """What makes this run this run: whatever decides what a step does, but for the schedule's length."""
        mine = asdict(self.settings)
        free = "max_steps", "time_budget", "evaluate_every", "checkpoint_every"
        return {name: value for name, value in mine.items() if name not in free} | {
            "processes": self.accelerator.num_processes,
            **self.recipe.identity(),
        }

    def resume(self) -> None:
        """Continue from the folder's checkpoint. Raises BastionError if it belongs to another run.

        Length and intervals of the run may be other ones; then the schedule goes on along the new length.
        """
        path = self.folder / STATE
        try:
            state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
            run, self.step, self.seconds = state["run"], state["step"], state["seconds"]
        except FileNotFoundError:
            raise BastionError(f"no checkpoint in {self.folder}: start without --resume") from None
        except (OSError, RuntimeError, LookupError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise BastionError(f"{path} cannot be read ({type(error).__name__}): start in another folder") from None
        if changed := sorted(name for name, value in self._run.items() if run.get(name) != value):
            raise BastionError(f"the run in {self.folder} has other settings ({', '.join(changed)}): repeat those")
        self.recipe.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _cut_log(self) -> None:
        """Drop the lines of the log that are younger than the checkpoint; they will be written again."""
        kept = [record for record in read_log(self.folder) if record["step"] <= self.step]
        if self.accelerator.is_main_process:
            write_text(self.folder / LOG, "".join(json.dumps(record) + "\n" for record in kept))


def split(conversations: Sequence[Conversation], share: float) -> tuple[list[int], list[int]]:
    """Indices of the conversations to hold back, and of those to train on.

    The prompt's hash decides, so a prompt stays on its side when data is added, with all its answers. Raises
    BastionError if one of the sides is empty.
    """
    keys = [prompt_key(one.ids[: one.prompt_length]) for one in conversations]
    low = [int.from_bytes(key[:8], "big") < share * 2**64 for key in keys]
    held_back = sorted((i for i, held in enumerate(low) if held), key=lambda i: keys[i])
    trained = [i for i, held in enumerate(low) if not held]
    if not held_back or not trained:
        raise BastionError(
            f"of {len(conversations)} conversations, {len(held_back)} are held back and {len(trained)} left to "
            "train on: make more of them, or change --held-back"
        )
    return held_back, trained


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's log; a half-written last line is left out."""
    path = folder / LOG
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, TypeError, LookupError):
            break
        records.append(record)
    return records

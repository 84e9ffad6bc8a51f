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
from torch import Tensor, nn

from bastion.errors import BastionError
from bastion.files import append, replacing, write_text, writing
from bastion.training.data import Conversation, prompt_key

STATE = "training_state.pt"
LOG = "log.jsonl"
CLIP = 1.0


@dataclass(slots=True)
class Outcome:
    """What a drafter made of some blocks."""

    loss: Tensor  # scalar
    hits: Tensor  # [blocks, slots] bool: its best guess is the answer's token
    present: Tensor  # [blocks, slots] bool: the answer reaches that far


class Recipe(Protocol):
    """A drafter in training."""

    model: nn.Module
    conversations: Sequence[Conversation]

    def usable(self, index: int) -> bool:
        """Whether a conversation can be trained on."""

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
    held_back: int = 64  # conversations that are measured, never trained on
    evaluate_every: int = 200  # steps
    checkpoint_every: int = 200  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_steps is None and self.time_budget is None:
            raise BastionError("say how long to train: --max-steps, --time-budget, or both")
        counts = [self.batch, self.evaluate_every, self.checkpoint_every, self.held_back]
        counts += [] if self.max_steps is None else [self.max_steps]
        amounts = [self.learning_rate] + ([] if self.time_budget is None else [self.time_budget])
        if min(counts) < 1 or not 0 <= self.warmup < 1 or min(amounts) <= 0:
            raise BastionError(
                "batch, steps, intervals and held-back conversations must be 1 or more, the learning rate and the time "
                "budget above 0, the warmup from 0 to below 1"
            )


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
        usable = [i for i in range(len(recipe.conversations)) if recipe.usable(i)]
        # By the prompt's hash: the same conversations are held back when data is added, whichever answer they hold.
        usable.sort(key=lambda index: prompt_key(_prompt(recipe.conversations[index])))
        held_back = min(settings.held_back, len(usable) // 2)
        self.held_back, self.trained = usable[:held_back], usable[held_back:]
        if not self.trained or not self.held_back:
            raise BastionError("the data has fewer than two answers of two tokens or more: make more with synthesize")
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
            raise BastionError(f"the gradient is not finite at step {self.step}: resume with a lower --learning-rate")
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
        self.recipe.save(self.folder)
        state = {
            "model": self.recipe.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "run": self._run,
        }
        with writing(self.folder), replacing(self.folder / STATE) as beside:
            torch.save(state, beside)

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
        except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise BastionError(
                f"{path} cannot be read ({str(error).splitlines()[0]}): start in another folder"
            ) from None
        if changed := sorted(name for name, value in self._run.items() if run.get(name) != value):
            raise BastionError(f"the run in {self.folder} has other settings ({', '.join(changed)}): repeat those")
        self.recipe.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _cut_log(self) -> None:
        """Drop the lines of the log that are younger than the checkpoint; they will be written again."""
        kept = [record for record in read_log(self.folder) if record["step"] <= self.step]
        if self.accelerator.is_main_process:
            write_text(self.folder / LOG, "".join(json.dumps(record) + "\n" for record in kept))


class Measures:
    """Sums over outcomes."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.hits: Tensor | float = 0.0  # [slots]
        self.present: Tensor | float = 0.0  # [slots]
        self.accepted: Tensor | float = 0.0  # guesses, of the blocks that lie in the answer whole
        self.whole: Tensor | float = 0.0  # such blocks

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        hits = outcome.hits & outcome.present
        self.losses.append(outcome.loss.detach())
        self.hits = self.hits + hits.sum(0)
        self.present = self.present + outcome.present.sum(0)
        whole = outcome.present.all(1)
        self.accepted = self.accepted + hits[whole].cumprod(1).sum()
        self.whole = self.whole + whole.sum()

    def summary(self) -> dict[str, Any]:
        """Mean loss, accuracy by position, and the accepted length of a chain from a random anchor, bonus included."""
        accuracy = torch.as_tensor(self.hits) / torch.as_tensor(self.present).clamp(min=1)
        return {
            "loss": round(float(torch.stack(self.losses).mean()), 4),
            "accuracy": [round(share, 4) for share in accuracy.tolist()],
            "accepted_length": round(1 + float(self.accepted) / max(float(self.whole), 1.0), 4),
        }


def _prompt(conversation: Conversation) -> tuple[int, ...]:
    return conversation.ids[: conversation.prompt_length]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's log; a half-written last line is left out."""
    path, records = folder / LOG, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records

"""The outside references: transformers' `generate` in three modes, and llama.cpp, all over the target of a `Model`."""

from __future__ import annotations

import copy
import importlib
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import BaseStreamer

from bastion.benchmarks.methods import Messages, Method, Outcome, TextSettings
from bastion.clock import synchronize
from bastion.decoding.sampling import SamplingParameters
from bastion.errors import BastionError
from bastion.model import Model
from bastion.targets.base import Target
from bastion.targets.gguf import check_complete, first_line, load_gguf, one_line_errors
from bastion.targets.huggingface import HuggingFaceTarget
from bastion.targets.loading import resolve_source
from bastion.targets.zoo import GGUF, ZOO

LOOKUP_TOKENS = 10  # the default of transformers' PromptLookupCandidateGenerator; `generate` has none
SMALLEST_CONTEXT = 4096  # tokens, of llama.cpp; enough for most runs to load the file only once

_LOADED: WeakKeyDictionary[Target, Any] = WeakKeyDictionary()  # one transformers model for all methods over a target


def make_reference(name: str, model: Model, source: str) -> Method:
    """The reference `name` (see `methods.REFERENCES`) over the target of `model`, which was loaded from `source`.

    Raises BastionError for an assistant that does not fit, and for what llama.cpp lacks: package, GGUF file or device.
    """
    base, _, argument = name.partition(":")
    if base == "llama.cpp":
        return LlamaCppMethod(name, model, _gguf_file(source))
    network = _network(model, source)
    if base == "hf-lookup":
        return TransformersMethod(name, model, network, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, {})
    helpers = _helpers(model, network, argument) if base == "hf-assisted" else {}
    return TransformersMethod(name, model, network, {}, helpers)


class _Passes(BaseStreamer):  # type: ignore[misc]
    """Notes the target's passes: rows that go in, tokens that come out, and how long the first one takes."""

    def __init__(self, device: torch.device):
        self._device, self._start = device, 0.0
        self.prefill_seconds: float | None = None
        self.rows: list[int] = []
        self.tokens: list[int] = []  # the prompt's come before those of the passes

    def before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the target."""
        self.rows.append(kwargs["input_ids"].shape[1])
        if self.prefill_seconds is None:
            synchronize(self._device)
            self._start = time.perf_counter()

    def after(self, module: Any, args: Any, output: Any) -> None:
        """A forward hook of the target."""
        if self.prefill_seconds is None:
            synchronize(self._device)
            self.prefill_seconds = time.perf_counter() - self._start

    def put(self, value: Tensor) -> None:
        """Take what the streamer of `generate` is given."""
        self.tokens.append(value.numel())

    def end(self) -> None:
        """Nothing is left to do."""


class TransformersMethod:
    """`generate` of transformers: default attention and cache, the sampling defaults and end ids of `model`.

    `config`: what else the GenerationConfig has. `helpers`: the assistant, as keywords of `generate`. The prefill is
    the target's first pass, without a draft before it; if it verifies such a draft, it counts as a round too.
    """

    def __init__(self, name: str, model: Model, network: Any, config: dict[str, Any], helpers: dict[str, Any]):
        self.name, self.model = name, model
        self._network, self._config, self._helpers = network, config, helpers

    def write(self, messages: Messages, settings: TextSettings) -> Outcome:
        """Answer a conversation; encoding and decoding of the text are counted. Raises BastionError if it cannot."""
        device = self.model.target.device
        passes = _Passes(device)
        start = time.perf_counter()
        ids = self.model.encode(messages)
        prompt = torch.tensor([ids], device=device)
        torch.manual_seed(settings.seed)
        hooks = (
            self._network.register_forward_pre_hook(passes.before, with_kwargs=True),
            self._network.register_forward_hook(passes.after),
        )
        with hooks[0], hooks[1], one_line_errors(f"write with {self.name}"):
            output = self._network.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation_config(
                    min(settings.max_new_tokens, self.model.room(ids)), settings.temperature
                ),
                streamer=passes,
                **self._helpers,
            )
        tokens = output[0, len(ids) :].tolist()
        text = self.model.tokenizer.decode(tokens, skip_special_tokens=True)
        seconds = time.perf_counter() - start
        drafted = [passes.rows[0] - len(ids), *(rows - 1 for rows in passes.rows[1:])]
        first = 0 if drafted[0] else 1  # the first round
        accepted = passes.tokens[1 + first :]
        return Outcome(
            text=text,
            token_ids=tokens,
            prompt_tokens=len(ids),
            prefill_seconds=passes.prefill_seconds,
            seconds=seconds,
            accepted_lengths=accepted,
            tree_sizes=drafted[first : first + len(accepted)],
        )

    def _generation_config(self, max_new_tokens: int, temperature: float) -> GenerationConfig:
        parameters = SamplingParameters(temperature, **self.model.sampling_defaults)
        sampling: dict[str, Any] = {"repetition_penalty": parameters.repetition_penalty}
        if temperature > 0:
            sampling |= {
                "do_sample": True,
                "temperature": temperature,
                "top_k": parameters.top_k,
                "top_p": parameters.top_p,
                "min_p": parameters.min_p or None,  # 0 would still cost a softmax
            }
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.model.end_ids) or None,
            pad_token_id=min(self.model.end_ids, default=0),  # a single text is never padded, but one must be set
            **sampling,
            **self._config,
        )


class LlamaCppMethod:
    """llama.cpp through llama-cpp-python, on the GGUF file that the target was made from.

    It computes with the file's quantised weights, so its texts may differ from the target's. Threads are torch's.
    top_k, top_p and min_p are the defaults of `model`; llama.cpp applies them before the temperature, bastion after it.
    """

    def __init__(self, name: str, model: Model, path: Path):
        """Find the package. Raises BastionError if it is missing, or cannot do what `model` asks for."""
        self.name, self.model, self._path = name, model, path
        self._package = _llama_cpp()
        self._llama: Any = None
        if SamplingParameters(**model.sampling_defaults).repetition_penalty != 1:
            raise BastionError(
                f"{model.target.name} sets a repetition_penalty, which llama.cpp does not apply to the prompt: leave "
                "the method llama.cpp out"
            )
        self._on_gpu = model.target.device.type != "cpu"
        if self._on_gpu and not self._package.llama_supports_gpu_offload():
            raise BastionError(
                "this llama-cpp-python knows no GPU: give --device cpu, leave the method llama.cpp out, or run: "
                "CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-cache-dir 'llama-cpp-python>=0.3,<0.4'"
            )

    def write(self, messages: Messages, settings: TextSettings) -> Outcome:
        """Answer a conversation; encoding and decoding of the text are counted. Raises BastionError if it cannot."""
        ids = self.model.encode(messages)
        most = min(settings.max_new_tokens, self.model.room(ids))
        parameters = SamplingParameters(settings.temperature, **self.model.sampling_defaults)
        cuts = {name: getattr(parameters, name) for name in ("top_k", "top_p", "min_p")}
        llama = self._with_room(len(ids) + most)
        tokens: list[int] = []
        start = time.perf_counter()
        ids = self.model.encode(messages)  # again, as it is part of the time
        llama.reset()  # else it would skip what the prompt has in common with the last text
        llama.set_seed(settings.seed % (2**32 - 1))  # 2**32 - 1 stands for a random seed
        began = first = time.perf_counter()
        for token in llama.generate(ids, temp=parameters.temperature, **cuts):
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
            if token in self.model.end_ids or len(tokens) == most:
                break
        text = self.model.tokenizer.decode(tokens, skip_special_tokens=True)
        return Outcome(
            text=text,
            token_ids=tokens,
            prompt_tokens=len(ids),
            prefill_seconds=first - began,
            seconds=time.perf_counter() - start,
            accepted_lengths=[1] * (len(tokens) - 1),
            tree_sizes=[0] * (len(tokens) - 1),
        )

    def _with_room(self, tokens: int) -> Any:
        """The loaded file, with a context of that many tokens or more."""
        if self._llama is not None and self._llama.n_ctx() >= tokens:
            return self._llama
        if self._llama is not None:
            self._llama.close()
        device, threads = self.model.target.device, torch.get_num_threads()
        try:
            self._llama = self._package.Llama(
                str(self._path),
                n_ctx=max(SMALLEST_CONTEXT, 1 << (tokens - 1).bit_length()),
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if self._on_gpu else 0,
                split_mode=self._package.LLAMA_SPLIT_MODE_NONE,
                main_gpu=device.index or 0,
                offload_kqv=self._on_gpu,
                op_offload=self._on_gpu,
                verbose=False,
            )
        except ValueError as error:
            raise BastionError(
                f"llama.cpp cannot load {self._path} ({first_line(error)}): leave the method llama.cpp out"
            ) from error
        self._llama.eval([0])  # the first pass of a context is slow, and must not be a measured one
        return self._llama


def _network(model: Model, source: str) -> Any:
    """The transformers model with the target's weights, dtype and device: the target's own, or loaded once."""
    target = model.target
    if target not in _LOADED:
        own = target.model if isinstance(target, HuggingFaceTarget) else _load(source, target)[0]
        network = copy.copy(own)  # shares the weights; what it sets for `generate` is to hold for no one else
        network.generation_config = GenerationConfig()  # else it would fill in what ours leaves out
        _LOADED[target] = network
    return _LOADED[target]


def _load(source: str, target: Target) -> tuple[Any, Any]:
    """A transformers model with dtype and device of `target`, and its tokenizer."""
    path = resolve_source(source)
    if path.suffix == ".gguf":
        network, tokenizer = load_gguf(path, target.dtype)
    else:
        with one_line_errors(f"load {source}"):
            network, report = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
        check_complete(report, source)
    return network.to(target.device).eval(), tokenizer


def _helpers(model: Model, network: Any, source: str) -> dict[str, Any]:
    """The assistant model as keywords of `generate`, which wants both tokenizers if the vocabularies' sizes differ."""
    assistant, tokenizer = _load(source, model.target)
    sizes = [one.config.get_text_config().vocab_size for one in (network, assistant)]
    if sizes[0] != sizes[1]:
        return {"assistant_model": assistant, "tokenizer": model.tokenizer, "assistant_tokenizer": tokenizer}
    if tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise BastionError(
            f"{source} has another tokenizer than {model.target.name}: choose an assistant of its family"
        )
    return {"assistant_model": assistant}


def _gguf_file(source: str) -> Path:
    """The GGUF file of a target. Raises BastionError if there is none at hand."""
    path = resolve_source(source)
    if source in ZOO:
        path /= GGUF
    if path.suffix != ".gguf":
        raise BastionError(
            f"llama.cpp needs a GGUF file, which {source} is not: give a .gguf file or a name of the zoo "
            f"({', '.join(ZOO)}) as target, or leave the method out"
        )
    return path


def _llama_cpp() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise BastionError("the method llama.cpp needs llama-cpp-python; run: pip install 'bastion[bench]'") from error
    except (OSError, RuntimeError) as error:  # its library does not fit this machine
        raise BastionError(
            f"llama-cpp-python cannot be used ({first_line(error)}); run: pip install --force-reinstall "
            "--no-cache-dir 'llama-cpp-python>=0.3,<0.4'"
        ) from error

"""`custom_generate` for transformers: `model.generate` with drafts, and the text that it writes without."""

from __future__ import annotations

import hashlib
import inspect
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from bastion.decoding.budget import BudgetPolicy
from bastion.decoding.loop import Generation, decode
from bastion.decoding.sampling import SamplingParameters
from bastion.drafters.base import Drafter
from bastion.drafters.loading import check_drafter, load_drafter
from bastion.errors import BastionError
from bastion.integrations.hooks import RowProcessors, RowStream, column, stacked
from bastion.model import Model
from bastion.targets.huggingface import CACHE_KEYWORDS, HuggingFaceTarget

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What `generate` hands on with every call; all else would have to reach the model, and does not.
PREPARED = ("attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", *CACHE_KEYWORDS)
# Settings of a GenerationConfig that hold here: `generate` has put them into prompt, processors and criteria, or they
# are read below, or they have no effect without beams, an assistant, an encoder or a static cache.
HONOURED = frozenset(
    (
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
        "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
        "token_healing", "guidance_scale", "watermarking_config", "num_return_sequences", "output_scores",
        "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
        "num_beams", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "penalty_alpha",
        "decoder_start_token_id", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
        "max_cache_len", "disable_compile", "transformers_version",
    )
)  # fmt: skip


@dataclass(slots=True)
class Wrapped:
    """What is kept about a transformers model as long as it lives."""

    state: tuple[Any, ...]  # what the target was found out for
    target: HuggingFaceTarget
    drafters: dict[str, Drafter] = field(default_factory=dict)  # by name
    writers: dict[tuple[str, str], Model] = field(default_factory=dict)  # by names of drafter and policy


_WRAPPED: weakref.WeakKeyDictionary[Any, Wrapped] = weakref.WeakKeyDictionary()


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | Path | Drafter = "auto",
    policy: str | BudgetPolicy = "auto",
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """`model.generate(**inputs, custom_generate=bastion.custom_generate, drafter=..., policy=...)`.

    Greedy: the ids that `generate` writes without. Sampled: draws from the same processed distribution, with seeds from
    torch's global generator. `drafter` and `policy` as in `bastion.load`; all other parameters come from `generate`.
    Returns ids [batch, prompt + new], or with return_dict_in_generate a GenerateDecoderOnlyOutput.
    Raises BastionError for whatever of `generate` it does not honour.
    """
    call = _call_of_generate()
    streamer = streamer or call.get("streamer")
    _check(model, generation_config, call, bool(synced_gpus), model_kwargs)
    writer = _writer(model, drafter, policy)
    padded = _padded(input_ids, model_kwargs)
    batch = len(input_ids)
    pad_token = _pad_token(generation_config, stopping_criteria, batch)
    max_length = stopping_criteria.max_length or generation_config.max_length
    longest, context = max_length - min(padded), writer.target.max_context
    if longest > context:
        raise BastionError(
            f"{writer.target.name} has a context of {context}, but prompt and text may become {longest} tokens long: "
            "set a smaller max_new_tokens"
        )
    wants_dict = bool(generation_config.return_dict_in_generate)
    hooks = [
        RowProcessors(
            logits_processor,
            input_ids[row, :padding],
            row,
            batch,
            keep_logits=wants_dict and bool(generation_config.output_logits),
            keep_scores=wants_dict and bool(generation_config.output_scores),
        )
        for row, padding in enumerate(padded)
    ]
    streams = [
        RowStream(stopping_criteria, prompt, max_length - len(prompt), hook)
        for prompt, hook in zip(input_ids, hooks, strict=True)
    ]
    generations = [
        _generation(writer, prompt[padding:].tolist(), stream, hook, generation_config)
        for prompt, padding, stream, hook in zip(input_ids, padded, streams, hooks, strict=True)
    ]
    columns: list[list[int]] = []
    for _ in decode(writer.target, writer.drafter, writer.policy, generations):
        while (tokens := column(streams, len(columns), pad_token)) is not None:
            columns.append(tokens)
            if streamer is not None:
                streamer.put(torch.tensor(tokens))
    if streamer is not None:
        streamer.end()
    sequences = torch.cat((input_ids, input_ids.new_tensor(columns).T), 1)
    if not wants_dict:
        return sequences
    lengths = [len(stream.tokens) for stream in streams]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=stacked([hook.scores for hook in hooks], lengths) if generation_config.output_scores else None,
        logits=stacked([hook.logits for hook in hooks], lengths) if generation_config.output_logits else None,
    )


def _call_of_generate() -> dict[str, Any]:
    """The local variables of the running `generate`; empty if there is none.

    transformers (5.24) hands a callable neither streamer nor assistant model nor synced_gpus, and does not say so. To
    a streamer it gives the prompt alone, so that whoever waits for the text waits for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _check(
    model: Any, config: GenerationConfig, call: dict[str, Any], synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    """Raise BastionError for what is not honoured."""
    if model.training:
        raise BastionError("the model is in training mode: call model.eval() first")
    if is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled():
        raise BastionError("the model is spread over processes by FSDP or ZeRO-3: gather it in each process first")
    mode = config.get_generation_mode(call.get("assistant_model"))
    if mode not in MODES:
        raise BastionError(f"custom_generate does greedy search and sampling, not {mode.value.replace('_', ' ')}")
    settings = [name for name in vars(GenerationConfig()) if name not in HONOURED and not name.startswith("_")]
    refused = [name for name in settings if getattr(config, name, None)]
    if getattr(config, "cache_implementation", None) == "dynamic":
        refused.remove("cache_implementation")
    if config.use_cache is False:
        refused.append("use_cache=False")
    if synced_gpus or call.get("synced_gpus"):
        refused.append("synced_gpus")
    given = call.get("kwargs", {})
    refused += [name for name in CACHE_KEYWORDS if given.get(name) is not None]
    refused += [name for name, value in model_kwargs.items() if value is not None and name not in PREPARED]
    if refused and not model.config.is_encoder_decoder:  # those are refused as targets
        raise BastionError(f"custom_generate does not honour {', '.join(dict.fromkeys(refused))}: leave it out")


def _padded(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """The number of padding tokens at the left of each row.

    Raises BastionError for other masks, and for positions that do not count from the first token.
    """
    given = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if given is None else given != 0
    if mask.shape != input_ids.shape or not mask[:, -1].all() or (mask[:, 1:] < mask[:, :-1]).any():
        raise BastionError("attention_mask may only hide padding at the left: set padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        shown = mask if given is not None else mask[:1]  # without a mask transformers may give one row for all
        if positions.shape[-1] != shown.shape[1] or ((positions != shown.cumsum(-1) - 1) & shown).any():
            raise BastionError("position_ids must count each row's tokens from 0: leave them out")
    return [int(count) for count in (~mask).sum(1)]


def _pad_token(config: GenerationConfig, criteria: StoppingCriteriaList, batch: int) -> int:
    """What stands behind a text that ended before the others of its batch.

    Raises BastionError for criteria that end texts at different lengths where `generate` would write on behind them.
    """
    if batch == 1 or all(isinstance(criterion, MaxLengthCriteria) for criterion in criteria):
        return 0  # all texts end together, so it is never written
    token: Tensor | None = config._pad_token_tensor
    if token is None or not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        raise BastionError("stopping criteria in a batch need an eos_token_id and a pad_token_id: set both")
    return int(token)


def _generation(
    writer: Model, prompt: list[int], stream: RowStream, hook: RowProcessors, config: GenerationConfig
) -> Generation:
    sampled = bool(config.do_sample)
    parameters = SamplingParameters(
        temperature=float(sampled),  # the config's own is one of the processors
        seed=int(torch.randint(2**63 - 1, ())) if sampled else None,
        processors=[hook] if hook.needed else [],
    )
    generation = writer.begin(prompt, parameters, stream)
    generation.draft.temperature = float(config.temperature or 1.0) if sampled else 0.0
    return generation


def _writer(model: Any, drafter: str | Path | Drafter, policy: str | BudgetPolicy) -> Model:
    """The model behind our `Target` protocol with its drafter and policy; kept if both have names."""
    check_drafter(drafter)
    state = _state(model)
    wrapped = _WRAPPED.get(model)
    if wrapped is None or wrapped.state != state:
        wrapped = _WRAPPED[model] = Wrapped(state, _wrap(model))
    if not isinstance(drafter, str | Path):
        return Model(wrapped.target, None, drafter, policy)
    name = str(drafter)
    if name not in wrapped.drafters:
        wrapped.drafters[name] = load_drafter(drafter, wrapped.target)
    if not isinstance(policy, str):
        return Model(wrapped.target, None, wrapped.drafters[name], policy)
    if (name, policy) not in wrapped.writers:
        wrapped.writers[name, policy] = Model(wrapped.target, None, wrapped.drafters[name], policy)
    return wrapped.writers[name, policy]


def _state(model: Any) -> tuple[Any, ...]:
    weight = model.get_input_embeddings().weight
    return weight.device, tuple(weight.shape), model.dtype, getattr(model.config, "_attn_implementation", None)


def _wrap(model: Any) -> HuggingFaceTarget:
    name = str(model.name_or_path or type(model).__name__)
    parts = [(part, tuple(weight.shape), str(weight.dtype)) for part, weight in model.named_parameters()]
    digest = hashlib.sha256(f"{type(model).__name__} {parts}".encode()).hexdigest()  # what decides its cost
    target = HuggingFaceTarget(model, name, digest)
    target.model = weakref.proxy(model)  # what is kept about a model must not keep it alive
    if target.tree_support != "tree":
        can = "chains, not trees" if target.tree_support == "chain" else "no drafts, so decoding is plain"
        warnings.warn(f"bastion: {name} verifies {can}: {target.tree_support_reason}", stacklevel=2)
    return target

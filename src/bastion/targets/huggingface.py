"""Any causal language model of transformers, through its own forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bastion.errors import BastionError
from bastion.layers.linear import Linear
from bastion.targets.base import Rows, TreeSupport, Verification
from bastion.targets.hf_cache import ModelCache, TreeCache, obstacle_to_chains, obstacle_to_trees
from bastion.targets.hf_support import max_context, model_shape

CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")  # newest first; transformers renamed it in 5.x

# The check at construction. Small ids are ordinary tokens in every vocabulary, never image placeholders.
# Text one is a b c d f, text two a b c e g; as a tree: c is the root, d and e its children, f a child of d.
PREFIX, ROOT, D, E, F, G = (3, 5), 7, 11, 13, 17, 19
TREE = ((1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 1, 0, 1))  # rows c, d, e, f
# A state may have little influence: only a longer text and a strict limit show whether several rows read it.
STATE_TEXT, STATE_ROWS, STATE_LIMIT = (*PREFIX, ROOT, D, F, E, G) * 4, 4, 1e-5


class HuggingFaceTarget:
    """A loaded `PreTrainedModel` behind the `Target` protocol: one forward pass of the model a sequence.

    `tree_support` is found out at construction, from the kinds of cache the model's layers need and from a
    few short forward passes that compare a tree, and a rolled-back chain, with plain forward passes of the
    model; `tree_support_reason` says in words what decided. With "none" every row must be committed, and new
    tokens behind a committed prefix are run one at a time, unless the passes at construction showed that the
    model reads several behind a state.
    """

    def __init__(self, model: Any, name: str, digest: str):
        """Wrap `model` and switch it to evaluation mode.

        Raises BastionError for encoder-decoder models, for models without a language-model head or without a
        cache, and if a first forward pass fails or gives logits that are not finite.
        """
        if model.config.is_encoder_decoder:
            raise BastionError(f"{name} is an encoder-decoder model; choose a decoder-only one")
        if model.get_output_embeddings() is None:
            raise BastionError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
        self._parameters = inspect.signature(model.forward).parameters
        keyword = next((word for word in CACHE_KEYWORDS if word in self._parameters), None)
        if keyword is None:
            raise BastionError(f"{name} takes no transformers cache; choose a model that does")
        self._cache_keyword = keyword
        self.model = model.eval()
        self.attention = str(getattr(model.config, "_attn_implementation", "its own"))
        self.name, self.digest = name, digest
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        self.shape = model_shape(config)
        self.max_context = max_context(config)
        self._feature_layers: tuple[int, ...] = ()
        self._reduced_head: tuple[Tensor, Linear] | None = None
        self.tree_support: TreeSupport = "tree"
        self._reads_behind_state = True
        try:
            self.tree_support_reason = self._find_tree_support()
        except BastionError:
            raise
        except Exception as error:  # whatever a model's code says
            raise BastionError(
                f"a first forward pass of {name} failed: {_one_line(error)}; try another dtype or device, or "
                "choose another model"
            ) from error

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Ids of the layers whose outputs are the features."""
        return self._feature_layers

    def set_feature_layers(self, layers: Sequence[int]) -> None:
        """Choose the feature layers.

        Raises BastionError for an id that the model does not have, and for the last layer: transformers only
        gives its output after the final norm.
        """
        last = self.shape.layers - 1
        for layer in layers:
            if layer == last:
                raise BastionError(
                    f"{self.name}: transformers gives no output of the last layer ({last}); use lower ones"
                )
            if not 0 <= layer < last:
                raise BastionError(f"{self.name} has layers 0 to {last}, not {layer}")
        self._feature_layers = tuple(layers)

    def new_cache(self, capacity: int = 0) -> TreeCache | ModelCache:
        """An empty cache; room for `capacity` tokens is kept where trees are supported."""
        if self.tree_support == "tree":
            return TreeCache(self.model.config, capacity)
        return ModelCache(self.model.config, can_roll_back=self.tree_support == "chain")

    @torch.inference_mode()
    def forward(self, rows: list[Rows]) -> list[Verification]:
        """One forward pass of the model for each sequence.

        Raises BastionError for a tree where `tree_support` is not "tree", and for pending rows that were not
        committed where it is "none".
        """
        return [self._run(one) for one in rows]

    def _run(self, rows: Rows) -> Verification:
        cache, visible = rows.cache, rows.visible
        cache.forget()
        if visible is not None and self.tree_support != "tree":
            if not torch.equal(visible, torch.ones_like(visible).tril()):
                raise BastionError(f"{self.name} cannot verify trees: {self.tree_support_reason}")
            visible = None
        if cache.length and len(rows.tokens) > 1 and not self._reads_behind_state:
            verification = self._one_by_one(rows)
        else:
            verification = self._pass(rows, visible)
        cache.pending = len(rows.tokens)
        return verification

    def _one_by_one(self, rows: Rows) -> Verification:
        single = [
            self._pass(Rows(rows.tokens[i : i + 1], rows.positions[i : i + 1], rows.cache), None)
            for i in range(len(rows.tokens))
        ]
        logits = torch.cat([one.logits for one in single])[rows.first_logit :]
        features = [one.features for one in single if one.features is not None]
        return Verification(logits, torch.cat(features) if features else None)

    def _pass(self, rows: Rows, visible: Tensor | None) -> Verification:
        """The model's forward for `rows`, with `visible` as the mask among them (None: causal)."""
        wanted = len(rows.tokens) - rows.first_logit
        arguments: dict[str, Any] = {
            "input_ids": rows.tokens[None],
            "use_cache": True,
            "return_dict": True,
            self._cache_keyword: rows.cache.states,
        }
        if "position_ids" in self._parameters:
            arguments["position_ids"] = rows.positions[None]
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = max(wanted, 1)  # 0 means all of them
        if visible is not None:
            arguments["attention_mask"] = self._mask(visible, rows.cache.length)
        if self._feature_layers:
            chosen = [layer + 1 for layer in self._feature_layers]
            arguments["output_hidden_states"] = chosen if self._states_by_index else True
        output = self.model(**arguments)
        logits = output.logits[0]
        features = None
        if self._feature_layers:
            states = [output.hidden_states[layer + 1][0].to(self.device) for layer in self._feature_layers]
            features = torch.cat(states, -1)
        return Verification(logits[len(logits) - wanted :].to(self.device), features)

    def _mask(self, visible: Tensor, length: int) -> Tensor:
        """Additive mask [1, 1, n, length + n]: eager attention takes no other, and sdpa takes it too."""
        rows = len(visible)
        mask = torch.zeros(rows, length + rows, dtype=self.dtype, device=self.device)
        mask[:, length:].masked_fill_(~visible, torch.finfo(self.dtype).min)
        return mask[None, None]

    @torch.inference_mode()
    def commit(self, cache: TreeCache | ModelCache, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes`. Raises BastionError for rows that `tree_support` does not allow."""
        cache.commit(nodes)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., hidden] of the input embedding module (Gemma-2 scales them later)."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    @torch.no_grad()
    def head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits [..., vocab] of hidden [..., hidden] that already went through a final norm.

        Raises BastionError if the model scales or caps its logits after the head (Gemma-2, Cohere, Granite):
        a drafter that shares the head would not draw from the distribution it means.
        """
        if not self._head_gives_logits:
            raise BastionError(
                f"{self.name} changes its logits after the head, so drafters cannot share it; "
                "use a drafter with a head of its own"
            )
        module = self.model.get_output_embeddings()
        if token_ids is None:
            logits: Tensor = module(hidden)
            return logits
        if self._reduced_head is None or self._reduced_head[0] is not token_ids:
            bias = None if module.bias is None else module.bias[token_ids]
            self._reduced_head = token_ids, Linear(module.weight[token_ids], bias)
        return self._reduced_head[1](hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def _find_tree_support(self) -> str:
        """Set `tree_support` and what else only a forward pass tells; returns the reason in words."""
        first, states = self._plain((*PREFIX, ROOT, D, F), True)
        second, chosen = self._plain((*PREFIX, ROOT, E, G), [1])
        if not first.isfinite().all():
            raise BastionError(
                f"{self.name} gives logits that are not finite in {str(self.dtype).removeprefix('torch.')}: load it "
                "with another dtype, float32 or bfloat16"
            )
        head = self.model.get_output_embeddings()
        self._head_gives_logits = bool(states) and self._agree(head(states[-1][0]), first)
        # In some versions a list of hidden states counts from the first layer, not from the embeddings.
        self._states_by_index = (
            bool(states and chosen)
            and chosen[1] is not None
            and self._agree(chosen[1][0, :3], states[1][0, :3])  # a b c, which both texts begin with
        )
        in_tree = torch.stack((first[2], first[3], second[3], first[4], second[4]))
        in_chains = torch.cat((first[2:], second[3:]))
        no_tree = obstacle_to_trees(self.model.config, self.max_context) or self._try("tree", self._tree, in_tree)
        if no_tree is None:
            return "every layer sees the whole context, and a test tree agreed with plain forward passes"
        self.tree_support = "chain"
        no_chain = self._try("chain", self._chains, in_chains)
        if no_chain is None:
            return no_tree
        self.tree_support = "none"
        after_state = self._plain(STATE_TEXT, False)[0][-STATE_ROWS:]
        self._reads_behind_state = self._try("piece", self._piece, after_state, STATE_LIMIT) is None
        return f"{no_tree}; {no_chain}"

    def _plain(self, text: Sequence[int], states: bool | list[int]) -> tuple[Tensor, Any]:
        """Logits [n, vocab] of a text without a cache, and its hidden states, if the model gives them."""
        tokens = torch.tensor([self._ids(text)], device=self.device)
        output = self.model(input_ids=tokens, use_cache=False, return_dict=True, output_hidden_states=states)
        return output.logits[0].to(self.device), getattr(output, "hidden_states", None)

    def _try(self, what: str, decode: Callable[[], Tensor], expected: Tensor, limit: float | None = None) -> str | None:
        """What is wrong with the logits of the `what` that `decode` runs; None if they equal `expected`."""
        try:
            agreed = self._agree(decode(), expected, limit)
        except BastionError as error:
            return str(error)
        except Exception as error:  # whatever a model's code says to a mask or a cache that it does not know
            return f"a test {what} failed: {_one_line(error)}"
        return None if agreed else f"the logits of a test {what} differ from those of plain forward passes"

    def _tree(self) -> Tensor:
        """Logits of c, d, e, f, checked as a tree, and of g after c and e are kept."""
        cache = self._cache_with_prefix()
        visible = torch.tensor(TREE, dtype=torch.bool, device=self.device)
        tree = self._check_rows((ROOT, D, E, F), (2, 3, 3, 4), cache, visible)
        self.commit(cache, (0, 2))
        return torch.cat((tree, self._check_rows((G,), (4,), cache)))

    def _chains(self) -> Tensor:
        """Logits of c, d, f, and of e, g after c is kept."""
        cache = self._cache_with_prefix()
        if obstacle := obstacle_to_chains(cache):
            raise BastionError(obstacle)
        chain = self._check_rows((ROOT, D, F), (2, 3, 4), cache)
        self.commit(cache, (0,))
        return torch.cat((chain, self._check_rows((E, G), (3, 4), cache)))

    def _piece(self) -> Tensor:
        """Logits of the last rows of the text for states, run together behind the others."""
        start = len(STATE_TEXT) - STATE_ROWS
        cache = self._cache_with_prefix(STATE_TEXT[:start])
        return self._check_rows(STATE_TEXT[start:], range(start, len(STATE_TEXT)), cache)

    def _cache_with_prefix(self, prefix: Sequence[int] = PREFIX) -> Any:
        cache = self.new_cache()
        self._check_rows(prefix, range(len(prefix)), cache)
        self.commit(cache, range(len(prefix)))
        return cache

    def _check_rows(
        self, text: Sequence[int], positions: Sequence[int], cache: Any, visible: Tensor | None = None
    ) -> Tensor:
        tokens = torch.tensor(self._ids(text), device=self.device)
        rows = Rows(tokens, torch.tensor(positions, device=self.device), cache, visible)
        return self.forward([rows])[0].logits

    def _ids(self, text: Sequence[int]) -> list[int]:
        return [token % self.shape.vocab for token in text]

    def _agree(self, logits: Tensor, expected: Tensor, limit: float | None = None) -> bool:
        """Whether they differ by rounding only, measured by how `expected` varies over the vocabulary."""
        if limit is None:
            limit = 0.1 if self.dtype in (torch.float16, torch.bfloat16) else 2e-3
        expected = expected.float()
        spread = (expected - expected.mean(-1, keepdim=True)).norm()
        return bool((logits.to(expected.device).float() - expected).norm() <= limit * spread)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)

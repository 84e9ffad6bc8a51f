"""Small models made on the spot."""

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bastion.decoding.loop import Generation
from bastion.decoding.sampling import Sampler, SamplingParameters
from bastion.decoding.stopping import StopRules, TextStream
from bastion.drafters.base import DraftContext
from bastion.drafters.marginal import MarginalProposal
from bastion.targets.base import ModelShape, Verification
from bastion.targets.decoder import DecoderTarget

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
CPU = torch.device("cpu")


def make_model(family="llama", **changes):
    """A random transformers model with large enough weights that its logits differ clearly."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 72,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    model_class, config_class = FAMILIES[family]
    if family == "mistral":
        sizes["sliding_window"] = None
    model = model_class(config_class(**(sizes | changes))).eval()
    for name, weight in model.state_dict().items():
        if name.endswith("norm.weight"):
            weight.normal_(1.0, 0.1)
        else:
            weight.normal_(0.0, 0.1 if weight.dim() > 1 else 0.5)
    return model


def make_target(model=None, dtype=torch.float32, **changes):
    """The lean decoder with the weights of a transformers model."""
    model = model or make_model(**changes)
    return DecoderTarget(model.config, model.state_dict().get, CPU, dtype, "tiny", "digest")


def generation(target, prompt, max_new_tokens=32, eos=(), **sampling):
    """A text that is to be written."""
    parameters = SamplingParameters(**sampling)
    stream = TextStream(None, StopRules(max_new_tokens, frozenset(eos)))
    return Generation(
        DraftContext(list(prompt), parameters.temperature), target.new_cache(), Sampler(parameters), stream
    )


class TableCache:
    """Counts tokens; a table target needs no more."""

    length = 0


class TableTarget:
    """A first-order Markov chain as a target: the logits of a row depend on its token."""

    tree_support = "tree"
    device, dtype, name, digest, max_context, feature_layers = CPU, torch.float32, "table", "table", 10**6, ()

    def __init__(self, logits: Tensor):
        self.logits = logits
        self.shape = ModelShape(1, 1, 1, 1, 1, 1, len(logits))

    def new_cache(self, capacity=0):
        return TableCache()

    def set_feature_layers(self, layers):
        assert not layers

    def forward(self, rows):
        return [Verification(self.logits[row.tokens[row.first_logit :]], None) for row in rows]

    def commit(self, cache, nodes):
        cache.length += len(nodes)


class FixedDrafter:
    """Proposes the same marginals in every round."""

    name, digest, feature_layers = "fixed", "fixed", ()

    def __init__(self, log_probs: Tensor):
        self.log_probs, self.depth = log_probs, len(log_probs)

    def propose(self, contexts):
        return [MarginalProposal(self.log_probs) for _ in contexts]


class LinearCost:
    """A VerifyCost: a constant and so much a row."""

    def __init__(self, constant, slope):
        self.constant, self.slope = constant, slope

    def seconds(self, rows, context):
        return self.constant + self.slope * rows

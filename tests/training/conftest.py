"""The toy target and texts of the training tests."""

import pytest
import torch

from bastion.training.features import compute_features
from bastion.training.ingredients import target_layers
from tiny import make_target
from training_support import counting


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    """A random target and texts to learn, with their features."""
    torch.manual_seed(0)
    target = make_target()
    conversations = [counting(30, start) for start in range(80)]
    folder = tmp_path_factory.mktemp("features")
    layers = target_layers(target.shape.layers)
    return target, conversations, compute_features(target, conversations, layers, folder, ranked=True)

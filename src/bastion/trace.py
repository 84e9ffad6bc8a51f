"""One JSON line a round: what one needs to see why a run is slow."""

from __future__ import annotations

import json
from typing import TextIO

import numpy as np

from bastion.decoding.budget import Throughput
from bastion.decoding.stats import RoundRecord
from bastion.model import Model
from bastion.policies import describe


class TraceWriter:
    """Writes the record of each round to an open file."""

    def __init__(self, file: TextIO, model: Model):
        self.file, self.tokenizer, self.model = file, model.tokenizer, model
        self.round = 0

    def __call__(self, record: RoundRecord) -> None:
        """Write one line: the tree's nodes, the accepted path, predicted and measured seconds."""
        tree = record.tree
        columns = (tree.tokens, tree.parents, tree.depths, np.exp(tree.log_probs))
        nodes = [
            {
                "token": token,
                "text": self.tokenizer.decode([token]),
                "parent": parent,
                "depth": depth,
                "probability": p,
            }
            for token, parent, depth, p in zip(*(column.tolist() for column in columns), strict=True)
        ]
        line = {
            "round": self.round,
            "policy": describe(self.model.policy),
            "context": record.context,
            "tree": nodes,
            "accepted": record.accepted,
            "tokens": record.tokens,
            "text": self.tokenizer.decode(record.tokens),
            "expected_length": 1 + float(tree.gains.sum()),
            "predicted_seconds": self._predicted(record),
            "seconds": record.seconds,
        }
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()
        self.round += 1

    def _predicted(self, record: RoundRecord) -> dict[str, float] | None:
        policy = self.model.policy
        if not isinstance(policy, Throughput):
            return None
        cost = policy.cost
        verify = cost.verify.seconds(np.array([record.tree.size + 1]), record.context)
        return {"draft": cost.drafting(record.passes), "verify": float(verify[0]), "auxiliary": cost.auxiliary}

"""One JSON line a round: what one needs to see why a run is slow."""

from __future__ import annotations

import json
from typing import Any, TextIO

import numpy as np

from bastion.decoding.budget import BudgetPolicy, Throughput
from bastion.decoding.stats import RoundRecord


class TraceWriter:
    """Writes the record of each round to an open file."""

    def __init__(self, file: TextIO, tokenizer: Any, policy: BudgetPolicy):
        self.file, self.tokenizer, self.policy = file, tokenizer, policy
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
        if not isinstance(self.policy, Throughput):
            return None
        cost = self.policy.cost
        verify = cost.verify.seconds(np.array([record.tree.size + 1]), record.context)
        return {"draft": cost.draft, "verify": float(verify[0]), "auxiliary": cost.auxiliary}

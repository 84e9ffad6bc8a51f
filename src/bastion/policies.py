"""Budget policies by name."""

from __future__ import annotations

from collections.abc import Callable

from bastion.cost.fit import choose
from bastion.cost.store import Calibration
from bastion.decoding.budget import BudgetPolicy, Chain, FixedBudget, Plain, RoundCost, Throughput
from bastion.errors import BastionError

INDIFFERENCE = 0.02  # costs are known no better, and a maximum over noise picks what only looks good
LARGEST = 4096  # nodes; a typo should not ask for terabytes
NAMES = ("plain", "chain", "fixed", "roofline", "profile", "auto")


def parse(spec: str) -> tuple[str, int | None]:
    """Name and budget of "name" or "name:budget", with the budget in nodes, root not counted.

    plain: no drafting. chain[:n]: the drafter's best chain, cut to n. fixed:n: always n nodes (DDTree).
    roofline, profile, auto [:n]: the size with the highest expected throughput, never above n, by the calibrated
    roofline (BASTION), by the measured profile (CaDDTree), or by the one of them that predicts better here. With `auto`
    texts rest from drafts that do not pay.

    Raises BastionError for a spec that is not one of these.
    """
    name, separator, number = spec.partition(":")
    if name not in NAMES:
        raise BastionError(f"unknown policy {name!r}: use {', '.join(NAMES)}, with a budget as in fixed:32")
    if separator and not (number.isdecimal() and len(number) <= 9 and 1 <= int(number) <= LARGEST):
        raise BastionError(f"the budget of policy {spec[:40]!r} must be a number of nodes, 1 to {LARGEST}")
    budget = int(number) if separator else None
    if name == "plain" and budget is not None:
        raise BastionError("policy 'plain' drafts nothing, so it takes no budget")
    if name == "fixed" and budget is None:
        raise BastionError("policy 'fixed' needs a budget, for example fixed:32")
    return name, budget


def make_policy(spec: str, calibration: Callable[[], Calibration]) -> BudgetPolicy:
    """The policy that `spec` names (see `parse`). `calibration` is called only if the policy needs one."""
    name, budget = parse(spec)
    if name == "plain":
        return Plain()
    if name == "chain":
        return Chain() if budget is None else Chain(budget)
    if name == "fixed" and budget is not None:
        return FixedBudget(budget)
    measured = calibration()
    model = choose(measured.errors) if name == "auto" else name
    verify = measured.roofline if model == "roofline" else measured.profile
    largest = max(m.rows for m in measured.measurements) - 1  # beyond it nothing was measured
    cost = RoundCost(verify, measured.draft_seconds, measured.aux_seconds, measured.deepen_seconds)
    most = min(largest, budget or largest)
    return Throughput(cost, most, indifference=INDIFFERENCE, model=model, rests=name == "auto")


def describe(policy: BudgetPolicy) -> str:
    """What a policy in use is, in the words of `parse`, with "auto" resolved."""
    shape = ", chains only" if policy.width == 1 and not isinstance(policy, Chain) else ""
    match policy:
        case Plain():
            return "plain"
        case Chain() | FixedBudget():
            return f"{'chain' if isinstance(policy, Chain) else 'fixed'}:{policy.max_nodes}{shape}"
        case Throughput():
            return f"{policy.model}:{policy.max_nodes}{shape}"
    return type(policy).__name__ + shape

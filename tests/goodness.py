"""Whether what was drawn has the distribution that it should have."""

from scipy.stats import chisquare


def p_value(counts, joint):
    """How well counted texts fit the probabilities of all texts (chi-square); texts expected under 5 times are one."""
    assert not [path for path in counts if joint[path] == 0], "a token outside the nucleus was written"
    samples = sum(counts.values())
    frequent = [path for path, p in joint.items() if p * samples >= 5]
    observed = [counts[path] for path in frequent]
    expected = [joint[path] * samples for path in frequent]
    rest = samples - sum(observed), samples - sum(expected)
    if rest[1] > 1:
        observed, expected = [*observed, rest[0]], [*expected, rest[1]]
    scale = sum(observed) / sum(expected)
    return chisquare(observed, [e * scale for e in expected]).pvalue

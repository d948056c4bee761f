"""What the difference of two runs means for the next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LogitComparison:
    """Two distributions of the next token at each position; arrays [B, T], NaN at padding.

    `kl` is KL(other ‖ trace) in nats, `agree` whether the likeliest token is the same, `logprob`
    the trace's log-probability of the other side's likeliest token less the other side's own.
    """

    kl: np.ndarray
    agree: np.ndarray
    logprob: np.ndarray
    real: np.ndarray

    @property
    def mean_kl(self) -> float:
        """Over the real positions."""
        return float(self.kl[self.real].mean()) if self.real.any() else 0.0

    @property
    def max_kl(self) -> float:
        """Over the real positions."""
        return float(self.kl[self.real].max(initial=0))

    @property
    def median_kl(self) -> float:
        """Over the real positions."""
        return float(np.median(self.kl[self.real])) if self.real.any() else 0.0

    @property
    def top1(self) -> float:
        """The share of real positions that agree on the likeliest token."""
        return float(self.agree[self.real].mean()) if self.real.any() else 1.0

    @property
    def max_logprob(self) -> float:
        """The largest difference of a log-probability, without its sign."""
        return float(np.abs(self.logprob[self.real]).max(initial=0))


def compare_logits(trace: np.ndarray, other: np.ndarray, real: np.ndarray) -> LogitComparison:
    """Compare logits [B, T, vocab] where `real` [B, T]."""
    kl, logprob = np.full(real.shape, np.nan), np.full(real.shape, np.nan)
    agree = np.zeros(real.shape, bool)
    for at in map(tuple, np.argwhere(real)):
        log_p, log_q = _log_softmax(trace[at]), _log_softmax(other[at])
        q = np.exp(log_q)
        # Where q is 0 it weighs nothing, however unlikely the trace finds the token.
        terms = np.where(q > 0, q * (log_q - log_p), 0)
        kl[at] = max(0.0, terms.sum())
        top = int(log_q.argmax())
        agree[at] = int(log_p.argmax()) == top
        logprob[at] = log_p[top] - log_q[top]
    return LogitComparison(kl, agree, logprob, real)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = x - x.max()
        return x - np.log(np.exp(x).sum())

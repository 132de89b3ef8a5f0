"""Is a hit cheaper than computing? Learned from this engine's own loads and steps.

A load of n tokens takes about ``fixed + n * slope`` seconds from its order to its
report, polling included. Computing them takes n times what a further token costs in
a step: the step itself runs anyway, since a hit always leaves a token to compute.
A hit is taken when the first is not more than the second. Until there are a few
samples of both every hit is taken; a refused one is taken now and then all the
same, so that a store that has become faster is noticed.

Pure: times come in.
"""

from __future__ import annotations

__all__ = ["CostModel", "Line"]

_DECAY = 0.97  # about the last 30 samples count
_SAMPLES = 4  # as many of both before anything is refused
_PREFILL_TOKENS = 64  # a step with more new tokens than this says what a token costs
_EXPLORE = 32  # one in so many refused hits is taken
_OUTLIER = 8.0  # a sample counts at most so many times what was expected
NEVER = 1 << 30


class Line:
    """A decayed least-squares line through (tokens, seconds)."""

    __slots__ = ("_n", "_t", "_w", "_xt", "_xx", "samples")

    def __init__(self) -> None:
        self._w = self._n = self._t = self._xx = self._xt = 0.0
        self.samples = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Takes a sample."""
        if self.samples >= _SAMPLES:
            seconds = min(seconds, _OUTLIER * max(self.at(tokens), 1e-4))
        self._w = self._w * _DECAY + 1
        self._n = self._n * _DECAY + tokens
        self._t = self._t * _DECAY + seconds
        self._xx = self._xx * _DECAY + tokens * tokens
        self._xt = self._xt * _DECAY + tokens * seconds
        self.samples += 1

    def parts(self) -> tuple[float, float]:
        """(seconds of nothing, seconds a token); (mean, 0) while all samples are of about one size."""
        if not self.samples:
            return 0.0, 0.0
        n, t = self._n / self._w, self._t / self._w
        variance = self._xx / self._w - n * n
        if variance <= (0.1 * n) ** 2:
            return t, 0.0
        slope = max(0.0, (self._xt / self._w - n * t) / variance)
        fixed = t - slope * n
        return (fixed, slope) if fixed >= 0 else (0.0, t / n)

    def at(self, tokens: float) -> float:
        """Seconds expected for so many tokens."""
        fixed, slope = self.parts()
        if slope == 0.0 and self.samples:
            # Samples of one size say nothing about longer ones: those take longer in proportion.
            return fixed * max(1.0, tokens / (self._n / self._w))
        return fixed + slope * tokens


class CostModel:
    """Decides about hits. fixed_tokens: the operator's minimum, which ends the learning; None learns."""

    def __init__(self, fixed_tokens: int | None = None) -> None:
        self._fixed = fixed_tokens
        self._loads = Line()
        self._step = 0.0  # seconds of a step with hardly a new token
        self._steps = 0
        self._prefill_seconds = self._prefill_tokens = 0.0
        self._prefills = 0
        self._refused = 0

    def step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens and took so long."""
        if seconds <= 0 or tokens <= 0:
            return
        if tokens < _PREFILL_TOKENS:
            seconds = seconds if self._steps < _SAMPLES else min(seconds, _OUTLIER * self._step)
            self._steps += 1
            self._step += (seconds - self._step) / min(self._steps, 32)
            return
        if self._prefills >= _SAMPLES:
            seconds = min(seconds, self._step + _OUTLIER * tokens * self.seconds_per_token)
        more = max(seconds - self._step, 0.05 * seconds)
        self._prefill_seconds = self._prefill_seconds * _DECAY + more
        self._prefill_tokens = self._prefill_tokens * _DECAY + tokens
        self._prefills += 1

    def load(self, tokens: int, seconds: float) -> None:
        """A load of so many tokens was reported so long after its order."""
        if seconds > 0 and tokens > 0:
            self._loads.add(tokens, seconds)

    @property
    def seconds_per_token(self) -> float:
        """What computing a further token of a prompt costs; 0 while unknown."""
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0

    @property
    def min_hit_tokens(self) -> int:
        """The shortest hit that is worth a load, as known now."""
        if self._fixed is not None:
            return self._fixed
        if self._prefills < _SAMPLES or self._loads.samples < _SAMPLES:
            return 0
        fixed, slope = self._loads.parts()
        token = self.seconds_per_token
        if token * NEVER <= self._loads.at(NEVER):
            return NEVER
        return min(NEVER, int(fixed / (token - slope)) + 1) if token > slope else NEVER

    def worth(self, tokens: int) -> bool:
        """Whether to load a hit of so many tokens."""
        if tokens >= self.min_hit_tokens:
            return True
        if self._fixed is None:
            self._refused += 1
            if self._refused >= _EXPLORE:
                self._refused = 0
                return True
        return False

"""Reports: what a simulation says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .measures import Measures
from .replica import Replica


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of all replicas together. Times are seconds, NaN where there is nothing to tell them by.

    Attributes:
        replicas: engines, one device each.
        requests, refused: those that were answered, and those that no engine could or would take.
        prompt_tokens, output_tokens: of the former.
        seconds: from the first arrival to the last token.
        first_token_p50, first_token_p99: from a request's arrival to its first token.
        inter_token_p50, inter_token_p99: from a token to the next one of its request.
        cached_share: share of the prompt tokens that admissions found in the prefix cache; of a preempted sample what
            it had computed counts, too, so it may exceed what prompts share.
        preemptions: samples that lost their place, each as often as that happened.
        steps: of all engines.
        busy_share: share of the time in which the devices ran a step.
        measures: what it was made from.
    """

    replicas: int
    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token_p50: float
    first_token_p99: float
    inter_token_p50: float
    inter_token_p99: float
    cached_share: float
    preemptions: int
    steps: int
    busy_share: float
    measures: Measures

    @classmethod
    def of(cls, measures: Measures, engines: Sequence[Replica]) -> Report:
        stats = [engine.scheduler.stats() for engine in engines]
        begin, end = min(measures.arrived, default=0.0), max(measures.finished, default=0.0)
        first = measures.times_to_first_token()
        first_p50, first_p99 = np.percentile(first, [50, 99]).tolist() if len(first) else (np.nan, np.nan)
        inter_p50, inter_p99 = measures.gap_percentiles(50, 99)
        busy = sum(engine.clock.busy for engine in engines)
        return cls(
            replicas=len(engines),
            requests=len(measures.arrived),
            refused=measures.refused,
            prompt_tokens=measures.prompt_tokens,
            output_tokens=sum(measures.outputs),
            seconds=end - begin,
            first_token_p50=first_p50,
            first_token_p99=first_p99,
            inter_token_p50=inter_p50,
            inter_token_p99=inter_p99,
            cached_share=sum(s.prefix_hit_tokens for s in stats) / max(1, measures.prompt_tokens),
            preemptions=sum(s.preemptions for s in stats),
            steps=sum(s.steps for s in stats),
            busy_share=busy / (len(engines) * (end - begin)) if end > begin else 0.0,
            measures=measures,
        )

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours(self) -> float:
        """Every device counts from the first arrival to the last token."""
        return self.replicas * self.seconds / 3600

    def cost(self, price: float) -> float:
        """Of all, where an hour of a device costs `price`."""
        return price * self.gpu_hours

    def cost_per_million(self, price: float) -> float:
        """Of a million output tokens."""
        return 1e6 * self.cost(price) / self.output_tokens if self.output_tokens else float("nan")

    def meets(self, first_token: float | None, inter_token: float | None) -> bool:
        """Whether 99 of 100 wait no longer than that, and nobody was refused; None is any time."""
        return (
            not self.refused
            and (first_token is None or self.first_token_p99 <= first_token)
            and (inter_token is None or not self.inter_token_p99 > inter_token)
        )

"""How a sample ended; its output is made of that when somebody asks for it."""

from __future__ import annotations

from ..request import FinishReason, Sample
from .logprobs import LogprobLog
from .output import SampleOutput


class Ending:
    """What delivery knows of a sample that has ended.

    NOTE: delivery shares the interpreter with the loop, so it makes no output: whoever wants it does, in its own thread
    and once. The caller sees to it that two threads do not at the same time.

    Attributes:
        sample: as the loop left it; nobody changes it any more.
        text: the whole text, None without a tokenizer.
        log: what came with its tokens, None if the request asks for nothing of that.
        kept: tokens that the output keeps, where a stop string was found; None is all.
        untaken: no part of the output has been handed over yet.
    """

    __slots__ = ("_output", "kept", "log", "sample", "text", "untaken")

    def __init__(
        self,
        sample: Sample,
        text: str | None,
        log: LogprobLog | None = None,
        *,
        kept: int | None = None,
        untaken: bool = False,
    ) -> None:
        self.sample = sample
        self.text = text
        self.log = log
        self.kept = kept
        self.untaken = untaken
        self._output: SampleOutput | None = None

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.sample.finish_reason if self.kept is None else FinishReason.STOP
        assert reason is not None
        return reason

    @property
    def output(self) -> SampleOutput:
        """The sample's output, always the same object."""
        if self._output is None:
            self._output = self._make()
        return self._output

    def _make(self) -> SampleOutput:
        sample, request, log = self.sample, self.sample.request, self.log
        ids = sample.output[: self.kept].tolist()
        return SampleOutput(
            index=sample.index,
            token_ids=ids,
            text=self.text,
            finish_reason=self.finish_reason,
            error=sample.error if self.kept is None else None,
            seed=sample.seed,
            preemptions=sample.preemptions,
            timings=sample.timings,
            weight_versions=sample.weight_versions(self.kept),
            logprobs=log.output[: len(ids)] if log and request.params.logprobs is not None else None,
            cumulative_logprob=log.total(len(ids)) if log and request.terms.wanted_logprobs else None,
        )

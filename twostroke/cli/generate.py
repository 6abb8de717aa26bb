"""`twostroke generate`: answer the prompts given."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidRequest, counted, shown
from ..request import FinishReason
from .flags import EngineFlags, SamplingFlags, with_flags
from .prompts import Job, gather
from .pulse import pulse
from .streams import tell

if TYPE_CHECKING:
    from ..engine import Engine
    from ..text.handle import Handle
    from ..text.output import RequestOutput, SampleOutput, TokenLogprob

TOKEN_IDS = 'a line of --prompts-file FILE.jsonl: {"prompt": [1, 2, 3]}'


@with_flags
def generate(
    sampling: SamplingFlags,
    engine: EngineFlags,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue, or to answer with --chat; may be repeated.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="One prompt a line, empty lines skipped. JSON lines if it ends in .jsonl: a string, or an object with "
            '"prompt" (text or token ids) or "messages" (a chat), and sampling parameters of its own.'
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Make each prompt the user message of a chat.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt and line, in input order.")
    ] = False,
) -> None:
    """Answer prompts, all of them together."""
    jobs = gather(prompt or (), prompts_file, sampling.params(), chat)
    if not as_json:
        _refuse_logprobs(jobs)
    from .. import Engine

    with Engine(**engine.arguments()) as running:
        outputs = _answer(running, jobs, _JsonLines() if as_json else _Text(len(jobs) > 1, running.tokenizer is None))
    if any(sample.finish_reason == FinishReason.ERROR for output in outputs for sample in output.outputs):
        raise typer.Exit(1)


def _refuse_logprobs(jobs: Sequence[Job]) -> None:
    """Raise `InvalidRequest` for what only JSON shows."""
    for job in jobs:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(job.params, name)) is not None:
                raise InvalidRequest(f"{job.source}: {name}={shown(value)} needs --json: text shows none")


def _answer(engine: Engine, jobs: list[Job], printer: _JsonLines | _Text) -> list[RequestOutput]:
    """Submit every job, then print the outputs in input order, each as soon as its turn has come."""
    start = time.perf_counter()
    handles = [_submit(engine, job) for job in jobs]
    try:
        with pulse():
            outputs = [printer.show(index, handle) for index, handle in enumerate(handles)]
    except KeyboardInterrupt:
        for handle in handles:
            handle.cancel()
        raise
    printer.close(outputs, time.perf_counter() - start)
    return outputs


def _submit(engine: Engine, job: Job) -> Handle:
    try:
        return engine.submit(job.prompt, job.params)
    except InvalidRequest as error:
        text_without_tokenizer = engine.tokenizer is None and not isinstance(job.prompt, list)
        hint = f" ({TOKEN_IDS})" if text_without_tokenizer else ""
        raise InvalidRequest(f"{job.source}: {error}{hint}") from error


class _JsonLines:
    """Prints one object per prompt."""

    def show(self, index: int, handle: Handle) -> RequestOutput:
        output = handle.result()
        fields: dict[str, object] = {"index": index, "prompt_tokens": len(output.prompt_token_ids)}
        samples = [_fields(sample) for sample in output.outputs]
        fields |= {"outputs": samples} if len(samples) > 1 else samples[0]
        if output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [entry and _logprob(entry) for entry in output.prompt_logprobs]
        # NOTE: ASCII, since some readers of lines also split at U+0085 or U+2028, which JSON does not escape by itself.
        typer.echo(json.dumps(fields, ensure_ascii=True))
        return output

    def close(self, outputs: list[RequestOutput], seconds: float) -> None:
        """Nothing but the objects belongs on stdout."""


def _fields(sample: SampleOutput) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "seed": sample.seed,
    }
    if sample.logprobs is not None:
        fields["logprobs"] = [_logprob(entry) for entry in sample.logprobs]
    return fields if sample.error is None else {**fields, "error": sample.error}


def _logprob(entry: TokenLogprob) -> dict[str, object]:
    """JSON has no infinity: the log-probability of what is impossible is null."""
    fields: dict[str, object] = {
        "token_id": entry.token_id,
        "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
        "rank": entry.rank,
        "top": [{"token_id": token, "logprob": logprob} for token, logprob in entry.top.items()],
    }
    return fields if entry.sampling_logprob is None else {**fields, "sampling_logprob": entry.sampling_logprob}


class _Text:
    """Prints text as it arrives, each prompt's under its heading if there are several; several samples at their end.

    Args:
        headings: number the prompts.
        ids: print token ids, for a model without a tokenizer.
    """

    def __init__(self, headings: bool, ids: bool) -> None:
        self.headings = headings
        self.ids = ids

    def show(self, index: int, handle: Handle) -> RequestOutput:
        if len(handle.samples) > 1 or handle.sample.request.params.best_of:
            for sample in handle.result().outputs:
                typer.echo(f"--- {index + 1}.{sample.index + 1} ---")
                typer.echo(self._shown(sample.token_ids, sample.text))
        else:
            if self.headings:
                typer.echo(f"--- {index + 1} ---")
            try:
                for delta in handle:
                    typer.echo(self._shown(delta.token_ids, delta.text), nl=False)
            finally:  # what comes next, a shell's prompt or an error, begins a line
                typer.echo("\n" if self.headings else "")
        output = handle.result()
        for sample in output.outputs:
            if sample.error is not None:
                tell(f"twostroke: prompt {index + 1} ended with an error: {sample.error}")
        return output

    def _shown(self, ids: list[int], text: str | None) -> str:
        return "".join(f"{token} " for token in ids) if self.ids else text or ""

    def close(self, outputs: list[RequestOutput], seconds: float) -> None:
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        tell(f"{counted(tokens, 'token')} in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")

"""Flags that several commands share, as dataclasses: a field is a flag of the same name, with dashes."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import InvalidRequest, shown
from ..sampling_params import SamplingParams
from ..structured import StructuredOutput

DEFAULTS = SamplingParams()


def sampling_flag(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Sampling")


def engine_flag(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Engine")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """`SamplingParams` as flags, with its defaults."""

    max_tokens: Annotated[int | None, sampling_flag("Most tokens to generate.")] = DEFAULTS.max_tokens
    temperature: Annotated[float, sampling_flag("0 is greedy.")] = DEFAULTS.temperature
    top_k: Annotated[int, sampling_flag("Keep the k most likely tokens; 0 or -1 is off.")] = DEFAULTS.top_k
    top_p: Annotated[float, sampling_flag("Keep the most likely tokens up to this probability.")] = DEFAULTS.top_p
    min_p: Annotated[float, sampling_flag("Keep tokens at least this likely beside the best.")] = DEFAULTS.min_p
    typical_p: Annotated[float, sampling_flag("Keep the tokens of typical surprise up to this probability.")] = (
        DEFAULTS.typical_p
    )
    presence_penalty: Annotated[float, sampling_flag("Taken from the logits of tokens in the output.")] = (
        DEFAULTS.presence_penalty
    )
    frequency_penalty: Annotated[float, sampling_flag("The same, once for each time.")] = DEFAULTS.frequency_penalty
    repetition_penalty: Annotated[float, sampling_flag("Divides the logits of tokens in prompt and output.")] = (
        DEFAULTS.repetition_penalty
    )
    no_repeat_ngram_size: Annotated[int, sampling_flag("No so many tokens in a row come twice; 0 is off.")] = (
        DEFAULTS.no_repeat_ngram_size
    )
    logit_bias: Annotated[
        list[str] | None, sampling_flag("ID=NUMBER: added to the token's logit; may be repeated.", "--logit-bias")
    ] = None
    allowed_token_id: Annotated[
        list[int] | None, sampling_flag("A token id; all others are barred; may be repeated.", "--allowed-token-id")
    ] = None
    bad_word: Annotated[
        list[str] | None, sampling_flag("A word that must not come; may be repeated.", "--bad-word")
    ] = None
    seed: Annotated[int | None, sampling_flag("Key of every request's random numbers.")] = DEFAULTS.seed
    min_tokens: Annotated[int, sampling_flag("No stop token before this many tokens.")] = DEFAULTS.min_tokens
    ignore_eos: Annotated[bool, sampling_flag("Do not stop at the model's end-of-sequence tokens.", "--ignore-eos")] = (
        DEFAULTS.ignore_eos
    )
    stop_token_id: Annotated[
        list[int] | None, sampling_flag("A further token id that stops; may be repeated.", "--stop-token-id")
    ] = None
    stop: Annotated[list[str] | None, sampling_flag("A string at which the text ends; may be repeated.", "--stop")] = (
        None
    )
    include_stop: Annotated[bool, sampling_flag("Keep the stop string in the text.", "--include-stop")] = (
        DEFAULTS.include_stop
    )
    skip_special_tokens: Annotated[
        bool,
        sampling_flag("Leave special tokens out of the text.", "--skip-special-tokens/--no-skip-special-tokens"),
    ] = DEFAULTS.skip_special_tokens
    n: Annotated[int, sampling_flag("Samples of each prompt.", "--n")] = DEFAULTS.n
    priority: Annotated[int, sampling_flag("Larger goes first; needs --policy priority.")] = DEFAULTS.priority
    queue_timeout: Annotated[float | None, sampling_flag("Seconds to wait for a turn, at most.")] = (
        DEFAULTS.queue_timeout
    )
    cache_salt: Annotated[str | None, sampling_flag("Share the prefix cache with requests of this text alone.")] = None
    best_of: Annotated[int | None, sampling_flag("Samples to run, of which the n likeliest are shown.")] = None
    logprobs: Annotated[
        int | None, sampling_flag("With --json: log-probability of each token, and of so many of the likeliest.")
    ] = None
    prompt_logprobs: Annotated[int | None, sampling_flag("The same of each token of the prompt but the first.")] = None

    json_schema: Annotated[
        str | None, sampling_flag("The text is JSON that fits this schema, given as JSON or as @FILE.", "--json-schema")
    ] = None
    json_object: Annotated[bool, sampling_flag("The text is a JSON object.", "--json-object")] = False
    regex: Annotated[str | None, sampling_flag("The text matches this expression, as a whole.")] = None
    choice: Annotated[list[str] | None, sampling_flag("The text is one of these; may be repeated.", "--choice")] = None
    grammar: Annotated[
        str | None, sampling_flag("The text follows this grammar (GBNF or Lark), given as text or as @FILE.")
    ] = None
    jump_forward: Annotated[
        bool,
        sampling_flag("Take text of which there is no choice in its usual tokens, several a step.", "--jump-forward"),
    ] = False
    max_thinking_tokens: Annotated[int | None, sampling_flag("Most tokens of thinking.")] = DEFAULTS.max_thinking_tokens
    thinking_start: Annotated[str | None, sampling_flag("Text that begins thinking, if not <think>.")] = None
    thinking_end: Annotated[str | None, sampling_flag("Text that ends thinking, if not </think>.")] = None

    def params(self) -> SamplingParams:
        """The flags as sampling parameters, checked.

        Raises:
            InvalidRequest: a value is out of its range.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["stop"] = values["stop"] or None
        values["stop_token_ids"] = tuple(values.pop("stop_token_id") or ())
        values["allowed_token_ids"] = values.pop("allowed_token_id") or None
        values["bad_words"] = values.pop("bad_word") or None
        values["logit_bias"] = dict(map(_bias, values["logit_bias"] or ())) or None
        values["structured"] = _structured(**{name: values.pop(name) for name in STRUCTURED})
        params = SamplingParams(**values)
        params.validate()
        return params


def _bias(text: str) -> tuple[int, float]:
    try:
        token, bias = text.split("=")
        return int(token), float(bias)
    except ValueError as error:
        raise InvalidRequest(f"logit_bias={text!r} must be a token id, an equals sign, and a number") from error


STRUCTURED = [f.name for f in fields(StructuredOutput)]
"""Flags that make up the parameter `structured`."""


def _structured(
    *, choice: list[str] | None, json_object: bool, jump_forward: bool, **texts: str | None
) -> StructuredOutput | None:
    """What the flags ask for; None without any of them."""
    given: dict[str, Any] = {name: _text_of(name, text) for name, text in texts.items() if text is not None}
    if choice:
        given["choice"] = choice
    switches = {"json_object": json_object, "jump_forward": jump_forward}
    given |= {name: True for name, on in switches.items() if on}
    return StructuredOutput(**given) if given else None


def _text_of(name: str, value: str) -> str:
    """The flag's own text, or that of the file which it names by @; an expression is always its own text."""
    if name == "regex":
        return value
    if not value.startswith("@"):
        if os.path.isfile(value):
            raise InvalidRequest(f"{name}={shown(value)} is the name of a file; {shown('@' + value)} has it read")
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name}={shown(value)}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The arguments of `Engine` as flags. None is "not given": the engine's own default holds."""

    model: Annotated[
        str | None, engine_flag("A folder, hub id, GGUF file, or preset of random weights.", "--model")
    ] = None
    impl: Annotated[str | None, engine_flag("native, transformers or auto.")] = None
    device: Annotated[str | None, engine_flag("cpu, cuda or auto.")] = None
    dtype: Annotated[str | None, engine_flag("float32, bfloat16, float16 or auto.")] = None
    loop: Annotated[str | None, engine_flag("async or sync.")] = None
    slots: Annotated[int | None, engine_flag("Sets of buffers; steps in flight.")] = None
    max_rows: Annotated[int | None, engine_flag("Most samples that run together.")] = None
    max_step_tokens: Annotated[int | None, engine_flag("Most tokens of one step.")] = None
    max_chunk_tokens: Annotated[int | None, engine_flag("Most tokens of one prompt in a step.")] = None
    block_size: Annotated[int | None, engine_flag("KV positions of a block.")] = None
    num_blocks: Annotated[int | None, engine_flag("Blocks of the KV cache.")] = None
    cache_bytes: Annotated[int | None, engine_flag("Size of the KV cache in bytes.")] = None
    max_model_len: Annotated[int | None, engine_flag("Most tokens of prompt and output together.")] = None
    attention: Annotated[str | None, engine_flag("triton, torch or auto.")] = None
    graphs: Annotated[bool | None, engine_flag("CUDA graphs for decode steps.", "--graphs/--no-graphs")] = None
    compile: Annotated[
        bool | None, engine_flag("Compile the layers of a model that transformers runs.", "--compile/--no-compile")
    ] = None
    deterministic: Annotated[
        bool | None, engine_flag("Logits that do not depend on the batch, to the bit.", "--deterministic")
    ] = None
    prefix_cache: Annotated[
        bool | None, engine_flag("Reuse the KV cache of equal prompt beginnings.", "--prefix-cache/--no-prefix-cache")
    ] = None
    offload_bytes: Annotated[int | None, engine_flag("Host memory for evicted blocks of the KV cache.")] = None
    policy: Annotated[str | None, engine_flag("Whose turn it is: fcfs, priority or shortest.")] = None
    patience: Annotated[float | None, engine_flag("Seconds of waiting that make up for a lower rank.")] = None
    max_waiting: Annotated[int | None, engine_flag("Most requests in the queue.")] = None
    max_prompt_ms: Annotated[float | None, engine_flag("Time that prompts may add to a step.")] = None
    max_ledgers: Annotated[
        int | None, engine_flag("Most samples at once with penalties, biases, barred or allowed tokens.")
    ] = None
    engine_seed: Annotated[
        int | None, engine_flag("Where requests without a seed get theirs from.", "--engine-seed")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Engine` that were given."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if "engine_seed" in given:
            given["seed"] = given.pop("engine_seed")
        return given


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of flags: each of their fields becomes a flag of the command."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(command)
    def gathered(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in fields(kind)})
        command(**values)

    parameters = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    parameters += [parameter for kind in groups.values() for parameter in _parameters(kind)]
    parameters = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints.get(p.name, p.annotation)) for p in parameters]
    del gathered.__wrapped__  # else typer would look through to the command itself
    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {p.name: p.annotation for p in parameters}
    return gathered


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(kind)
    ]

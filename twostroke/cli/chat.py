"""`twostroke chat`: talk with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidConfig, InvalidRequest, shown
from ..sampling_params import SamplingParams
from ..server.settings import read_api_keys
from .conversation import Conversation
from .flags import EngineFlags, SamplingFlags, with_flags
from .speakers import EngineSpeaker, ServerSpeaker, Speaker


@with_flags
def chat(
    sampling: SamplingFlags,
    engine: EngineFlags,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk with a server there, instead of with an engine of this process.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the server's key; or the variable TWOSTROKE_API_KEY holds it.")
    ] = None,
) -> None:
    """Talk with a model. Through pipes, each line of the input is answered on the output."""
    params = sampling.params()
    _check(params)
    if url is not None:
        _talk(_server(url, api_key_file, engine, params), system)
        return
    if api_key_file is not None:
        raise InvalidConfig(f"api_key_file={shown(str(api_key_file))} goes with --url")
    from .. import Engine

    with Engine(**engine.arguments()) as running:
        if running.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: it knows no words to talk with")
        _talk(EngineSpeaker(running, params), system)


def _check(params: SamplingParams) -> None:
    """Raise InvalidRequest if something is asked for that a talk has no use for."""
    for name, usual in (("n", 1), ("best_of", None), ("logprobs", None), ("prompt_logprobs", None)):
        if (value := getattr(params, name)) != usual:
            raise InvalidRequest(f"{name}={shown(value)}: a chat shows one answer, and its text alone")


def _server(url: str, key_file: Path | None, engine: EngineFlags, params: SamplingParams) -> ServerSpeaker:
    arguments = engine.arguments()
    model = arguments.pop("model", None)
    if arguments:
        name, value = next(iter(arguments.items()))
        raise InvalidConfig(f"{name}={shown(value)} is for an engine of this process, and not for one behind --url")
    keys = read_api_keys(key_file)
    return ServerSpeaker(url, keys[-1] if keys else None, model, params)


def _talk(speaker: Speaker, system: str | None) -> None:
    from rich.console import Console

    conversation = Conversation(speaker, system, Console(soft_wrap=True))
    conversation.run()
    if conversation.failed and not conversation.asks:
        raise typer.Exit(1)

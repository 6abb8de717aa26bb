"""The application for Ray Serve: an ingress, and replicas of the server behind it."""

# NOTE: without postponed annotations, since Ray Serve looks at that of `build` for the type to make of its arguments.

from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..errors import InvalidConfig
from ..server.settings import DEFAULT_MAX_WAITING, ServerSettings, read_api_keys
from .ingress import Ingress
from .replica import Replica

ROUTER = "twostroke.fleet.prefix_router.PrefixRouter"

NOT_OF_REPLICAS = {
    *("host", "port", "api_processes", "api_keys", "ssl_certfile", "ssl_keyfile", "restart", "shutdown_timeout"),
}
"""The settings of a server that Ray Serve, or the fleet's own options, stand for."""


class FleetOptions(BaseModel):
    """What `serve run twostroke.fleet.app:build NAME=VALUE ...` takes; a configuration file of Ray Serve too.

    Attributes:
        model, device, engine: the model, its device, and the other arguments of `Engine`.
        server: those of `ServerSettings` that are not `NOT_OF_REPLICAS`.
        api_key_file: see `read_api_keys`; read where the application is built.
        replicas: how many, or Ray Serve's autoscaling configuration.
        gpus, cpus: that a replica takes.
        ingresses: how many; one does some hundred requests a second.
        max_ongoing: requests that a replica has at most, those that wait in its engine included.
        max_waiting: requests that wait in an ingress at most because all replicas are full; more are told so by a 429.
        router: arguments of `PrefixMap`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = ServerSettings.model_name
    device: str = "auto"
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    api_key_file: Path | None = None
    replicas: int | dict[str, Any] = 1
    gpus: float = 1.0
    cpus: float = 1.0
    ingresses: int = 1
    max_ongoing: int = 1024
    max_waiting: int = DEFAULT_MAX_WAITING
    router: dict[str, Any] = Field(default_factory=dict)

    def settings(self) -> ServerSettings:
        """The settings of each server.

        Raises:
            InvalidConfig: one of them is not known, not used here, or out of its range.
        """
        known = {f.name for f in fields(ServerSettings)} - NOT_OF_REPLICAS
        for name in self.server:
            if name not in known:
                raise InvalidConfig(f"server: {name!r} is not a setting of a replica")
        settings = ServerSettings(
            **{"model_name": self.model} | self.server,
            api_keys=read_api_keys(self.api_key_file),
        )
        settings.validate()
        return settings


def build(options: FleetOptions) -> Any:
    """Return the application, to be given to `serve.run`.

    Raises:
        InvalidConfig: a setting of the server was refused.
    """
    settings = options.settings()
    count = {"autoscaling_config" if isinstance(options.replicas, dict) else "num_replicas": options.replicas}
    replicas = serve.deployment(Replica).options(
        name="replica",
        **count,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=options.max_ongoing,
        max_queued_requests=options.max_waiting,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs=options.router),
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=options.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=options.max_ongoing + options.max_waiting,
    )
    bound: DeploymentHandle = replicas.bind(
        settings, {"model": options.model, "device": options.device} | options.engine
    )
    return ingress.bind(bound, settings.max_body_bytes)

"""The router of Ray Serve that sends prompts to replicas by their beginnings."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .http_call import HttpCall
from .prefix_map import PrefixMap


class PrefixRouter(RequestRouter):
    """Has a `PrefixMap`, whose arguments it takes. What it routes are calls whose only argument is an `HttpCall`."""

    def initialize_state(self, **arguments: Any) -> None:
        self._map = PrefixMap(**arguments)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then all others, for when it is full."""
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # before all are asked again
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = {name: self.replica_queue_len_cache.get(own.replica_id) for name, own in replicas.items()}
        ranked = self._map.rank(_blocks(pending_request), {name: length or 0 for name, length in lengths.items()})
        return [[replicas[ranked[0]]], [replicas[name] for name in ranked[1:]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._map.note(_blocks(pending_request), replica_id.unique_id)


def _blocks(request: PendingRequest) -> tuple[int, ...]:
    call: HttpCall = request.args[0]
    return call.prefix

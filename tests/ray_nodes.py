"""A Ray cluster for tests: nodes are processes of this machine, and are ended as if the machine were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from watching import wait_until

CPUS, CPUS_OF_ENGINE = 3, 2

_STORE_BYTES = 80 << 20

START = 120.0
"""Seconds that actors may take to start on a busy machine."""


class RayNodes:
    """A head and one more node. A context manager.

    Nodes have three CPUs in Ray's books, so that engines that take two are on different ones.
    """

    def __enter__(self) -> RayNodes:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["PYTHONPATH"] = os.fspath(Path(__file__).parent.parent)  # of all processes of the cluster
        head = {"num_cpus": CPUS, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.node = self.add_node()
        ray.init(self.address, log_to_driver=False)
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=CPUS, object_store_memory=_STORE_BYTES)

    def lose_node(self) -> None:
        """Kill all processes of the node that is not the head, and have another one in its place."""
        self._cluster.remove_node(self.node, allow_graceful=False)
        self.node = self.add_node()

    def workers(self, title: str) -> list[psutil.Process]:
        """The worker processes of all nodes whose title has `title` in it, oldest first."""
        found = [child for raylet in self._raylets() for child in _children(raylet) if title in _title(child)]
        return sorted(found, key=lambda process: process.create_time())

    def wait_for_workers(self, title: str, count: int) -> list[psutil.Process]:
        wait_until(lambda: len(self.workers(title)) >= count, START)
        return self.workers(title)

    def workers_of_node(self, title: str) -> list[psutil.Process]:
        """Those of the node that is not the head."""
        return [child for child in _children(_raylet(self.node)) if title in _title(child)]

    def _raylets(self) -> list[int]:
        return [_raylet(self._cluster.head_node), _raylet(self.node)]


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""

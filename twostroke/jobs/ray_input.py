"""The input of a batch as a source of Ray Data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .batch_input import BatchInput, Survey
from .journal import State

_BLOCK_LINES = 1024

_SCHEMA = pa.schema({"line": pa.int64(), "text": pa.large_binary()})


def input_dataset(source: BatchInput, survey: Survey, state: State) -> Dataset:
    """Return the lines that are not done, as rows of `line` and `text`; they are read as they are needed.

    The file is read by a task on this machine, so no other one has to have it.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    reading = {"num_cpus": 0, "scheduling_strategy": here}
    source = replace(source, path=source.path.absolute())  # the task has another working folder
    return ray.data.read_datasource(_Lines(source, survey, state), ray_remote_args=reading)


class _Lines(Datasource):
    def __init__(self, source: BatchInput, survey: Survey, state: State) -> None:
        super().__init__()
        self._source = source
        self._survey = survey
        self._state = state

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *arguments: Any, **options: Any) -> list[ReadTask]:
        """One task, whatever is asked for: lines have to be counted from the first one on."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._blocks, metadata)]

    def _blocks(self) -> Iterator[pa.Table]:
        lines = (line for line in self._source.lines(self._survey) if not self._state.has(line.number))
        while block := list(islice(lines, _BLOCK_LINES)):
            yield pa.table([list(column) for column in zip(*block, strict=True)], schema=_SCHEMA)

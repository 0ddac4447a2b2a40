"""Decode steps of fixed shape, captured once and replayed: what makes small batches pay on CUDA.

A step of b sequences with up to q rows each over n blocks is padded to a bucket of each (b and n to powers of two) and
runs on buffers that never move. Padding rows read and write the scratch block (`PagedKV.scratch`), so they touch
nobody's cache. Invariant: a captured step reads weights, pools and buffers by address; whoever replaces weights copies
into the tensors that are there. What records a step is handed in, so that the padding runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.models.attention import AttentionPlan, PagedKV, Segment
from shared.models.batched_reads import BatchedReads, Group

Outputs = tuple[Tensor, ...]  # each [b * q, ...]
Step = Callable[[AttentionPlan, tuple[Tensor, ...]], Outputs]  # (plan, inputs [b * q, ...]) -> outputs
MOST_ROWS = 16  # of one sequence; longer ones are prompts
_WARM_UPS = 2  # calls before a capture: libraries choose their algorithms and allocate in the first ones


class Recorder(Protocol):
    """Turns a function without arguments into one that repeats the very same work on the same memory."""

    def record(self, work: Callable[[], Outputs]) -> Callable[[], Outputs]: ...


class CudaRecorder:
    """CUDA graphs that share one memory pool. Other threads may use the device while one is captured."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Outputs]) -> Callable[[], Outputs]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class StaticPlan(AttentionPlan):
    """A plan over buffers that keep their addresses; `set` fills them for the next step."""

    def __init__(self, kv: PagedKV, sequences: int, rows: int, blocks: int, limit: int, device: torch.device) -> None:
        self.kv, self.longest = kv, limit
        self._shape = (sequences, rows, blocks)
        self.positions = torch.zeros(sequences * rows, dtype=torch.long, device=device)
        self.slots = torch.zeros(sequences * rows, dtype=torch.long, device=device)
        self._blocks = torch.zeros(sequences * blocks, dtype=torch.long, device=device)
        self._rows = torch.arange(sequences * rows, device=device).view(sequences, rows)
        self.renew()

    def renew(self) -> None:
        """Forget the masks of the call before: a recorded step must compute its own."""
        sequences, rows, blocks = self._shape
        keys = blocks * self.kv.block_size
        group = Group(self._rows, self._blocks, keys, self.positions.view(sequences, rows), keep=None)
        self._reads = BatchedReads.of(group, self.kv.block_size)

    def set(self, segments: Sequence[Segment]) -> list[int]:
        """Returns where the segments' rows are among the padded ones."""
        sequences, rows, blocks = self._shape
        size, scratch = self.kv.block_size, self.kv.scratch
        positions = [0] * (sequences * rows)
        slots = [scratch * size] * (sequences * rows)
        tables = [scratch] * (sequences * blocks)
        places: list[int] = []
        for index, segment in enumerate(segments):
            used = -(-(segment.start + segment.count) // size)
            tables[index * blocks : index * blocks + used] = segment.table[:used]
            for offset in range(segment.count):
                position, place = segment.start + offset, index * rows + offset
                positions[place] = position
                slots[place] = segment.table[position // size] * size + position % size
                places.append(place)
        for buffer, values in ((self.positions, positions), (self.slots, slots), (self._blocks, tables)):
            buffer.copy_(torch.tensor(values), non_blocking=True)
        return places


class StepGraphs:
    """Recorded steps of one model by bucket, recorded when a bucket is first needed."""

    def __init__(self, step: Step, kv: PagedKV, limit: int, device: torch.device, recorder: Recorder) -> None:
        """`limit`: positions that a sequence may reach."""
        self._step, self.kv, self._limit, self._device = step, kv, limit, device
        self._recorder = recorder
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}

    def fits(self, segments: Sequence[Segment]) -> bool:
        return max(segment.count for segment in segments) <= MOST_ROWS

    def run(self, segments: Sequence[Segment], inputs: Sequence[Tensor]) -> Outputs:
        """`inputs` [tokens, ...] packed as the segments are; so are the outputs, which are copies."""
        longest = max(segment.start + segment.count for segment in segments)
        bucket = (
            power_of_two(len(segments)),
            max(segment.count for segment in segments),
            power_of_two(-(-longest // self.kv.block_size)),
        )
        recorded = self._recorded.get(bucket)
        if recorded is None:
            plan = StaticPlan(self.kv, *bucket, self._limit, self._device)
            recorded = self._recorded[bucket] = _Recorded(plan, inputs, self._step, self._recorder, segments)
        return recorded.run(segments, inputs)


class _Recorded:
    """One bucket's buffers and its recorded step."""

    def __init__(
        self, plan: StaticPlan, inputs: Sequence[Tensor], step: Step, recorder: Recorder, segments: Sequence[Segment]
    ) -> None:
        self._plan = plan
        count = len(plan.positions)
        self._inputs = tuple(part.new_zeros((count, *part.shape[1:])) for part in inputs)
        self._fill(segments, inputs)  # the calls before the capture write what the first replay writes again

        def work() -> Outputs:
            plan.renew()
            return step(plan, self._inputs)

        self._replay = recorder.record(work)

    def run(self, segments: Sequence[Segment], inputs: Sequence[Tensor]) -> Outputs:
        places = self._fill(segments, inputs)
        return tuple(output.index_select(0, places) for output in self._replay())

    def _fill(self, segments: Sequence[Segment], inputs: Sequence[Tensor]) -> Tensor:
        places = torch.tensor(self._plan.set(segments), device=self._plan.positions.device)
        for buffer, part in zip(self._inputs, inputs, strict=True):
            buffer.index_copy_(0, places, part)
        return places


def power_of_two(count: int) -> int:
    """The smallest one that is not below `count`."""
    return 1 << (count - 1).bit_length()

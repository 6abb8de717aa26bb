"""Putting an engine together: device, model, memory, scheduler, slots, runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch

from .attention.backends import make_attention
from .attention.groups import block_bytes, windows_of
from .attention.interface import Attention
from .build_host_tier import make_host_tier
from .build_memory import BuildMemory
from .build_report import BuildReport
from .cache.host_tier import HostTier
from .cache_groups import CacheGroups
from .config import EngineConfig
from .constraints.constraints import Constraints
from .device.batch_state import BatchState
from .device.choice import make_device
from .device.dummies import empty_ledger
from .device.layout import input_capacity
from .device.ledgers import Ledgers, ledger_bytes
from .device.memory import used_bytes
from .device.put_away import PutAway
from .device.shapes import ExactShapes, PaddedShapes
from .device.slot import Slot, StepBuffers
from .device.streams import Device
from .errors import InvalidConfig, clear_frames
from .kernels.batch import TorchBatchOps
from .kernels.ledger import LedgerOps, TorchLedgerOps
from .limits import Limits
from .model.forward import Forward
from .model.interface import Model
from .model.load import LoadedModel, load_model
from .plan import Feature, max_ledger_words
from .runner import BatchOps, Runner
from .sampling.sampler import sample
from .sampling.stage import Stage
from .sampling.state import SamplingState
from .scheduler.policy import make_policy
from .scheduler.scheduler import Scheduler
from .scheduler.step_costs import StepCosts
from .text.tokenizer import Tokenizer, find_tokenizer


@dataclass
class Parts:
    """A built engine, not yet running.

    Attributes:
        forward: holds the attention, and that the cache.
        capture: captures the graphs, again if need be; returns how many. `sizes`: of other decode steps.
        away: the weights, while the engine sleeps.
    """

    device: Device
    loaded: LoadedModel
    tokenizer: Tokenizer | None
    limits: Limits
    constraints: Constraints
    scheduler: Scheduler
    runner: Runner
    slots: list[Slot]
    forward: Forward
    capture: Callable[..., int]
    report: BuildReport
    away: PutAway | None = None

    def free(self) -> None:
        """Let go of graphs, cache and weights, whoever still knows these parts; no step runs any more."""
        self.runner.forget_graphs()
        self.forward.attention.free()
        if self.runner.transfers is not None:
            self.runner.transfers.free()
        self.loaded.model.free()
        self.away = None


def build(
    config: EngineConfig,
    *,
    draw: Callable[..., None] | None = None,
    make_tokenizer: Callable[[int], Tokenizer] | None = None,
) -> Parts:
    """Build everything, in the order that memory wants: weights, profile, cache, graphs.

    Args:
        draw: makes tokens of logits, in the place of `sampling.sampler.sample`.
        make_tokenizer: makes a tokenizer of so many tokens for a model that has none.

    Raises:
        InvalidConfig, UnsupportedModel: a setting does not fit the model or the device. All memory is free then.
    """
    device = make_device(config.device)
    try:
        with _on_the_cpu(), device.current(), torch.inference_mode():
            return _Builder(config, device, draw or sample, make_tokenizer).build()
    except BaseException as error:
        with suppress(Exception):  # a device that failed fails again here
            device.close()
        clear_frames(error)
        raise


def _on_the_cpu() -> AbstractContextManager[object]:
    """A default device that the caller set must not decide where host buffers and weights lie.

    Without one there is none to be overruled: a compiled layer holds for the modes of torch that it was compiled under,
    and the loop runs under none.
    """
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


class _Builder:
    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        draw: Callable[..., None],
        make_tokenizer: Callable[[int], Tokenizer] | None,
    ) -> None:
        self.draw = draw
        self.make_tokenizer = make_tokenizer
        self.config = config
        self.device = device
        self.on_cuda = device.torch_device.type == "cuda"
        self.attention = config.attention
        if self.attention == "auto":
            self.attention = "triton" if self.on_cuda else "torch"
        if self.attention == "triton" and not self.on_cuda:
            raise InvalidConfig("attention='triton' needs a CUDA device")
        if self.attention == "torch" and self.on_cuda and config.graphs:
            raise InvalidConfig("attention='torch' cannot be captured on CUDA: give graphs=False with it")
        if self.attention == "torch" and self.on_cuda and config.deterministic:
            raise InvalidConfig("attention='torch' depends on the batch on CUDA: deterministic=True needs 'triton'")
        # Every lane needs a token of the step's budget.
        self.max_lanes = min(config.max_rows, config.max_step_tokens)

    def build(self) -> Parts:
        config, device = self.config, self.device
        began = time.perf_counter()
        loaded = load_model(
            config.model,
            impl=config.impl,
            device=device.torch_device,
            dtype=config.dtype,
            seed=config.seed or 0,
            compile=config.compile,
            deterministic=config.deterministic,
        )
        model = loaded.model
        loaded_at, weights_bytes = time.perf_counter(), used_bytes(device.torch_device)
        longest = self._longest(model)
        memory = BuildMemory(config, device.torch_device, max_lanes=self.max_lanes, longest=longest)
        state = self._make_state(model, longest)
        forward = Forward(model, self._make_attention(model, 1))
        padded = PaddedShapes(self.max_lanes, config.max_rows, config.max_step_tokens)
        shapes = padded if self.on_cuda else ExactShapes()
        sampling = SamplingState(**{name: getattr(state, name) for name in SamplingState._fields})
        max_ledgers = memory.ledgers(ledger_bytes(model.vocab_size, longest))
        ledgers = self._make_ledger_ops(Ledgers(max_ledgers, model.vocab_size, longest, device.torch_device), state)
        sampler = partial(_sample, self.draw, sampling)
        runner = Runner(device, state, self._make_ops(), forward, ledgers, _stages(ledgers), sampler, shapes)
        input_words, mask_words = self._input_words(model, longest), -(-model.vocab_size // 32)
        slots = [Slot(device, input_words, self.max_lanes, mask_words) for _ in range(config.slots)]
        # NOTE: allocated before the cache is sized, and before capture, since graphs write to it.
        logits_shape = (self.max_lanes, model.vocab_size) if self.on_cuda else 0
        handed_logits = torch.empty(logits_shape, dtype=model.dtype, device=device.torch_device)
        device.synchronize()
        # NOTE: on the CPU what is allocated takes memory only once it is used.
        reserve = max_ledgers * ledger_bytes(model.vocab_size, longest)
        if self.on_cuda:
            ledgers.open(empty_ledger(device.torch_device), min(max_ledgers, 1))
            reserve = memory.profile(runner, slots[0])
        groups, bytes_of_block = self._groups(model), block_bytes(model.layers, config.block_size, model.dtype)
        num_blocks = memory.blocks(groups, bytes_of_block, reserve)
        forward.attention = self._make_attention(model, num_blocks)
        device.synchronize()
        tier = None
        if config.offload_bytes:
            tier, runner.transfers = make_host_tier(config, device, forward.attention, num_blocks, self.max_lanes)
        sizes = padded.decode.sizes if config.graphs else []
        capture = partial(self._capture, runner, slots, handed_logits, sizes=sizes)
        graphs = capture()
        usable = num_blocks - 1
        tokenizer = find_tokenizer(loaded.directory)
        if tokenizer is None and self.make_tokenizer is not None:
            tokenizer = self.make_tokenizer(model.vocab_size)
        # NOTE: the last token of a sample needs no position in the cache.
        max_model_len = config.max_model_len or min(longest, groups.positions(usable) + 1)
        eos_ids = tuple(i for i in loaded.eos_ids if 0 <= i < model.vocab_size)
        limits = Limits(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            block_size=config.block_size,
            usable_blocks=usable,
            windows=groups.windows,
            max_chunk_tokens=groups.max_chunk_tokens,
            eos_ids=eos_ids,
            priorities=config.policy == "priority",
            max_waiting=config.max_waiting,
            max_ledgers=max_ledgers,
        )
        constraints = Constraints(tokenizer, limits)
        return Parts(
            device=device,
            loaded=loaded,
            tokenizer=tokenizer,
            limits=limits,
            constraints=constraints,
            scheduler=self._make_scheduler(model, num_blocks, limits, constraints, tier),
            runner=runner,
            slots=slots,
            forward=forward,
            capture=capture,
            report=BuildReport(
                num_blocks=num_blocks,
                cache_bytes=num_blocks * bytes_of_block,
                slot_host_bytes=slots[0].host_bytes,
                slot_device_bytes=slots[0].device_bytes,
                graphs=graphs,
                weights_device_bytes=weights_bytes,
                ready_device_bytes=used_bytes(device.torch_device),
                weights_seconds=loaded_at - began,
                ready_seconds=time.perf_counter() - loaded_at,
            ),
        )

    def _longest(self, model: Model) -> int:
        wanted = self.config.max_model_len
        if wanted is not None and wanted > model.max_positions:
            raise InvalidConfig(f"max_model_len={wanted} exceeds the model's {model.max_positions} positions")
        return wanted or model.max_positions

    def _groups(self, model: Model) -> CacheGroups:
        config = self.config
        chunk = min(config.max_chunk_tokens or config.max_step_tokens, config.max_step_tokens)
        return CacheGroups(windows_of(model.layers), config.block_size, chunk)

    def _make_state(self, model: Model, longest: int) -> BatchState:
        config = self.config
        try:
            return BatchState(
                self.device,
                max_rows=config.max_rows,
                max_lanes=self.max_lanes,
                max_tokens=config.max_step_tokens,
                table_width=-(-longest // config.block_size),
                block_size=config.block_size,
                num_groups=len(windows_of(model.layers)),
            )
        except RuntimeError as error:  # torch's, where memory does not reach
            raise InvalidConfig(
                f"max_rows={config.max_rows} samples of max_model_len={longest} tokens in blocks of "
                f"block_size={config.block_size}: no memory for their tables: {error}"
            ) from error

    def _make_ops(self) -> BatchOps:
        if not self.on_cuda:
            return TorchBatchOps()
        from .kernels.batch_triton import TritonBatchOps

        return TritonBatchOps()

    def _max_ledger_words(self, model: Model, longest: int) -> int:
        return max_ledger_words(self.config.max_step_tokens, longest, model.vocab_size)

    def _make_ledger_ops(self, ledgers: Ledgers, state: BatchState) -> LedgerOps:
        if not self.on_cuda:
            return TorchLedgerOps(ledgers, state)
        from .kernels.ledger_triton import TritonLedgerOps

        return TritonLedgerOps(ledgers, state)

    def _make_attention(self, model: Model, num_blocks: int) -> Attention:
        return make_attention(
            self.attention,
            model.layers,
            num_blocks,
            self.config.block_size,
            model.dtype,
            self.device.torch_device,
            max_lanes=self.max_lanes,
            deterministic=self.config.deterministic,
        )

    def _input_words(self, model: Model, longest: int) -> int:
        config = self.config
        return input_capacity(
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_model_len=longest,
            block_size=config.block_size,
            num_groups=len(windows_of(model.layers)),
            max_ledger_words=self._max_ledger_words(model, longest),
        )

    def _make_scheduler(
        self, model: Model, num_blocks: int, limits: Limits, constraints: Constraints, tier: HostTier | None
    ) -> Scheduler:
        config = self.config
        return Scheduler(
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
            max_model_len=limits.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            windows=limits.windows,
            prefix_cache=config.prefix_cache,
            tier=tier,
            policy=make_policy(config.policy, config.patience),
            costs=None if config.max_prompt_ms is None else StepCosts(config.max_prompt_ms * 1e-3),
            constraints=constraints,
            num_ledgers=limits.max_ledgers,
            max_ledger_words=self._max_ledger_words(model, limits.max_model_len),
        )

    def _capture(self, runner: Runner, slots: list[Slot], logits: torch.Tensor, *, sizes: Sequence[int]) -> int:
        if not self.on_cuda or not sizes:
            return 0
        from .device.graphs import Graphs

        for slot in slots:  # capture runs the steps once: what a slot brought last must not be done again
            slot.device_input.zero_()
        graphs = Graphs(self.device.compute.raw)  # type: ignore[attr-defined]  # a CUDA stream has one
        prompts = StepBuffers(self.device, len(slots[0].device_input), self.max_lanes)
        runner.capture(graphs, sizes, slots, prompts, logits)
        return len(graphs)


def _sample(
    draw: Callable[..., None],
    state: SamplingState,
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool,
    chances: torch.Tensor | None,
) -> None:
    draw(logits, rows, state, tokens, errors, typical, chances)


def _stages(ledgers: LedgerOps) -> list[Stage]:
    """What edits logits, in the order of `docs/sampling.md`."""
    return [
        Stage(Feature.BIAS, ledgers.add_biases),
        Stage(Feature.PENALTIES, ledgers.penalize),
        Stage(Feature.NGRAMS, ledgers.bar_ngrams),
        Stage(Feature.BAD_WORDS, ledgers.bar_sequences),
    ]

"""GRPO with TRL: a small model learns to prefer short words, and twostroke makes its samples.

    pip install trl
    python examples/grpo.py --json bench/results

TRL hands its prompts to a `rollout_func`. The one here gives them to `engine.rollout`, once the new weights are in the
engine. Then the same training runs with TRL's own generation. On a free CPU of two cores each takes a few minutes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twostroke import Engine, SamplingParams
from twostroke.bench.result import Result, Run
from twostroke.model.default_model import default_model_dir

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f"grpo.py needs the package {error.name}: pip install trl") from error

QUESTIONS = (
    "Why is the sky blue?",
    "What does a baker do?",
    "How do birds fly?",
    "What is a good way to spend a Sunday?",
    "Why do cats sleep so much?",
    "What is the sea like at night?",
    "How is bread made?",
    "What makes a good friend?",
)
GROUP = 8
"""Samples of a prompt."""
NEW_TOKENS = 16
SHORT = 4
"""Letters that a short word has at most."""
SHOWN_STEPS = 5
"""Steps at either end over which the reward is averaged."""


def short_words(completions: list[Any], **fields: Any) -> list[float]:
    """The reward: the share of words that are short."""
    answers = [re.findall(r"[A-Za-z]+", completion[0]["content"]) for completion in completions]
    return [sum(len(word) <= SHORT for word in words) / len(words) if words else 0.0 for words in answers]


class Rollouts:
    """TRL's `rollout_func`, by an engine whose weights follow the trainer's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = 0

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        if trainer.state.global_step != self._step:
            self._engine.update_weights(trainer.accelerator.unwrap_model(trainer.model).state_dict())
            self._step = trainer.state.global_step
        params = SamplingParams(temperature=trainer.temperature, max_tokens=NEW_TOKENS)
        # TRL repeats each prompt as often as it wants samples of it.
        rollout = self._engine.rollout(prompts[::GROUP], params, n=GROUP)
        groups = sorted(rollout, key=lambda group: group.index)
        return {
            "prompt_ids": [group.prompt_token_ids.tolist() for group in groups for _ in group.samples],
            "completion_ids": [sample.token_ids.tolist() for group in groups for sample in group.samples],
            "logprobs": [sample.sampling_logprobs.tolist() for group in groups for sample in group.samples],
        }


class TimedTrainer(GRPOTrainer):
    """Adds up the time of making samples, the weights' way into the engine included."""

    seconds = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        try:
            return super()._generate(prompts)
        finally:
            self.seconds += time.perf_counter() - began


def train(model_dir: Path, steps: int, engine: Engine | None) -> Run:
    """Train, with samples by the engine or, without one, by TRL; the run is that of making the samples."""
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            max_steps=steps,
            num_generations=GROUP,
            per_device_train_batch_size=GROUP,
            max_completion_length=NEW_TOKENS,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            reward_funcs=short_words,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS]),
            rollout_func=Rollouts(engine) if engine else None,
        )
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [float(entry["reward"]) for entry in logs]
    return Run(
        engine="twostroke" if engine else f"TRL {version('trl')}",
        loop=None,
        seconds=trainer.seconds,
        tokens=round(GROUP * sum(float(entry["completions/mean_length"]) for entry in logs)),
        extra={
            "reward_first_steps": sum(rewards[:SHOWN_STEPS]) / SHOWN_STEPS,
            "reward_last_steps": sum(rewards[-SHOWN_STEPS:]) / SHOWN_STEPS,
            "rewards": rewards,
            "training_seconds": seconds,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the result here, a file or a folder")
    arguments = parser.parse_args()
    model_dir = default_model_dir()
    with Engine(model_dir, max_rows=GROUP, num_blocks=600, seed=0) as engine:
        runs = [train(model_dir, arguments.steps, engine)]
    runs.append(train(model_dir, arguments.steps, None))
    for run in runs:
        first, last, whole = (
            run.extra[name] for name in ("reward_first_steps", "reward_last_steps", "training_seconds")
        )
        print(f"{run.engine}: reward {first:.2f} -> {last:.2f}, {run.seconds:.1f} s for samples of {whole:.1f} s")
    if arguments.json:
        workload = {"steps": arguments.steps, "samples_per_step": GROUP, "max_tokens": NEW_TOKENS}
        print(Result(benchmark="grpo", gpu=None, workload=workload, runs=tuple(runs)).write(arguments.json))


if __name__ == "__main__":
    main()

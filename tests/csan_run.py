"""A small run of the engine, for PyTorch's CUDA stream sanitizer (started by test_gpu.py with the sanitizer on)."""

from twostroke import Engine, SamplingParams

for loop in ("sync", "async"):
    with Engine("tiny", device="cuda", loop=loop, attention="torch", graphs=False, max_rows=8, seed=0) as engine:
        prompts = [[1 + i] * (3 + 20 * i) for i in range(6)]
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        assert all(len(output.token_ids) == 24 for output in outputs)
print("clean")

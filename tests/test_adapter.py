"""Unmodified models of transformers over paged attention give the logits that transformers gives."""

import json
import logging

import pytest
import torch
from adapted import BLOCK, FAMILIES, Batch, adapted, close, plain, plain_logits, sequences
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging as transformers_logging

from twostroke.attention.interface import Attention, LayerSpec
from twostroke.errors import UnsupportedModel
from twostroke.model.adapter import StepAttention, TransformersModel
from twostroke.model.hook import IMPLEMENTATION, NO_WINDOW_PATTERN, _window_of


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_chunks_and_decode_steps_give_the_logits_of_transformers(family):
    config = FAMILIES[family]
    a, b = sequences()
    expected = plain_logits(config)
    batch = Batch(adapted(config))

    close(batch.step(chunks=[(0, 0, a)]), expected[0])

    batch = Batch(batch.model)
    batch.step(chunks=[(1, 0, b[:9]), (0, 0, a[:6])])
    found = batch.step(lanes=[(1, 9, b[9])], chunks=[(0, 6, a[6:15])])
    close(found, torch.cat([expected[1, 9:10], expected[0, 6:15]]))
    for i in range(5):
        found = batch.step(lanes=[(0, 15 + i, a[15 + i]), (1, 10 + i, b[10 + i])])
        close(found, torch.stack([expected[0, 15 + i], expected[1, 10 + i]]))


def test_sample_index_picks_the_tokens_in_its_order():
    model = adapted(FAMILIES["gpt2"])
    a, b = sequences()
    chunks = [(0, 0, a), (1, 0, b)]
    every = Batch(model).step(chunks=chunks)
    index = torch.tensor([41, 3, 20])
    close(Batch(model).step(chunks=chunks, sample_index=index), every[index])


@pytest.mark.parametrize(
    ("family", "extra", "windows"),
    [
        ("mistral", {"sliding_window": 5}, [5, 5]),
        ("mistral", {"sliding_window": None}, [0, 0]),
        ("mistral", {"sliding_window": 40, "max_position_embeddings": 32}, [0, 0]),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}, [4096, 4096]),
        ("gemma3_text", {}, [6, 0]),
        (
            "llama",
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            [0, 9],
        ),
        ("llama", {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9}, [0, 0]),
        ("llama", {"model_type": "phi3", "sliding_window": 17, "pad_token_id": 0}, [17, 17]),
        ("llama", {"model_type": "cohere2", "sliding_window": 7}, [7, 7]),
    ],
)
def test_windows_are_those_of_the_masks_that_transformers_makes(family, extra, windows):
    assert [layer.window for layer in adapted(FAMILIES[family] | extra).layers] == windows


def test_a_mask_that_is_no_causal_window_is_seen_though_it_looks_like_one_at_the_end():
    cpu = torch.device("cpu")

    def chunked(_b, _h, q, k):
        return (k <= q) & (k // 8 == q // 8)

    assert _window_of(chunked, 64, cpu) == NO_WINDOW_PATTERN
    assert _window_of(lambda _b, _h, q, k: k < 1000, 64, cpu) == NO_WINDOW_PATTERN
    assert _window_of(lambda _b, _h, q, k: (k <= q) & (k > q - 8), 64, cpu) == 8
    assert _window_of(lambda _b, _h, q, k: k <= q, 64, cpu) == 0


def test_layers_tell_heads_sizes_and_scale():
    assert adapted(FAMILIES["granite"]).layers == [LayerSpec(4, 2, 8, 0.7)] * 2
    gpt2 = adapted(FAMILIES["gpt2"]).layers
    assert [layer.scale for layer in gpt2] == pytest.approx([8**-0.5, 8**-0.5 / 2])


def test_two_models_in_one_process_keep_apart():
    a, _ = sequences()
    batches = {family: Batch(adapted(FAMILIES[family])) for family in ("llama", "mistral")}
    for batch in batches.values():
        batch.step(chunks=[(0, 0, a[:10])])
    for family, batch in batches.items():
        expected = plain_logits(FAMILIES[family])
        close(batch.step(lanes=[(0, 10, a[10])]), expected[:1, 10])


class EchoAttention(Attention):
    def forward(self, layer, q, k, v, step):
        return q.contiguous()


class NoHostRead(TorchDispatchMode):
    """Fails on operators that would make the CPU wait for a GPU: reading a number, or a shape that data decides."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"}, name
        indices = args[1] if name == "index" else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), "index with a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_nothing_back_from_the_device(family):
    batch = Batch(adapted(FAMILIES[family]))
    batch.attention = EchoAttention(batch.model.layers, 1, BLOCK, torch.float32, torch.device("cpu"))
    seen = []
    own = batch.model.forward

    def forward(step, attention):
        with NoHostRead():
            seen.append(own(step, attention))

    batch.model.forward = forward
    batch.step(chunks=[(0, 0, [1, 2, 3])], sample_index=torch.tensor([2]))
    assert seen[0].shape == (1, 97)


def test_running_builds_no_mask(monkeypatch):
    batch = Batch(adapted(FAMILIES["mistral"]))
    seen = []
    own = StepAttention.__call__

    def attend(self, call):
        seen.append(call.mask)
        return own(self, call)

    monkeypatch.setattr(StepAttention, "__call__", attend)
    batch.step(chunks=[(0, 0, [1, 2, 3])])
    assert seen == [None, None]


def test_a_model_outside_of_its_engine_is_an_error():
    model = adapted(FAMILIES["llama"])
    with pytest.raises(RuntimeError, match="outside of its engine"):
        model._model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_what_the_engine_asks_of_a_model():
    model = adapted(FAMILIES["llama"] | {"tie_word_embeddings": False}, torch.bfloat16)
    tied = adapted(FAMILIES["llama"] | {"tie_word_embeddings": True}, torch.bfloat16)
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32
    assert model.weight_bytes == tied.weight_bytes == 2 * (2 * layer + 32 + 97 * 32)
    assert (model.vocab_size, model.max_positions) == (97, 64)
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert Batch(model).step(chunks=[(0, 0, [5, 6])]).dtype == torch.bfloat16
    assert adapted(FAMILIES["gpt2"]).max_positions == 64


def test_weights_are_a_function_of_the_seed_alone():
    config = FAMILIES["llama"]
    state = torch.random.get_rng_state()
    first, again = adapted(config), adapted(config)
    other = TransformersModel.from_config(config, device="cpu", dtype=torch.float32, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [model._model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.fixture
def directory(tmp_path):
    plain(FAMILIES["gpt_neox"]).save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_the_saved_weights(directory):
    a, _ = sequences()
    model = TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    close(Batch(model).step(chunks=[(0, 0, a)]), plain_logits(FAMILIES["gpt_neox"])[0])


def test_a_directory_that_lacks_weights_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModel, match=r"gpt_neox: the files lack \d+ weights"):
        TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)


def test_code_beside_the_weights_is_never_run(directory):
    ran = directory / "ran"
    (directory / "custom.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "nonsense", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel):
        TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    assert not ran.exists()


def test_the_log_stays_clean_and_the_settings_of_transformers_stay_as_they_were(directory, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.WARNING)
    model = TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    for _ in range(2):
        Batch(model).step(chunks=[(0, 0, [1, 2, 3])])
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == logging.WARNING
    assert transformers_logging.is_progress_bar_enabled() == before[1]
    transformers_logging.set_verbosity(before[0])
    assert model._model.config._attn_implementation == IMPLEMENTATION

"""Cache groups: how layers are dealt to them, what memory they share, and how many blocks a sample needs."""

import sys

import pytest
import torch

from twostroke.attention.groups import block_bytes, in_groups, rooms_of, windows_of
from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.cache_groups import CacheGroups


def layers(*windows, kv_heads=1):
    return [LayerSpec(2, kv_heads, 8, 0.5, window) for window in windows]


def sizes(*windows):
    dealt = in_groups(layers(*windows))
    return [sum(layer.group == group for layer in dealt) for group in range(len(windows_of(dealt)))]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([0] * 32, [32]),
        ([4096] * 32, [32]),
        ([4096, 0] * 13, [13, 13]),
        (([1024] * 5 + [0]) * 5 + [1024] * 4, [5, 5, 5, 5, 5, 4, 5]),
        ([0] * 21 + [4096] * 7, [7, 7, 7, 7]),
        ([512] * 31 + [0], [5] * 6 + [1, 1]),
        ([*range(1, 21)], [1] * 20),
    ],
)
def test_groups_are_about_equally_large_and_not_many(windows, expected):
    dealt = in_groups(layers(*windows))
    assert sorted(sizes(*windows)) == sorted(expected)
    assert [layer.window for layer in dealt] == windows
    assert all(windows_of(dealt)[layer.group] == layer.window for layer in dealt)


def test_one_layer_of_each_group_shares_memory():
    dealt = in_groups(layers(*[8, 8, 0] * 2))
    assert windows_of(dealt) == (8, 0, 8)
    attention = TorchAttention(dealt, 5, 4, torch.float32, torch.device("cpu"))
    assert len(attention.caches) == 4
    assert attention.keys[0] is attention.keys[2] is attention.keys[3] is not attention.keys[1]
    assert (
        attention.nbytes
        == 5 * block_bytes(dealt, 4, torch.float32)
        == sum(map(torch.Tensor.numel, attention.caches)) * 4
    )


def test_layers_of_other_shapes_share_nothing():
    dealt = in_groups([*layers(8), *layers(0, kv_heads=2)])
    assert [room.place for room in rooms_of(dealt)] == [0, 0]
    attention = TorchAttention(dealt, 5, 4, torch.float32, torch.device("cpu"))
    assert len(attention.caches) == 4
    assert block_bytes(dealt, 4, torch.float32) == 3 * 2 * 4 * 8 * 4


@pytest.mark.parametrize("windows", [(0,), (0, 0), (1,), (9, 0), (9, 17, 0)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_longest_sample_is_the_longest_that_fits(windows, chunk):
    groups = CacheGroups(windows, 4, chunk)
    for blocks in range(200):
        longest = groups.positions(blocks)
        if longest == sys.maxsize:
            assert 0 not in windows
            assert groups.blocks(10**6) <= blocks
        else:
            assert groups.blocks(longest) <= blocks < groups.blocks(longest + 1)


def test_a_chunk_may_begin_and_end_within_blocks():
    """A window of 9 and blocks of 4: two blocks before that of the chunk's first token, and the chunk's own."""
    assert CacheGroups((9,), 4, 1).blocks(1000) == 2 + 1
    assert CacheGroups((9,), 4, 5).blocks(1000) == 2 + 2
    assert CacheGroups((9,), 4, 6).blocks(1000) == 2 + 3
    assert CacheGroups((9, 0), 4, 6).blocks(8) == 2 + 2

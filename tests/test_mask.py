"""Masks of allowed tokens."""

import pytest
import torch

from twostroke.kernels import mask
from twostroke.sampling.mask import apply_masks


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
def test_masks_bar_what_has_no_bit(vocab):
    """The kernel, the plain form, and one bit after the other agree."""
    torch.manual_seed(0)
    words = -(-vocab // 32) + 2
    masks = torch.randint(-(1 << 31), 1 << 31, (3, words), dtype=torch.int64).to(torch.int32)
    logits = torch.randn(3, vocab)
    expected = logits.clone()
    for row in range(3):
        for token in range(vocab):
            if not (int(masks[row, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    for apply in (apply_masks, mask.apply_masks):
        found = logits.clone()
        apply(found, masks)
        assert torch.equal(found, expected)


def test_what_was_no_number_stays_an_error():
    """C04: a mask hides no NaN, and no +inf."""
    for apply in (apply_masks, mask.apply_masks):
        logits = torch.tensor([[torch.nan, torch.inf, 1.0, 2.0]])
        apply(logits, torch.tensor([[0b0100]], dtype=torch.int32))
        assert logits[0, :2].isnan().all()
        assert logits[0, 2:].tolist() == [1.0, -torch.inf]

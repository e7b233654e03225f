"""Lengths of sequences that are impossible are named, by a call in host memory and by a plan that is asked."""

import numpy as np
import pytest

from cupy_flash import attention, plan_attention, plan_attention_backward

Q, K = np.ones((2, 4, 3, 64), np.float16), np.ones((5, 2, 16, 64), np.float16)
PAGED = {"seqlens_kv": np.array([3, 40], np.int32), "pages": np.zeros((2, 3), np.int32)}
WRONG = {
    "seqlens_kv: expected 0 to 48 for sequence 1, got 49": {"seqlens_kv": np.array([3, 49], np.int32)},
    "seqlens_kv: expected 0 to 48 for sequence 0, got -1": {"seqlens_kv": np.array([-1, 40], np.int32)},
    "pages: expected pages from 0 to 4 where a sequence has keys, got 5 for page 2 of sequence 1": {
        "pages": np.array([[0, -9, -9], [4, 3, 5]], np.int32)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_impossible_is_named(message):
    changed = PAGED | WRONG[message]
    plan = plan_attention(Q, K, K, backend="host", **PAGED)
    plan.check_lengths(**PAGED)
    for compute in (lambda: plan.check_lengths(**changed), lambda: attention(Q, K, K, **changed), lambda: plan(Q, K, K, **changed)):
        with pytest.raises(ValueError) as raised:
            compute()
        assert str(raised.value) == message


def test_a_backward_has_the_same():
    q = np.ones((2, 9, 8), np.float32)
    lse, offsets = np.zeros((2, 9), np.float32), np.array([0, 4, 9])
    plan = plan_attention_backward(q, q, q, q, q, lse, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    plan.check_lengths(cu_seqlens_q=offsets)
    with pytest.raises(ValueError, match=r"^cu_seqlens_kv: expected offsets that do not fall, got 5 and 3 for sequence 1$"):
        plan.check_lengths(cu_seqlens_kv=np.array([0, 5, 3]))


def test_a_plan_has_only_what_it_was_made_with():
    plan = plan_attention(Q, K, K, backend="host", **PAGED)
    with pytest.raises(ValueError, match=r"^seqlens_q: expected one of seqlens_kv, pages, as planned$"):
        plan.check_lengths(seqlens_q=PAGED["seqlens_kv"])
    with pytest.raises(ValueError, match=r"^lengths: expected a plan with lengths of sequences"):
        plan_attention(Q, Q, Q).check_lengths(seqlens_kv=PAGED["seqlens_kv"])


def test_where_lengths_lie_makes_no_other_plan():
    lengths = np.zeros(3, np.int32)
    plan = plan_attention(Q, K, K, backend="host", **PAGED)
    lengths[1:] = PAGED["seqlens_kv"]
    assert np.array_equal(plan(Q, K, K, pages=PAGED["pages"], seqlens_kv=lengths[1:]), plan(Q, K, K, **PAGED))

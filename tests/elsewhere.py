"""What calls of other libraries compute, by their own documentation, in plain NumPy: what `test_moving` holds the pages to.

Nothing here is written from this library. Every function has the whole signature of theirs, since a page has to name each argument.
What is read where:

- flash-attn 2.8: docstrings of `flash_attn/flash_attn_interface.py` in github.com/Dao-AILab/flash-attention, commit 0251105; the
  log-sum-exp of a row without keys in `csrc/flash_attn/src/softmax.h`, what `cache_leftpad` hides in `block_info.h` beside it.
- xFormers 0.0.35: docstrings of `memory_efficient_attention` in `xformers/ops/fmha/__init__.py` and of the classes of
  `attn_bias.py` in github.com/facebookresearch/xformers, the commit before ca6d2aa.
- cuDNN: docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html, and the reference that its own tests use,
  `test/python/sdpa/fp16_ref.py` in github.com/NVIDIA/cudnn-frontend, commit 3929da2.

`jax.nn.dot_product_attention` is called itself.
"""

import math

import numpy as np

INF = math.inf


def band(rows, keys, left, right, shift=0):
    """Pairs with ``i + shift - left <= j <= i + shift + right``; a negative bound is none."""
    distance = np.arange(keys) - np.arange(rows)[:, None] - shift
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def softmax(scores, sink=None):
    """Weights of each row, and its log-sum-exp; a row of -inf has no weights."""
    beside = scores if sink is None else np.concatenate([scores, np.full((len(scores), 1), sink)], 1)
    most = beside.max(1, keepdims=True, initial=-INF)
    exps = np.exp(scores - np.where(most == -INF, 0, most))
    total = np.exp(beside - np.where(most == -INF, 0, most)).sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return exps / np.where(total == 0, 1, total), (np.log(total) + np.where(most == -INF, 0, most))[:, 0]


# flash-attn


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    batch, rows, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out, lse = np.empty((batch, rows, heads, v.shape[3])), np.empty((batch, heads, rows))
    for b, h in np.ndindex(batch, heads):
        scores = q[b, :, h] @ k[b, :, h // group].T * (dim**-0.5 if softmax_scale is None else softmax_scale)
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            slope = alibi_slopes[h] if alibi_slopes.ndim == 1 else alibi_slopes[b, h]
            scores = scores - slope * abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys))
        sees = band(rows, keys, *window_size, keys - rows) & band(rows, keys, -1, 0 if causal else -1, keys - rows)
        weights, lse[b, h] = softmax(np.where(sees, scores, -INF))
        out[b, :, h] = weights @ v[b, :, h // group]
    return (out, np.where(lse == -INF, INF, lse), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(*np.moveaxis(qkv, 2, 0), *options)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, *np.moveaxis(kv, 2, 0), *options)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        if block_table is not None:
            in_pages = [x[block_table[b]].reshape(-1, *x.shape[2:])[: keys.stop - keys.start] for x in (k, v)]
        own_k, own_v = (k[keys], v[keys]) if block_table is None else in_pages
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
        own = (x[None] for x in (q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]], own_k, own_v))
        out, lse, _ = flash_attn_func(*own, dropout_p, softmax_scale, causal, window_size, softcap, slopes, deterministic, True)
        outs.append(out[0])
        lses.append(lse[0])
    out = np.concatenate(outs)
    return (out, np.concatenate(lses, 1), None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*np.moveaxis(qkv, 1, 0), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, *np.moveaxis(kv, 1, 0), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def turned(row, cos, sin, interleaved):
    """A row with its first elements rotated: 0 and 1, 2 and 3 if interleaved, else 0 and rotary_dim / 2."""
    half = len(cos)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    result = row.copy()
    result[..., first] = row[..., first] * cos - row[..., second] * sin
    result[..., second] = row[..., first] * sin + row[..., second] * cos
    return result


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    batch, rows = q.shape[:2]
    page = k_cache.shape[1]
    cache_seqlens = page if cache_seqlens is None else cache_seqlens
    lengths = np.broadcast_to(cache_seqlens, (batch,))
    places = []
    for b in range(batch):
        own = np.arange(page) + page * (b if cache_batch_idx is None else cache_batch_idx[b])
        own = own if block_table is None else (block_table[b][:, None] * page + np.arange(page)).ravel()
        places.append((own // page, own % page))
    q, lengths = q.copy(), lengths.copy()
    for b in range(batch):
        for i in range(0 if k is None else k.shape[1]):
            at = places[b][0][lengths[b] + i], places[b][1][lengths[b] + i]
            new = k[b, i]
            if rotary_cos is not None:
                new = turned(new, rotary_cos[lengths[b] + i], rotary_sin[lengths[b] + i], rotary_interleaved)
            k_cache[at], v_cache[at] = new, v[b, i]
        for i in range(0 if rotary_cos is None else rows):
            position = lengths[b] + (i if causal or window_size != (-1, -1) else 0)
            q[b, i] = turned(q[b, i], rotary_cos[position], rotary_sin[position], rotary_interleaved)
    lengths += 0 if k is None else k.shape[1]
    outs = []
    for b in range(batch):
        pad = 0 if cache_leftpad is None else cache_leftpad[b]
        keys = tuple(x[pad : lengths[b]] for x in places[b])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b : b + 1]
        own = q[b : b + 1], k_cache[keys][None], v_cache[keys][None]
        outs.append(flash_attn_func(*own, 0.0, softmax_scale, causal, window_size, softcap, slopes, False, True))
    out, lse = (np.concatenate([x[i] for x in outs]) for i in (0, 1))
    return (out, lse) if return_softmax_lse else out


# xFormers: masks as their rules, of a query and a key that are counted from the beginning of each block


class Bias:
    """What is added: 0 where a query attends to a key, -inf elsewhere."""

    def __init__(self, window=(-1, -1), bottom_right=False):
        self.window, self.bottom_right = window, bottom_right

    def of_block(self, rows, keys):
        return np.where(band(rows, keys, *self.window, keys - rows if self.bottom_right else 0), 0.0, -INF)

    def materialize(self, rows, keys):
        return self.of_block(rows, keys)


def LowerTriangularMask():
    return Bias((-1, 0))


def LowerTriangularFromBottomRightMask():
    return Bias((-1, 0), True)


def LowerTriangularFromBottomRightLocalAttentionMask(window_size):
    return Bias((window_size - 1, 0), True)


def LocalAttentionFromBottomRightMask(window_left, window_right):
    return Bias((window_left, window_right), True)


class LowerTriangularMaskWithTensorBias(Bias):
    def __init__(self, bias):
        super().__init__((-1, 0))
        self.bias = bias

    def materialize(self, rows, keys):
        return self.of_block(rows, keys) + self.bias


class Blocks(Bias):
    """Block i of the queries attends to block i of the keys, which are these rows of key and value."""

    def __init__(self, q_seqlen, keys, **of_block):
        super().__init__(**of_block)
        self.queries, self.keys = np.split(np.arange(sum(q_seqlen)), np.cumsum(q_seqlen)[:-1]), keys

    def materialize(self, rows, keys):
        result = np.full((rows, keys), -INF)
        for of_q, of_k in zip(self.queries, self.keys):
            result[np.ix_(of_q, of_k)] = self.of_block(len(of_q), len(of_k))
        return result


def dense_keys(kv_seqlen):
    return np.split(np.arange(sum(kv_seqlen)), np.cumsum(kv_seqlen)[:-1])


def padded_keys(kv_padding, kv_seqlen):
    return [kv_padding * i + np.arange(n) for i, n in enumerate(kv_seqlen)]


def paged_keys(block_tables, page_size, starts, stops):
    rows = [(table[:, None] * page_size + np.arange(page_size)).ravel() for table in block_tables]
    return [own[start:stop] for own, start, stop in zip(rows, starts, stops)]


CAUSAL, CAUSAL_AT_THE_END = {"window": (-1, 0)}, {"window": (-1, 0), "bottom_right": True}


def BlockDiagonalMask(q_seqlen, kv_seqlen, **of_block):
    return Blocks(q_seqlen, dense_keys(kv_seqlen), **of_block)


def BlockDiagonalCausalMask(q_seqlen, kv_seqlen):
    return BlockDiagonalMask(q_seqlen, kv_seqlen, **CAUSAL)


def BlockDiagonalCausalFromBottomRightMask(q_seqlen, kv_seqlen):
    return BlockDiagonalMask(q_seqlen, kv_seqlen, **CAUSAL_AT_THE_END)


def BlockDiagonalCausalLocalAttentionMask(q_seqlen, kv_seqlen, window_size):
    return BlockDiagonalMask(q_seqlen, kv_seqlen, window=(window_size - 1, 0))


def BlockDiagonalCausalLocalAttentionFromBottomRightMask(q_seqlen, kv_seqlen, window_size):
    return BlockDiagonalMask(q_seqlen, kv_seqlen, window=(window_size - 1, 0), bottom_right=True)


def BlockDiagonalPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, **of_block):
    return Blocks(q_seqlen, padded_keys(kv_padding, kv_seqlen), **of_block)


def BlockDiagonalCausalWithOffsetPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen):
    return BlockDiagonalPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, **CAUSAL_AT_THE_END)


def BlockDiagonalLocalAttentionPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, window_left, window_right):
    return BlockDiagonalPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, window=(window_left, window_right), bottom_right=True)


def BlockDiagonalCausalLocalAttentionPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, window_size):
    return BlockDiagonalPaddedKeysMask(q_seqlen, kv_padding, kv_seqlen, window=(window_size - 1, 0), bottom_right=True)


def BlockDiagonalGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen, **of_block):
    return Blocks(q_seqlen, [start + np.arange(n) for start, n in zip(kv_seqstarts, kv_seqlen)], **of_block)


def BlockDiagonalCausalWithOffsetGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen):
    return BlockDiagonalGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen, **CAUSAL_AT_THE_END)


def PagedBlockDiagonalPaddedKeysMask(q_seqlen, kv_seqlen, block_tables, page_size, **of_block):
    return Blocks(q_seqlen, paged_keys(block_tables, page_size, [0] * len(kv_seqlen), kv_seqlen), **of_block)


def PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(q_seqlen, kv_seqlen, block_tables, page_size):
    return PagedBlockDiagonalPaddedKeysMask(q_seqlen, kv_seqlen, block_tables, page_size, **CAUSAL_AT_THE_END)


def PagedBlockDiagonalGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, **of_block):
    stops = np.add(kv_seqstarts, kv_seqlen)
    return Blocks(q_seqlen, paged_keys(block_tables, page_size, kv_seqstarts, stops), **of_block)


def PagedBlockDiagonalCausalWithOffsetGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size):
    return PagedBlockDiagonalGappyKeysMask(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, **CAUSAL_AT_THE_END)


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    if query.ndim == 3:
        out, lse = memory_efficient_attention_partial(*(x[:, :, None] for x in (query, key, value)), attn_bias, p, scale)
        return out[:, :, 0], lse[:, 0]
    (batch, rows, *heads, dim), keys = query.shape, key.shape[1]
    bias = attn_bias.materialize(rows, keys) if isinstance(attn_bias, Bias) else 0 if attn_bias is None else attn_bias
    bias = np.broadcast_to(bias, (batch, *heads, rows, keys))
    out, lse = np.empty((batch, rows, *heads, value.shape[-1])), np.empty((batch, *heads, rows))
    for b, *h in np.ndindex(batch, *heads):
        at, of = (b, slice(None), *h), (b, *h)
        weights, lse[of] = softmax(query[at] @ key[at].T * (dim**-0.5 if scale is None else scale) + bias[of])
        out[at] = weights @ value[at]
    return out, lse


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    return memory_efficient_attention_partial(query, key, value, attn_bias, p, scale)[0]


def merge_attentions(attn_split, lse_split, write_lse=True, output_dtype=None):
    weights = np.exp(np.stack(lse_split))
    shares = np.moveaxis(weights / weights.sum(0), -1, 2)[..., None]  # of (chunks, batch, heads, rows), with rows before heads
    return (np.stack(attn_split) * shares).sum(0), np.log(weights.sum(0)) if write_lse else None


# cuDNN


TOP_LEFT, BOTTOM_RIGHT = "TOP_LEFT", "BOTTOM_RIGHT"


def alibi_slopes_of(heads):
    """The slopes that are not given but follow from the number of heads."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 / n * (i + 1)) for i in range(n)]
    return np.array([*slopes, *(2.0 ** (-4 / n * i) for i in range(1, 1 + 2 * (heads - n), 2))])


def sdpa(
    q, k, v, is_inference=None, attn_scale=None, bias=None, block_mask=None, use_alibi_mask=False, use_padding_mask=False,
    seq_len_q=None, seq_len_kv=None, use_causal_mask=False, use_causal_mask_bottom_right=False, sliding_window_length=None,
    diagonal_alignment=TOP_LEFT, diagonal_band_left_bound=None, diagonal_band_right_bound=None, dropout=None, rng_dump=None,
    paged_attention_k_table=None, paged_attention_v_table=None, paged_attention_max_seq_len_kv=None, compute_data_type=None,
    name="", score_mod=None, generate_stats=None, implementation=None, score_max=None, score_sum_exp=None, sink_token=None,
    unfuse_fma=False,
):  # fmt: skip
    """Arrays (batch, heads, rows, dim); the deprecated names of masks mean the newer ones."""
    if use_causal_mask or use_causal_mask_bottom_right:
        diagonal_alignment, diagonal_band_right_bound = BOTTOM_RIGHT if use_causal_mask_bottom_right else TOP_LEFT, 0
    left = diagonal_band_left_bound if sliding_window_length is None else sliding_window_length
    if paged_attention_k_table is not None:
        tables = zip((k, v), (paged_attention_k_table, paged_attention_v_table))
        k, v = (np.concatenate(x[table[:, 0, :, 0]].swapaxes(0, 1), 2) for x, table in tables)
    (batch, heads, rows, _), keys = q.shape, k.shape[2]
    out, stats = np.zeros((*q.shape[:3], v.shape[3])), np.empty((batch, heads, rows, 1))
    pairs = (batch, heads, rows, keys)
    added = np.zeros(pairs) if bias is None else np.broadcast_to(bias, pairs)
    tiles = None
    if block_mask is not None:  # a bit of each tile of 128 by 128, the least significant first
        tiles = np.unpackbits(block_mask, axis=-1, bitorder="little").repeat(128, 2).repeat(128, 3)[:, :, :rows, :keys]
    for b, h in np.ndindex(batch, heads):
        n, m = (int(seq_len_q[b, 0, 0, 0]), int(seq_len_kv[b, 0, 0, 0])) if use_padding_mask else (rows, keys)
        of_kv = b, h // (heads // k.shape[1])
        scores = q[b, h] @ k[of_kv][:m].T * (1.0 if attn_scale is None else attn_scale) + added[b, h, :, :m]
        if use_alibi_mask:
            scores = scores + alibi_slopes_of(heads)[h] * (np.arange(m) - np.arange(rows)[:, None])
        shift = m - n if diagonal_alignment == BOTTOM_RIGHT else 0
        sees = band(rows, m, -1, -1 if diagonal_band_right_bound is None else diagonal_band_right_bound, shift)
        if left is not None:  # up to and including column row - left
            sees &= np.arange(m) > np.arange(rows)[:, None] + shift - left
        if tiles is not None:
            sees &= tiles[b, h, :, :m] == 1
        weights, stats[b, h, :, 0] = softmax(np.where(sees, scores, -INF), None if sink_token is None else sink_token[0, h, 0, 0])
        out[b, h, :n] = (weights @ v[of_kv][:m])[:n]
    return (out, stats) if generate_stats else out

"""Flash-style kernels of relative attention: forward, and the gradients of everything; `launch` runs them.

The score of query i for key j is (q_i + u) . k_j + (q_i + v) . r_c, where c = j - i + T - 1 is the row of R for their
distance. The second product is easy to make over c and is needed over j: the relative shift. Numbers shift for free on
their way into a score buffer [T, S] (S is K rounded up to 16) and out of it, if whole vectors of 16 bytes move, which
is eight numbers. So a tile takes queries eight apart, i = 8 a + residue. Over n = j - 8 a, in cells of eight keys:

                n = -16   -8     0     8    16   ...
    a = 0                     |  0 - |  8 - | 16 - |      A column has one c = n + T - 1 - residue for all rows, so
    a = 1              |  0 - |  8 - | 16 - | 24 - |      that the picture is a plain product with rows of R. A row
    a = 2       |  0 - |  8 - | 16 - | 24 - | 32 - |      holds all keys, its cells are vectors of the buffer, since
                                                          i S + 8 a + n divides by 8; each row begins a cell earlier.

There are eight such parallelograms, one for each residue.
A query sees n <= M + residue and, where the attended length is fixed, n >= residue + oldest: the same columns in all
rows. R is of no lane, so the rows of a tile are (a, lane), the lane running fastest: tiles are full for short segments
too, and span few queries, so that few of their numbers are wasted beyond the ends of the parallelogram.

    forward   over n  distance_scores           buffer <- (q + v) R'
              over j  attend                    softmax((q + u) k' + buffer) values
    backward  over n  distance_scores           the buffer again: nothing of T x K numbers is kept; and
                                                q + u, q + v, and delta_i = d_context_i . context_i
              over j  key_value_gradients       dk, dv; buffer <- dS, the gradient of the scores, in place
              over j  query_gradients           dq <- dS k, and parts of du
              over n  distance_query_gradients  dq <- dq + dS R, and parts of dv_bias
              over n  distance_gradients        dR, for each residue and part of the rows its own
                      sum_parts                 dR, du, dv_bias of their parts

No atomics, so the result is always the same. Tiles that no query sees are skipped everywhere. Those that all see are
not masked: a program asks once whether documents end among its rows, and then only tiles on the edge of what is seen
are masked, by a branch, since a loop of their own would take more registers. Sums are in fp32. Masked scores are -inf
while the running maximum begins at a finite number, so a tile that a query does not see gives exp(-inf) = 0 and never
NaN. Dropout is a function of (seed, lane, head, i, j), made again wherever it is needed.

Shapes: B lanes, T queries, M memory, K = M + T keys, N heads, H head width (a multiple of 16). Contexts and their
gradients are contiguous BTNH, the documents BT and BK, int64. Queries are rows `query_stride` apart, and keys rows
`key_stride` apart. With PAST, KEY has those of the segment alone, and PAST those of the memory, `past_stride` apart. A
value lies N H numbers behind its key. Gradients lie as what they are gradients of.
A launch is for `lanes` lanes from `first_lane` and for heads from `first_head`. SCORES holds only those: [heads, lanes,
T, S]. CAST makes up for the interpreter, which multiplies bf16 as integers; compiled, it is always False.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
NOT_SPECIAL = ["threshold", "lanes", "first_lane", "first_head"]
"""Arguments whose values are not worth a compilation each."""
LOWEST = tl.constexpr(-1.0e30)
"""Where the running maximum begins: below all scores, but finite."""


@triton.jit
def load_rows(POINTER, row, seen, stride, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """[rows, BLOCK_H] of one head, zeros where a row is not seen and beyond H."""
    h = tl.arange(0, BLOCK_H)
    mask = seen[:, None] if H == BLOCK_H else seen[:, None] & (h < H)[None, :]
    return tl.load(POINTER + row[:, None] * stride + h[None, :], mask=mask, other=0.0)


@triton.jit
def key_rows(KEY, PAST, lane, head, j, shape, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """[keys, BLOCK_H] pointers to keys j of a head."""
    if PAST is None:
        row = KEY + lane.to(tl.int64) * shape.K * shape.key_stride + head * H + j * shape.key_stride
    else:
        M = shape.K - shape.T
        past = PAST + lane.to(tl.int64) * M * shape.past_stride + head * H
        segment = KEY + (lane.to(tl.int64) * shape.T - M) * shape.key_stride + head * H
        stride = tl.where(j < M, shape.past_stride, shape.key_stride)
        row = tl.where(j < M, past, segment) + j.to(tl.int64) * stride
        row = tl.multiple_of(row, 16)  # bytes, which the choice hides from the compiler
    return row[:, None] + tl.arange(0, BLOCK_H)[None, :]


@triton.jit
def key_mask(j, shape, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """For these: which keys there are, and which numbers of a head."""
    known = (j < shape.K)[:, None]
    return known if H == BLOCK_H else known & (tl.arange(0, BLOCK_H) < H)[None, :]


@triton.jit
def store_rows(POINTER, row, seen, stride, value, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """The inverse of `load_rows`, in the pointer's type."""
    h = tl.arange(0, BLOCK_H)
    mask = seen[:, None] if H == BLOCK_H else seen[:, None] & (h < H)[None, :]
    tl.store(POINTER + row[:, None] * stride + h[None, :], value.to(POINTER.dtype.element_ty), mask=mask)


@triton.jit
def load_bias(BIAS, head, ROWS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """[ROWS, BLOCK_H] in fp32, the same in all rows: a single row would be loaded in numbers of two bytes."""
    h = tl.arange(0, BLOCK_H)
    pointer = tl.broadcast_to((BIAS + head * H + h)[None, :], [ROWS, BLOCK_H])
    return tl.load(pointer, mask=tl.broadcast_to((h < H)[None, :], [ROWS, BLOCK_H]), other=0.0).to(tl.float32)


@triton.jit
def dot(left, right, total, CAST: tl.constexpr):
    """total + left @ right in fp32, without tf32."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def visible(i, j, query_document, key_document, shape):
    """`AttentionMask.mask` in registers, for what is broadcast to a tile; queries from T on see nothing."""
    newest = tl.where(i < shape.T, i + (shape.K - shape.T), -1)
    seen = (j <= newest) & (query_document == key_document)
    if shape.oldest is not None:
        seen = seen & (j >= i + shape.oldest)
    return seen


@triton.jit
def load_documents(POINTER, lane, row, length):
    """int32 [rows] of one lane; zeros (which an asynchronous copy makes by itself) beyond its end."""
    return tl.load(POINTER + lane * length + row, mask=row < length, other=0).to(tl.int32)


@triton.jit
def has_border(POINTER, start, stop, document, others):
    """Whether any row from `start` to `stop`, or any of `others` [rows], is of another document than this one."""
    found = tl.zeros([128], tl.int32)
    for first in range(start, stop, 128):
        row = first + tl.arange(0, 128)
        found |= (tl.load(POINTER + row, mask=row < stop, other=document) != document).to(tl.int32)
    return (tl.max(found, 0) > 0) | (tl.max((others != document).to(tl.int32), 0) > 0)


@triton.jit
def kept(seed, lane, head, i, j0, threshold, COLUMNS: tl.constexpr):
    """[rows, COLUMNS]: which probabilities of keys j0 and on dropout keeps; `threshold` / 65536 of them it does not.

    One call of philox, with seven rounds as in FlashAttention, gives 128 bits: 16 for each of eight keys.
    """
    group = j0 // 8 + tl.arange(0, COLUMNS // 8)
    w, x, y, z = tl.philox(seed, group[None, :], i[:, None], lane, head, n_rounds=7)
    words = tl.interleave(tl.interleave(w, y), tl.interleave(x, z))
    return tl.interleave(words & 0xFFFF, words >> 16) >= threshold


@triton.jit
def class_rows(tile, residue, lanes, ROWS: tl.constexpr):
    """(a, lane, query) of a tile over n: queries 8 a + residue, of all lanes."""
    row = tile * ROWS + tl.arange(0, ROWS)
    a = row // lanes
    return a, row % lanes, 8 * a + residue


@triton.jit
def skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS: tl.constexpr):
    """(pointers, mask) [rows, COLUMNS] into SCORES of the columns n0 ... of a tile over n.

    The mask is for whole vectors: true for some that hold n below `first` or above `last`.
    """
    column = tl.arange(0, COLUMNS)
    row_start = ((head * lanes + lane).to(tl.int64) * shape.T + i) * shape.S + 8 * a
    n = n0 + column // 8 * 8
    j = n[None, :] + 8 * a[:, None]
    mask = (i < shape.T)[:, None] & (j >= 0) & (j < shape.S) & ((n + 7 >= first) & (n <= last))[None, :]
    return SCORES + row_start[:, None] + (n0 + column)[None, :], mask


@triton.jit
def seen_columns(residue, last_a, shape):
    """(first, last) n that a query of this residue with at most this a sees."""
    first = -8 * last_a
    if shape.oldest is not None:
        first = tl.maximum(first, residue + shape.oldest)
    return first, shape.K - shape.T + residue


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_scores(QUERY, DISTANCE, BIAS, SCORES, CONTENT_BIAS, CONTEXT, D_CONTEXT, CONTENT_QUERY, POSITION_QUERY,
                    DELTA, shape, kept_part, lanes, first_lane, first_head,
                    H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    CAST: tl.constexpr):  # fmt: skip
    """Terms (b) and (d): one tile of (q + v) R', over n. Programs: (tiles of n, tiles of rows, 8 residues x heads).

    For the backward, the program of a tile of rows that has least to do, the first, also writes what all later kernels
    need of these rows: q + u, q + v, and delta = d_context . context, what the softmax takes from all gradients of a
    row of scores. Dropout scales probabilities up by 1 / kept_part. Their gradients here and dS are without that
    factor, which is in `d_scale` of the kernels that use them.
    """
    residue, head = tl.program_id(2) % 8, tl.program_id(2) // 8
    width, column = shape.num_heads * H, (first_head + head) * H
    a, lane, i = class_rows(tl.program_id(1), residue, lanes, ROWS)
    row, known = (first_lane + lane).to(tl.int64) * shape.T + i, i < shape.T
    n0 = tl.program_id(0) * COLUMNS - 8 * tl.cdiv(shape.T, 8)
    first, last = seen_columns(residue, ((tl.program_id(1) + 1) * ROWS - 1) // lanes, shape)
    if (n0 <= last) & (n0 + COLUMNS > first):
        query = load_rows(QUERY + column, row, known, shape.query_stride, H, BLOCK_H)
        query = (query.to(tl.float32) + load_bias(BIAS, first_head + head, ROWS, H, BLOCK_H)).to(query.dtype)
        c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
        distance = load_rows(DISTANCE + column, c, (c >= 0) & (c < shape.K), width, H, BLOCK_H)
        score = dot(query, tl.trans(distance), tl.zeros([ROWS, COLUMNS], tl.float32), CAST)
        pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
        tl.store(pointer, score.to(SCORES.dtype.element_ty), mask=mask)
    # Two questions, since the compiler answers the first and only a program the second.
    if DELTA is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            context = load_rows(CONTEXT + column, row, known, width, H, BLOCK_H).to(tl.float32)
            d_context = load_rows(D_CONTEXT + column, row, known, width, H, BLOCK_H).to(tl.float32)
            pointer = DELTA + ((first_lane + lane) * shape.num_heads + first_head + head) * shape.T + i
            tl.store(pointer, tl.sum(context * d_context, 1) * kept_part, mask=known)
            query = load_rows(QUERY + column, row, known, shape.query_stride, H, BLOCK_H).to(tl.float32)
            content_query = query + load_bias(CONTENT_BIAS, first_head + head, ROWS, H, BLOCK_H)
            store_rows(CONTENT_QUERY + column, row, known, width, content_query, H, BLOCK_H)
            position_query = query + load_bias(BIAS, first_head + head, ROWS, H, BLOCK_H)
            store_rows(POSITION_QUERY + column, row, known, width, position_query, H, BLOCK_H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def attend(QUERY, KEY, PAST, BIAS, SCORES, QUERY_DOCUMENT, KEY_DOCUMENT, SEED, CONTEXT, LSE,
           shape, scale, threshold, lanes, first_lane, first_head,
           H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
           CAST: tl.constexpr):  # fmt: skip
    """Context and, in base 2, the log of the sum of exponentials. Programs: (tiles of queries, heads x lanes)."""
    T, K, width = shape.T, shape.K, shape.num_heads * H
    lane, head = first_lane + tl.program_id(1) % lanes, first_head + tl.program_id(1) // lanes
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, so that short ones fill the end
    i = tile * ROWS + tl.arange(0, ROWS)
    query_row = lane.to(tl.int64) * T + i
    score_base = SCORES + tl.program_id(1).to(tl.int64) * T * shape.S
    query = load_rows(QUERY + head * H, query_row, i < T, shape.query_stride, H, BLOCK_H)
    query = (query.to(tl.float32) + load_bias(BIAS, head, ROWS, H, BLOCK_H)).to(query.dtype)
    query_document = load_documents(QUERY_DOCUMENT, lane, i, T)

    if SEED is not None:
        seed = tl.load(SEED)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    normaliser = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, BLOCK_H], tl.float32)
    start, stop = 0, tl.minimum(K, K - T + (tile + 1) * ROWS)
    if shape.oldest is not None:
        start = (tile * ROWS + shape.oldest) // COLUMNS * COLUMNS
    document = tl.load(QUERY_DOCUMENT + lane * T + tile * ROWS)
    border = has_border(KEY_DOCUMENT + lane * K, start, stop, document, tl.where(i < T, query_document, document))
    # Said here too, so that the score tile, which is not a factor of a product, is loaded ahead as keys and values are.
    for j0 in tl.range(start, stop, COLUMNS, num_stages=STAGES):
        j = j0 + tl.arange(0, COLUMNS)
        vector = (j0 + tl.arange(0, COLUMNS) // 8 * 8)[None, :]
        mask = (i < T)[:, None] & (vector < shape.S)
        score = tl.load(score_base + i[:, None] * shape.S + j[None, :], mask=mask, other=0.0).to(tl.float32)
        rows, known = key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H), key_mask(j, shape, H, BLOCK_H)
        key = tl.load(rows, mask=known, other=0.0)
        score = dot(query, tl.trans(key), score, CAST)
        key_document = load_documents(KEY_DOCUMENT, lane, j, K)
        is_masked = border | (j0 + COLUMNS > tile * ROWS + 1 + (K - T))
        if shape.oldest is not None:
            is_masked |= j0 < (tile + 1) * ROWS - 1 + shape.oldest
        if is_masked:
            seen = visible(i[:, None], j[None, :], query_document[:, None], key_document[None, :], shape)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1) * (scale * LOG2_E))
        probability = tl.exp2(score * (scale * LOG2_E) - higher[:, None])
        shrink = tl.exp2(highest - higher)
        normaliser = normaliser * shrink + tl.sum(probability, 1)
        if SEED is not None:
            keep = kept(seed, lane, head, i, j0, threshold, COLUMNS)
            probability = tl.where(keep, probability, 0.0)
        value = tl.load(rows + width, mask=known, other=0.0)
        context = dot(probability.to(value.dtype), value, context * shrink[:, None], CAST)
        highest = higher
    factor = 1.0 / normaliser
    if SEED is not None:
        factor = factor * (65536.0 / (65536 - threshold))
    store_rows(CONTEXT + head * H, query_row, i < T, width, context * factor[:, None], H, BLOCK_H)
    tl.store(LSE + (lane * shape.num_heads + head) * T + i, highest + tl.log2(normaliser), mask=i < T)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def key_value_gradients(CONTENT_QUERY, KEY, PAST, SCORES, QUERY_DOCUMENT, KEY_DOCUMENT, SEED, D_CONTEXT, LSE, DELTA,
                        D_KEY, D_PAST, shape, scale, threshold, d_scale, lanes, first_lane, first_head,
                        H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                        CAST: tl.constexpr):  # fmt: skip
    """dk and dv of COLUMNS keys; the scores of all queries for them become dS. Programs: (key tiles, heads x lanes).

    Of each row, dS is written in the vectors that hold a key which the query sees, and no later kernel reads others.
    """
    T, K, width = shape.T, shape.K, shape.num_heads * H
    lane, head = first_lane + tl.program_id(1) % lanes, first_head + tl.program_id(1) // lanes
    first_key = tl.program_id(0) * COLUMNS
    j = first_key + tl.arange(0, COLUMNS)
    score_base = SCORES + tl.program_id(1).to(tl.int64) * T * shape.S
    rows, known = key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H), key_mask(j, shape, H, BLOCK_H)
    key, value = tl.load(rows, mask=known, other=0.0), tl.load(rows + width, mask=known, other=0.0)
    key_document = load_documents(KEY_DOCUMENT, lane, j, K)
    if SEED is not None:
        seed = tl.load(SEED)

    start, stop = tl.maximum(0, first_key - (K - T)) // ROWS * ROWS, T
    if shape.oldest is not None:
        stop = tl.minimum(T, first_key + COLUMNS - shape.oldest)
    document = tl.load(KEY_DOCUMENT + lane * K + first_key)
    others = tl.where(j < K, key_document, document)
    border = has_border(QUERY_DOCUMENT + lane * T, start, stop, document, others)
    d_key, d_value = tl.zeros([COLUMNS, BLOCK_H], tl.float32), tl.zeros([COLUMNS, BLOCK_H], tl.float32)
    for i0 in range(start, stop, ROWS):
        i = i0 + tl.arange(0, ROWS)
        row = lane.to(tl.int64) * T + i
        vector = (first_key + tl.arange(0, COLUMNS) // 8 * 8)[None, :]
        pointer, mask = score_base + i[:, None] * shape.S + j[None, :], (i < T)[:, None] & (vector < shape.S)
        query = load_rows(CONTENT_QUERY + head * H, row, i < T, width, H, BLOCK_H)
        d_context = load_rows(D_CONTEXT + head * H, row, i < T, width, H, BLOCK_H)
        statistic = (lane * shape.num_heads + head) * T + i
        lse = tl.load(LSE + statistic, mask=i < T, other=0.0)
        delta = tl.load(DELTA + statistic, mask=i < T, other=0.0)
        query_document = load_documents(QUERY_DOCUMENT, lane, i, T)
        # Transposed, [keys, queries], so that what one product makes in registers is the left factor of the next.
        score = dot(key, tl.trans(query), tl.trans(tl.load(pointer, mask=mask, other=0.0)).to(tl.float32), CAST)
        is_masked = border | (first_key + COLUMNS > i0 + 1 + (K - T)) | (i0 + ROWS > T)
        if shape.oldest is not None:
            is_masked |= first_key < i0 + ROWS - 1 + shape.oldest
        if is_masked:
            seen = visible(i[None, :], j[:, None], query_document[None, :], key_document[:, None], shape)
            score = tl.where(seen, score, float("-inf"))
        probability = tl.exp2(score * (scale * LOG2_E) - lse[None, :])
        d_probability = dot(value, tl.trans(d_context), tl.zeros([COLUMNS, ROWS], tl.float32), CAST)
        used = probability
        if SEED is not None:
            # The sign remembers what is dropped, which costs no registers.
            keep = tl.trans(kept(seed, lane, head, i, first_key, threshold, COLUMNS))
            probability = tl.where(keep, probability, -probability)
            d_probability = tl.where(probability > 0.0, d_probability, 0.0)
            used = tl.maximum(probability, 0.0)
        d_value = dot(used.to(d_context.dtype), d_context, d_value, CAST)
        d_score = (tl.abs(probability) * (d_probability - delta[None, :])).to(SCORES.dtype.element_ty)
        tl.store(pointer, tl.trans(d_score), mask=mask)
        d_key = dot(d_score, query, d_key, CAST)
    rows = key_rows(D_KEY, D_PAST, lane, head, j, shape, H, BLOCK_H)
    tl.store(rows, (d_key * d_scale).to(D_KEY.dtype.element_ty), mask=known)
    tl.store(rows + width, (d_value * (d_scale / scale)).to(D_KEY.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def query_gradients(KEY, PAST, SCORES, D_QUERY, D_BIAS, shape, d_scale, lanes, first_lane, first_head,
                    H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    CAST: tl.constexpr):  # fmt: skip
    """dq by terms (a) and (c), and its sum over a tile, a part of du. Programs: (tiles of queries, heads x lanes)."""
    T, K, width = shape.T, shape.K, shape.num_heads * H
    lane, head = first_lane + tl.program_id(1) % lanes, first_head + tl.program_id(1) // lanes
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i = tile * ROWS + tl.arange(0, ROWS)
    row_start = tl.program_id(1).to(tl.int64) * T * shape.S + i * shape.S
    total = tl.zeros([ROWS, BLOCK_H], tl.float32)
    start, stop = 0, tl.minimum(K, K - T + (tile + 1) * ROWS)
    if shape.oldest is not None:
        start = (tile * ROWS + shape.oldest) // 8 * 8
    for j0 in range(start, stop, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        vector = (j0 + tl.arange(0, COLUMNS) // 8 * 8)[None, :]
        mask = (i < T)[:, None] & (vector <= i[:, None] + (K - T))
        if shape.oldest is not None:
            mask = mask & (vector + 7 >= i[:, None] + shape.oldest)
        d_score = tl.load(SCORES + row_start[:, None] + j[None, :], mask=mask, other=0.0)
        known = key_mask(j, shape, H, BLOCK_H)
        key = tl.load(key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H), mask=known, other=0.0)
        total = dot(d_score, key, total, CAST)
    total = total * d_scale
    store_rows(D_QUERY + head * H, lane.to(tl.int64) * T + i, i < T, shape.query_stride, total, H, BLOCK_H)
    part = (lane * tl.num_programs(0) + tile) * width + head * H + tl.arange(0, BLOCK_H)
    tl.store(D_BIAS + part, tl.sum(total, 0), mask=tl.arange(0, BLOCK_H) < H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_query_gradients(DISTANCE, SCORES, D_QUERY, D_BIAS, shape, d_scale, lanes, first_lane, first_head,
                             H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                             CAST: tl.constexpr):  # fmt: skip
    """dq by terms (b) and (d), added to what is there, and its sum over a tile, a part of dv_bias.
    Programs: (tiles of rows, 8 residues x heads)."""
    residue, head = tl.program_id(1) % 8, tl.program_id(1) // 8
    width = shape.num_heads * H
    column = (first_head + head) * H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    a, lane, i = class_rows(tile, residue, lanes, ROWS)
    total = tl.zeros([ROWS, BLOCK_H], tl.float32)
    first, last = seen_columns(residue, ((tile + 1) * ROWS - 1) // lanes, shape)
    for n0 in range(first // 8 * 8, last + 1, COLUMNS):
        pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
        d_score = tl.load(pointer, mask=mask, other=0.0)
        c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
        distance = load_rows(DISTANCE + column, c, (c >= 0) & (c < shape.K), width, H, BLOCK_H)
        total = dot(d_score, distance, total, CAST)
    total = total * d_scale
    row = (first_lane + lane).to(tl.int64) * shape.T + i
    before = load_rows(D_QUERY + column, row, i < shape.T, shape.query_stride, H, BLOCK_H).to(tl.float32)
    store_rows(D_QUERY + column, row, i < shape.T, shape.query_stride, before + total, H, BLOCK_H)
    part = (residue * tl.num_programs(0) + tile) * width + column + tl.arange(0, BLOCK_H)
    tl.store(D_BIAS + part, tl.sum(total, 0), mask=tl.arange(0, BLOCK_H) < H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_gradients(POSITION_QUERY, SCORES, D_DISTANCE, shape, d_scale, lanes, first_lane, first_head,
                       H: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       CAST: tl.constexpr):  # fmt: skip
    """Add these lanes' part of dR to [parts, 8, K, N, H], where each part has every so-many-th tile of rows.
    Programs: (tiles of n, parts, 8 residues x heads)."""
    residue, head = tl.program_id(2) % 8, tl.program_id(2) // 8
    width = shape.num_heads * H
    column = (first_head + head) * H
    num_rows = tl.cdiv(shape.T, 8) * lanes
    n0 = tl.program_id(0) * COLUMNS - 8 * tl.cdiv(shape.T, 8)
    first, last = seen_columns(residue, (num_rows - 1) // lanes, shape)
    c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
    known = (c >= 0) & (c < shape.K)
    total = tl.zeros([COLUMNS, BLOCK_H], tl.float32)
    # Keys begin at j = 0: of the first rows, those of small a, a tile at negative n holds nothing.
    first_tile = tl.maximum(0, -(n0 + COLUMNS - 1)) // 8 * lanes // ROWS
    for tile in range(first_tile + tl.program_id(1), tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        a, lane, i = class_rows(tile, residue, lanes, ROWS)
        pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
        d_score = tl.load(pointer, mask=mask, other=0.0)
        row = (first_lane + lane).to(tl.int64) * shape.T + i
        query = load_rows(POSITION_QUERY + column, row, i < shape.T, width, H, BLOCK_H)
        total = dot(tl.trans(d_score), query, total, CAST)
    pointer = D_DISTANCE + (tl.program_id(1) * 8 + residue).to(tl.int64) * shape.K * width + column
    total = total * d_scale
    if first_lane > 0:
        total += load_rows(pointer, c, known, width, H, BLOCK_H)
    store_rows(pointer, c, known, width, total, H, BLOCK_H)


@triton.jit
def sum_parts(DISTANCE_PARTS, CONTENT_PARTS, POSITION_PARTS, D_DISTANCE, D_CONTENT_BIAS, D_POSITION_BIAS,
              num_distance_parts, num_content_parts, num_position_parts, distance_len, bias_len,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """dR, du and dv_bias: sums over the rows that are their parts. Programs: tiles of du, of dv_bias, of dR."""
    tile, bias_tiles = tl.program_id(0), tl.cdiv(bias_len, COLUMNS)
    if tile < bias_tiles:
        sum_rows(CONTENT_PARTS, D_CONTENT_BIAS, tile, num_content_parts, bias_len, ROWS, COLUMNS)
    elif tile < 2 * bias_tiles:
        sum_rows(POSITION_PARTS, D_POSITION_BIAS, tile - bias_tiles, num_position_parts, bias_len, ROWS, COLUMNS)
    else:
        sum_rows(DISTANCE_PARTS, D_DISTANCE, tile - 2 * bias_tiles, num_distance_parts, distance_len, ROWS, COLUMNS)


@triton.jit
def sum_rows(PARTS, TOTAL, tile, num_rows, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of the sum of all rows, which are `length` long."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < length)[None, :]
        total += tl.load(PARTS + row.to(tl.int64)[:, None] * length + column[None, :], mask=mask, other=0.0)
    tl.store(TOTAL + column, tl.sum(total, 0).to(TOTAL.dtype.element_ty), mask=column < length)

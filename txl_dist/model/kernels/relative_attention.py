"""Flash-style Triton kernels of relative attention: the forward pass and all gradients. `attention_launch` starts them.

The score of query i for key j is (q_i + u) . k_j + (q_i + v) . r_c, where c = j - i + T - 1 is the row of R for their
distance. The second product is easy to compute for all c, but it is needed for all j. That is the relative shift (Dai
et al. 2019, appendix B). Here a score buffer [T, S] does the shift, where S is K rounded up to 16. Numbers are written
to the buffer at c and read from it at j. This costs nothing if whole vectors of 16 bytes (eight numbers) are moved. So
the queries of a tile are eight apart: i = 8 a + residue. Its columns are n = j - 8 a, in cells of eight keys:

                n = -16   -8     0     8    16   ...
    a = 0                     |  0 - |  8 - | 16 - |      A column has the same c = n + T - 1 - residue in all rows.
    a = 1              |  0 - |  8 - | 16 - | 24 - |      So the picture is a plain product with rows of R. A row
    a = 2       |  0 - |  8 - | 16 - | 24 - | 32 - |      holds all keys, and begins one cell before the row above it.
                                                          i S + 8 a + n is a multiple of 8: cells are vectors.

There are eight such parallelograms, one for each residue. A query sees the columns n <= M + residue. If the attended
length is fixed, it sees only the columns from residue + oldest to M + residue. These columns are the same in all rows.
R is the same for all lanes, so the rows of a tile are pairs (a, lane), and the lane changes fastest. So tiles are full
for short segments too. They span few queries, so few of their numbers lie beyond the ends of the parallelogram.

    forward   over n  distance_scores           buffer <- (q + v) R'
              over j  attend                    softmax((q + u) k' + buffer) values
    backward  over n  distance_scores           buffer <- (q + v) R' again, unless the buffer was kept
                                                Also q + u, q + v, and delta_i = d_context_i . context_i
              over j  key_value_gradients       dk, dv; buffer <- dS, the gradient of the scores, in place
              over j  query_gradients           dq <- dS k, and partial sums of du
              over n  distance_query_gradients  dq <- dq + dS R, and partial sums of dv_bias
              over n  distance_gradients        partial sums of dR, per residue and part of the rows
                      sum_parts                 dR, du, dv_bias from their partial sums

There are no atomics, so the result is always the same. Sums are in fp32. Tiles that no query sees are skipped. Tiles
that all queries see are not masked. For this, a program checks once whether any document ends among its keys. If none
ends there, only tiles at the edge of the visible keys are masked. The kernels choose by a branch whether to mask a
tile, because a separate loop for these tiles would need more registers. Masked scores are -inf, and the running maximum
begins at a finite number. So a tile that a query does not see contributes exp(-inf) = 0, and never NaN. The dropout
mask is a function of (seed, lane, head, i, j). Each kernel that needs it computes it again.

Shapes: B lanes, T queries, M memory, K = M + T keys, N heads, H head width (a multiple of 16). Contexts and their
gradients are contiguous BTNH. Documents are BT and BK, int64. Queries are rows `query_stride` numbers apart, and keys
are rows `key_stride` apart. With PAST, KEY holds only the keys of the segment, and PAST holds the keys of the memory,
`past_stride` apart. A value is N H numbers after its key. Each gradient has the layout of its input.

A launch computes `lanes` lanes from `first_lane` on, and the heads from `first_head` on. SCORES holds only the scores
of these lanes and heads: [heads, lanes, T, S]. CAST is True in Triton's interpreter, which would multiply bf16 numbers
as integers. It is False in compiled kernels.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
NOT_SPECIAL = ["threshold", "lanes", "first_lane", "first_head"]
"""Kernel arguments for which Triton compiles only one version of the kernel, whatever their values."""
LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum. It is below all scores, but finite."""


@triton.jit
def head_mask(known, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Compute the mask [rows, BLOCK_H] of rows where `known` is True, and of columns below the head width H."""
    if H == BLOCK_H:
        mask = known[:, None]
    else:
        h = tl.arange(0, BLOCK_H)
        mask = known[:, None] & (h < H)[None, :]
    return mask


@triton.jit
def load_rows(POINTER, row, known, stride, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load rows of one head as [rows, BLOCK_H]. Rows where `known` is False, and columns from H on, are zeros."""
    h = tl.arange(0, BLOCK_H)
    pointer = POINTER + row[:, None] * stride + h[None, :]
    return tl.load(pointer, mask=head_mask(known, H, BLOCK_H), other=0.0)


@triton.jit
def store_rows(POINTER, row, known, stride, value, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store rows [rows, BLOCK_H] of one head in the pointer's type. It is the inverse of `load_rows`."""
    h = tl.arange(0, BLOCK_H)
    pointer = POINTER + row[:, None] * stride + h[None, :]
    tl.store(pointer, value.to(POINTER.dtype.element_ty), mask=head_mask(known, H, BLOCK_H))


@triton.jit
def key_rows(KEY, PAST, lane, head, j, shape, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return pointers [keys, BLOCK_H] to the keys j of one head."""
    if PAST is None:
        lane_start = lane.to(tl.int64) * shape.K * shape.key_stride
        row = KEY + lane_start + head * H + j * shape.key_stride
    else:
        M = shape.K - shape.T
        past = PAST + lane.to(tl.int64) * M * shape.past_stride + head * H
        segment = KEY + (lane.to(tl.int64) * shape.T - M) * shape.key_stride + head * H
        stride = tl.where(j < M, shape.past_stride, shape.key_stride)
        row = tl.where(j < M, past, segment) + j.to(tl.int64) * stride
        row = tl.multiple_of(row, 16)  # in bytes; the compiler cannot see it through the choice
    h = tl.arange(0, BLOCK_H)
    return row[:, None] + h[None, :]


@triton.jit
def key_mask(j, shape, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the mask for the pointers of `key_rows`. It is True for keys below K and columns below H."""
    return head_mask(j < shape.K, H, BLOCK_H)


@triton.jit
def load_bias(BIAS, head, ROWS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a bias of one head as [ROWS, BLOCK_H] in fp32. All rows of the result are equal.

    If only one row were loaded, each load would move only two bytes.
    """
    h = tl.arange(0, BLOCK_H)
    pointers = tl.broadcast_to((BIAS + head * H + h)[None, :], [ROWS, BLOCK_H])
    mask = tl.broadcast_to((h < H)[None, :], [ROWS, BLOCK_H])
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dot(left, right, total, CAST: tl.constexpr):
    """Compute total + left @ right in fp32, without rounding to tf32."""
    if CAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def visible(i, j, query_document, key_document, shape):
    """Compute `AttentionMask.mask` in registers, for a tile of queries and keys.

    The arguments broadcast to the tile. Queries i >= T see nothing.
    """
    newest = tl.where(i < shape.T, i + (shape.K - shape.T), -1)
    seen = (j <= newest) & (query_document == key_document)
    if shape.oldest is not None:
        seen = seen & (j >= i + shape.oldest)
    return seen


@triton.jit
def load_documents(POINTER, lane, row, length):
    """Load the document numbers of some rows of one lane (row of the batch), int32.

    After the lane's end the numbers are 0, because an asynchronous copy writes zeros there.
    """
    document = tl.load(POINTER + lane * length + row, mask=row < length, other=0)
    return document.to(tl.int32)


@triton.jit
def has_border(POINTER, start, stop, document, others):
    """Return True if any row in [start, stop), or any of `others` [rows], is of another document than `document`."""
    differs = tl.zeros([128], tl.int32)
    for first in range(start, stop, 128):
        row = first + tl.arange(0, 128)
        row_document = tl.load(POINTER + row, mask=row < stop, other=document)
        differs |= (row_document != document).to(tl.int32)
    any_row_differs = tl.max(differs, 0) > 0
    others_differ = (others != document).to(tl.int32)
    return any_row_differs | (tl.max(others_differ, 0) > 0)


@triton.jit
def kept(seed, lane, head, i, j0, threshold, COLUMNS: tl.constexpr):
    """Return a mask [rows, COLUMNS], True where dropout keeps the probability of a key. The first column is key j0.

    The rate is threshold / 65536. One call of the generator philox gives 128 bits, 16 for each of eight keys. A call
    has seven rounds, as in FlashAttention.
    """
    group = j0 // 8 + tl.arange(0, COLUMNS // 8)
    w, x, y, z = tl.philox(seed, group[None, :], i[:, None], lane, head, n_rounds=7)
    even_words = tl.interleave(w, y)
    odd_words = tl.interleave(x, z)
    words = tl.interleave(even_words, odd_words)
    bits = tl.interleave(words & 0xFFFF, words >> 16)
    return bits >= threshold


@triton.jit
def class_rows(tile, residue, lanes, ROWS: tl.constexpr):
    """Return (a, lane, query) for the rows of a tile of scores. The queries of a tile are eight apart.

    A row is a pair (a, lane), and its query is 8 a + residue (see the module's docstring).
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    a = row // lanes
    return a, row % lanes, 8 * a + residue


@triton.jit
def skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS: tl.constexpr):
    """Return (pointers, mask) into SCORES for a tile of scores, each [rows, COLUMNS]. The columns are n = j - 8 a (see
    the module's docstring), from n0 on.

    The mask covers whole vectors of eight numbers. So it is also True for some n below `first` or above `last`.
    """
    column = tl.arange(0, COLUMNS)
    matrix_row = (head * lanes + lane).to(tl.int64) * shape.T + i
    row_start = matrix_row * shape.S + 8 * a
    n = n0 + column // 8 * 8
    j = n[None, :] + 8 * a[:, None]
    is_inside = (i < shape.T)[:, None] & (j >= 0) & (j < shape.S)
    is_seen = (n + 7 >= first) & (n <= last)
    mask = is_inside & is_seen[None, :]
    return SCORES + row_start[:, None] + (n0 + column)[None, :], mask


@triton.jit
def seen_columns(residue, last_a, shape):
    """Return the first and the last column that queries of this residue see, up to row `last_a`.

    Columns are n = j - 8 a, and queries are 8 a + residue (see the module's docstring).
    """
    first = -8 * last_a
    if shape.oldest is not None:
        first = tl.maximum(first, residue + shape.oldest)
    return first, shape.K - shape.T + residue


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_scores(
    QUERY,
    DISTANCE,
    BIAS,
    SCORES,
    CONTENT_BIAS,
    CONTEXT,
    D_CONTEXT,
    CONTENT_QUERY,
    POSITION_QUERY,
    DELTA,
    shape,
    kept_part,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Compute terms (b) and (d) of the scores: one tile of (q + v) R'. Its columns are n (see the module's docstring).

    The grid of programs is (tiles of n, tiles of rows, 8 residues x heads). If SCORES is None, no scores are computed,
    and the grid has one tile of n.

    In the backward pass the first program of each tile of rows has the least work. So it also writes the values of
    these rows that later kernels need: q + u, q + v, and delta = d_context . context. The softmax subtracts delta from
    all gradients of a row of scores. Dropout scales probabilities up by 1 / kept_part. The gradients of the
    probabilities here, and dS, do not include this factor. The kernels that use these gradients include the factor in
    `d_scale`.
    """
    residue_and_head = tl.program_id(2)
    residue = residue_and_head % 8
    head = residue_and_head // 8
    width = shape.num_heads * H
    column = (first_head + head) * H
    a, lane, i = class_rows(tl.program_id(1), residue, lanes, ROWS)
    row = (first_lane + lane).to(tl.int64) * shape.T + i
    known = i < shape.T
    n0 = tl.program_id(0) * COLUMNS - 8 * tl.cdiv(shape.T, 8)
    last_row = (tl.program_id(1) + 1) * ROWS - 1
    first, last = seen_columns(residue, last_row // lanes, shape)
    # Each time two conditions: the compiler decides the first, and only a running program the second.
    if SCORES is not None:  # noqa: SIM102
        if (n0 <= last) & (n0 + COLUMNS > first):
            query = load_rows(QUERY + column, row, known, shape.query_stride, H, BLOCK_H)
            position_query = query.to(tl.float32) + load_bias(BIAS, first_head + head, ROWS, H, BLOCK_H)
            query = position_query.to(query.dtype)
            c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
            is_distance = (c >= 0) & (c < shape.K)
            distance = load_rows(DISTANCE + column, c, is_distance, width, H, BLOCK_H)
            score = dot(query, tl.trans(distance), tl.zeros([ROWS, COLUMNS], tl.float32), CAST)
            pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
            tl.store(pointer, score.to(SCORES.dtype.element_ty), mask=mask)
    if DELTA is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            context = load_rows(CONTEXT + column, row, known, width, H, BLOCK_H)
            context = context.to(tl.float32)
            d_context = load_rows(D_CONTEXT + column, row, known, width, H, BLOCK_H)
            d_context = d_context.to(tl.float32)
            matrix = (first_lane + lane) * shape.num_heads + first_head + head
            pointer = DELTA + matrix * shape.T + i
            delta = tl.sum(context * d_context, 1) * kept_part
            tl.store(pointer, delta, mask=known)
            query = load_rows(QUERY + column, row, known, shape.query_stride, H, BLOCK_H)
            query = query.to(tl.float32)
            content_query = query + load_bias(CONTENT_BIAS, first_head + head, ROWS, H, BLOCK_H)
            store_rows(CONTENT_QUERY + column, row, known, width, content_query, H, BLOCK_H)
            position_query = query + load_bias(BIAS, first_head + head, ROWS, H, BLOCK_H)
            store_rows(POSITION_QUERY + column, row, known, width, position_query, H, BLOCK_H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def attend(
    QUERY,
    KEY,
    PAST,
    BIAS,
    SCORES,
    QUERY_DOCUMENT,
    KEY_DOCUMENT,
    SEED,
    CONTEXT,
    LSE,
    shape,
    scale,
    threshold,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    CAST: tl.constexpr,
):
    """Compute the context, and the base-2 logarithm of each row's sum of exponentials.

    The grid of programs is (tiles of queries, heads x lanes).
    """
    T = shape.T
    K = shape.K
    width = shape.num_heads * H
    matrix = tl.program_id(1)
    lane = first_lane + matrix % lanes
    head = first_head + matrix // lanes
    # The longest rows come first, so that short ones fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_query = tile * ROWS
    i = first_query + tl.arange(0, ROWS)
    is_query = i < T
    query_row = lane.to(tl.int64) * T + i
    score_base = SCORES + matrix.to(tl.int64) * T * shape.S
    query = load_rows(QUERY + head * H, query_row, is_query, shape.query_stride, H, BLOCK_H)
    content_query = query.to(tl.float32) + load_bias(BIAS, head, ROWS, H, BLOCK_H)
    query = content_query.to(query.dtype)
    query_document = load_documents(QUERY_DOCUMENT, lane, i, T)

    if SEED is not None:
        seed = tl.load(SEED)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    normaliser = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, BLOCK_H], tl.float32)
    start = 0
    stop = tl.minimum(K, K - T + (tile + 1) * ROWS)
    if shape.oldest is not None:
        first_tile = (first_query + shape.oldest) // COLUMNS
        start = first_tile * COLUMNS
    document = tl.load(QUERY_DOCUMENT + lane * T + first_query)
    key_documents = KEY_DOCUMENT + lane * K
    others = tl.where(is_query, query_document, document)
    border = has_border(key_documents, start, stop, document, others)
    # The stages are set here too, so that the tile of scores, which is no factor of a product, is also loaded ahead.
    for j0 in tl.range(start, stop, COLUMNS, num_stages=STAGES):
        j = j0 + tl.arange(0, COLUMNS)
        vector = j0 + tl.arange(0, COLUMNS) // 8 * 8
        mask = is_query[:, None] & (vector[None, :] < shape.S)
        score_pointer = score_base + i[:, None] * shape.S + j[None, :]
        score = tl.load(score_pointer, mask=mask, other=0.0).to(tl.float32)
        rows = key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H)
        known = key_mask(j, shape, H, BLOCK_H)
        key = tl.load(rows, mask=known, other=0.0)
        score = dot(query, tl.trans(key), score, CAST)
        key_document = load_documents(KEY_DOCUMENT, lane, j, K)
        has_future_keys = j0 + COLUMNS > first_query + 1 + (K - T)
        is_masked = border | has_future_keys
        if shape.oldest is not None:
            last_query = (tile + 1) * ROWS - 1
            has_old_keys = j0 < last_query + shape.oldest
            is_masked |= has_old_keys
        if is_masked:
            seen = visible(i[:, None], j[None, :], query_document[:, None], key_document[None, :], shape)
            score = tl.where(seen, score, float("-inf"))
        tile_highest = tl.max(score, 1) * (scale * LOG2_E)
        higher = tl.maximum(highest, tile_highest)
        exponent = score * (scale * LOG2_E) - higher[:, None]
        probability = tl.exp2(exponent)
        shrink = tl.exp2(highest - higher)
        normaliser = normaliser * shrink + tl.sum(probability, 1)
        if SEED is not None:
            keep = kept(seed, lane, head, i, j0, threshold, COLUMNS)
            probability = tl.where(keep, probability, 0.0)
        value = tl.load(rows + width, mask=known, other=0.0)
        probability = probability.to(value.dtype)
        context = dot(probability, value, context * shrink[:, None], CAST)
        highest = higher
    factor = 1.0 / normaliser
    if SEED is not None:
        factor = factor * (65536.0 / (65536 - threshold))
    context = context * factor[:, None]
    store_rows(CONTEXT + head * H, query_row, is_query, width, context, H, BLOCK_H)
    lse_pointer = LSE + (lane * shape.num_heads + head) * T + i
    lse = highest + tl.log2(normaliser)
    tl.store(lse_pointer, lse, mask=is_query)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def key_value_gradients(
    CONTENT_QUERY,
    KEY,
    PAST,
    SCORES,
    QUERY_DOCUMENT,
    KEY_DOCUMENT,
    SEED,
    D_CONTEXT,
    LSE,
    DELTA,
    D_KEY,
    D_PAST,
    shape,
    scale,
    threshold,
    d_scale,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Compute dk and dv, the gradients of COLUMNS keys and of their values.

    The scores of all queries for these keys are overwritten by their gradient dS. The grid of programs is (key tiles,
    heads x lanes). In each row dS is written only to vectors of eight numbers that hold a key which the query sees.
    Later kernels read only these vectors.
    """
    T = shape.T
    K = shape.K
    width = shape.num_heads * H
    matrix = tl.program_id(1)
    lane = first_lane + matrix % lanes
    head = first_head + matrix // lanes
    first_key = tl.program_id(0) * COLUMNS
    j = first_key + tl.arange(0, COLUMNS)
    score_base = SCORES + matrix.to(tl.int64) * T * shape.S
    rows = key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H)
    known = key_mask(j, shape, H, BLOCK_H)
    key = tl.load(rows, mask=known, other=0.0)
    value = tl.load(rows + width, mask=known, other=0.0)
    key_document = load_documents(KEY_DOCUMENT, lane, j, K)
    if SEED is not None:
        seed = tl.load(SEED)

    first_query = tl.maximum(0, first_key - (K - T))
    start = first_query // ROWS * ROWS
    stop = T
    if shape.oldest is not None:
        stop = tl.minimum(T, first_key + COLUMNS - shape.oldest)
    document = tl.load(KEY_DOCUMENT + lane * K + first_key)
    others = tl.where(j < K, key_document, document)
    border = has_border(QUERY_DOCUMENT + lane * T, start, stop, document, others)
    d_key = tl.zeros([COLUMNS, BLOCK_H], tl.float32)
    d_value = tl.zeros([COLUMNS, BLOCK_H], tl.float32)
    for i0 in range(start, stop, ROWS):
        i = i0 + tl.arange(0, ROWS)
        row = lane.to(tl.int64) * T + i
        vector = first_key + tl.arange(0, COLUMNS) // 8 * 8
        pointer = score_base + i[:, None] * shape.S + j[None, :]
        is_query = i < T
        mask = is_query[:, None] & (vector[None, :] < shape.S)
        query = load_rows(CONTENT_QUERY + head * H, row, is_query, width, H, BLOCK_H)
        d_context = load_rows(D_CONTEXT + head * H, row, is_query, width, H, BLOCK_H)
        statistic = (lane * shape.num_heads + head) * T + i
        lse = tl.load(LSE + statistic, mask=is_query, other=0.0)
        delta = tl.load(DELTA + statistic, mask=is_query, other=0.0)
        query_document = load_documents(QUERY_DOCUMENT, lane, i, T)
        # Transposed, [keys, queries]: so a product's result in registers is the left factor of the next product.
        transposed_query = tl.trans(query)
        distance_score = tl.load(pointer, mask=mask, other=0.0)
        transposed_score = tl.trans(distance_score).to(tl.float32)
        score = dot(key, transposed_query, transposed_score, CAST)
        has_future_keys = first_key + COLUMNS > i0 + 1 + (K - T)
        is_masked = border | has_future_keys
        has_no_queries = i0 + ROWS > T
        is_masked = is_masked | has_no_queries
        if shape.oldest is not None:
            has_old_keys = first_key < i0 + ROWS - 1 + shape.oldest
            is_masked |= has_old_keys
        if is_masked:
            seen = visible(i[None, :], j[:, None], query_document[None, :], key_document[:, None], shape)
            score = tl.where(seen, score, float("-inf"))
        exponent = score * (scale * LOG2_E) - lse[None, :]
        probability = tl.exp2(exponent)
        transposed_gradient = tl.trans(d_context)
        d_probability = dot(value, transposed_gradient, tl.zeros([COLUMNS, ROWS], tl.float32), CAST)
        used = probability
        if SEED is not None:
            # The sign marks what is dropped, which costs no registers.
            keep = kept(seed, lane, head, i, first_key, threshold, COLUMNS)
            probability = tl.where(tl.trans(keep), probability, -probability)
            d_probability = tl.where(probability > 0.0, d_probability, 0.0)
            used = tl.maximum(probability, 0.0)
        d_value = dot(used.to(d_context.dtype), d_context, d_value, CAST)
        d_score = tl.abs(probability) * (d_probability - delta[None, :])
        d_score = d_score.to(SCORES.dtype.element_ty)
        tl.store(pointer, tl.trans(d_score), mask=mask)
        d_key = dot(d_score, query, d_key, CAST)
    rows = key_rows(D_KEY, D_PAST, lane, head, j, shape, H, BLOCK_H)
    d_key = d_key * d_scale
    tl.store(rows, d_key.to(D_KEY.dtype.element_ty), mask=known)
    d_value = d_value * (d_scale / scale)
    tl.store(rows + width, d_value.to(D_KEY.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def query_gradients(
    KEY,
    PAST,
    SCORES,
    D_QUERY,
    D_BIAS,
    shape,
    d_scale,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Compute dq, the gradient of the queries, from terms (a) and (c).

    Also sum dq over a tile, which gives a part of du. The grid of programs is (tiles of queries, heads x lanes).
    """
    T = shape.T
    K = shape.K
    width = shape.num_heads * H
    matrix = tl.program_id(1)
    lane = first_lane + matrix % lanes
    head = first_head + matrix // lanes
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_query = tile * ROWS
    i = first_query + tl.arange(0, ROWS)
    row_start = matrix.to(tl.int64) * T * shape.S + i * shape.S
    total = tl.zeros([ROWS, BLOCK_H], tl.float32)
    start = 0
    stop = tl.minimum(K, K - T + (tile + 1) * ROWS)
    if shape.oldest is not None:
        start = (first_query + shape.oldest) // 8 * 8
    for j0 in range(start, stop, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        vector = (j0 + tl.arange(0, COLUMNS) // 8 * 8)[None, :]
        query = i[:, None]
        mask = (query < T) & (vector <= query + (K - T))
        if shape.oldest is not None:
            mask = mask & (vector + 7 >= query + shape.oldest)
        score_pointer = SCORES + row_start[:, None] + j[None, :]
        d_score = tl.load(score_pointer, mask=mask, other=0.0)
        known = key_mask(j, shape, H, BLOCK_H)
        rows = key_rows(KEY, PAST, lane, head, j, shape, H, BLOCK_H)
        key = tl.load(rows, mask=known, other=0.0)
        total = dot(d_score, key, total, CAST)
    total = total * d_scale
    query_row = lane.to(tl.int64) * T + i
    store_rows(D_QUERY + head * H, query_row, i < T, shape.query_stride, total, H, BLOCK_H)
    h = tl.arange(0, BLOCK_H)
    part = (lane * tl.num_programs(0) + tile) * width + head * H + h
    tl.store(D_BIAS + part, tl.sum(total, 0), mask=h < H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_query_gradients(
    DISTANCE,
    SCORES,
    D_QUERY,
    D_BIAS,
    shape,
    d_scale,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Add terms (b) and (d) to dq. Also sum these terms over a tile, which gives a part of dv_bias.

    The grid of programs is (tiles of rows, 8 residues x heads).
    """
    residue_and_head = tl.program_id(1)
    residue = residue_and_head % 8
    head = residue_and_head // 8
    width = shape.num_heads * H
    column = (first_head + head) * H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    a, lane, i = class_rows(tile, residue, lanes, ROWS)
    total = tl.zeros([ROWS, BLOCK_H], tl.float32)
    last_row = (tile + 1) * ROWS - 1
    first, last = seen_columns(residue, last_row // lanes, shape)
    for n0 in range(first // 8 * 8, last + 1, COLUMNS):
        pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
        d_score = tl.load(pointer, mask=mask, other=0.0)
        c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
        is_distance = (c >= 0) & (c < shape.K)
        distance = load_rows(DISTANCE + column, c, is_distance, width, H, BLOCK_H)
        total = dot(d_score, distance, total, CAST)
    total = total * d_scale
    row = (first_lane + lane).to(tl.int64) * shape.T + i
    d_query_pointer = D_QUERY + column
    is_query = i < shape.T
    before = load_rows(d_query_pointer, row, is_query, shape.query_stride, H, BLOCK_H)
    d_query = before.to(tl.float32) + total
    store_rows(d_query_pointer, row, is_query, shape.query_stride, d_query, H, BLOCK_H)
    h = tl.arange(0, BLOCK_H)
    part = (residue * tl.num_programs(0) + tile) * width + column + h
    tl.store(D_BIAS + part, tl.sum(total, 0), mask=h < H)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def distance_gradients(
    POSITION_QUERY,
    SCORES,
    D_DISTANCE,
    shape,
    d_scale,
    lanes,
    first_lane,
    first_head,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Compute dR, the gradient of the encodings, for these lanes. Add it to partial sums [parts, 8, K, N, H].

    Part p of P covers the tiles of rows p, p + P, p + 2 P ... The grid of programs is (tiles of n, parts, 8 residues x
    heads).
    """
    residue_and_head = tl.program_id(2)
    residue = residue_and_head % 8
    head = residue_and_head // 8
    width = shape.num_heads * H
    column = (first_head + head) * H
    num_rows = tl.cdiv(shape.T, 8) * lanes
    n0 = tl.program_id(0) * COLUMNS - 8 * tl.cdiv(shape.T, 8)
    first, last = seen_columns(residue, (num_rows - 1) // lanes, shape)
    c = n0 + tl.arange(0, COLUMNS) + (shape.T - 1 - residue)
    known = (c >= 0) & (c < shape.K)
    total = tl.zeros([COLUMNS, BLOCK_H], tl.float32)
    # Keys begin at j = 0. So in the first rows, those of small a, a tile at negative n holds nothing.
    first_a = tl.maximum(0, -(n0 + COLUMNS - 1)) // 8
    first_tile = first_a * lanes // ROWS + tl.program_id(1)
    num_tiles = tl.cdiv(num_rows, ROWS)
    for tile in range(first_tile, num_tiles, tl.num_programs(1)):
        a, lane, i = class_rows(tile, residue, lanes, ROWS)
        pointer, mask = skewed(SCORES, head, a, lane, i, n0, first, last, shape, lanes, COLUMNS)
        d_score = tl.load(pointer, mask=mask, other=0.0)
        row = (first_lane + lane).to(tl.int64) * shape.T + i
        is_query = i < shape.T
        query = load_rows(POSITION_QUERY + column, row, is_query, width, H, BLOCK_H)
        total = dot(tl.trans(d_score), query, total, CAST)
    part = (tl.program_id(1) * 8 + residue).to(tl.int64)
    pointer = D_DISTANCE + part * shape.K * width + column
    total = total * d_scale
    if first_lane > 0:
        total += load_rows(pointer, c, known, width, H, BLOCK_H)
    store_rows(pointer, c, known, width, total, H, BLOCK_H)


@triton.jit
def sum_parts(
    DISTANCE_PARTS,
    CONTENT_PARTS,
    POSITION_PARTS,
    D_DISTANCE,
    D_CONTENT_BIAS,
    D_POSITION_BIAS,
    num_distance_parts,
    num_content_parts,
    num_position_parts,
    distance_len,
    bias_len,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the partial gradients dR, du and dv_bias, one part per row.

    The programs compute tiles of du, then of dv_bias, then of dR.
    """
    tile = tl.program_id(0)
    bias_tiles = tl.cdiv(bias_len, COLUMNS)
    if tile < bias_tiles:
        sum_rows(CONTENT_PARTS, D_CONTENT_BIAS, tile, num_content_parts, bias_len, ROWS, COLUMNS)
    elif tile < 2 * bias_tiles:
        sum_rows(POSITION_PARTS, D_POSITION_BIAS, tile - bias_tiles, num_position_parts, bias_len, ROWS, COLUMNS)
    else:
        sum_rows(DISTANCE_PARTS, D_DISTANCE, tile - 2 * bias_tiles, num_distance_parts, distance_len, ROWS, COLUMNS)


@triton.jit
def sum_rows(PARTS, TOTAL, tile, num_rows, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum rows of `length` numbers, in one tile of columns."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < length)[None, :]
        pointer = PARTS + row.to(tl.int64)[:, None] * length + column[None, :]
        total += tl.load(pointer, mask=mask, other=0.0)
    tl.store(TOTAL + column, tl.sum(total, 0).to(TOTAL.dtype.element_ty), mask=column < length)

/* ATTEND_ROWS in vectors of WIDTH floats: see each_width.h. Its types are those of attend_one.h.
 *
 * Lanes are the rows of an item, so scores, their maxima and all sums need no sum across lanes and
 * follow the order of the slots. A row's bits do not depend on other rows, on WIDTH, or on the
 * number of tokens computed at once.
 */
#define floats NAMED(floats)
#define numbers NAMED(numbers)

/* Fused multiply-adds. out[j] (+)= the sum over i of x[j * outer + i * inner] * rows[i], of N
 * numbers j and W vectors. */
TARGET INLINE void NAMED(multiply)(const int N, const int W, const float *x, int64_t outer,
                                   int64_t inner, int64_t count, const float *rows, int64_t lanes,
                                   float *out, const int more) {
    floats sums[4][4], row[4];
    UNROLL for (int j = 0; j < N; j++)
        UNROLL for (int w = 0; w < W; w++)
            sums[j][w] = more ? NAMED(at)(out + j * lanes + w * WIDTH) : (floats){0};
    for (int64_t i = 0; i < count; i++) {
        UNROLL for (int w = 0; w < W; w++) row[w] = NAMED(at)(rows + i * lanes + w * WIDTH);
        UNROLL for (int j = 0; j < N; j++) {
            const float by = x[j * outer + i * inner];
            UNROLL for (int w = 0; w < W; w++)
                sums[j][w] = FUSED(row[w], EACH(by), sums[j][w]);
        }
    }
    UNROLL for (int j = 0; j < N; j++)
        UNROLL for (int w = 0; w < W; w++)
            memcpy(out + j * lanes + w * WIDTH, &sums[j][w], sizeof sums[j][w]);
}

/* The same for any N and W. */
TARGET INLINE void NAMED(product)(const float *x, int64_t outer, int64_t inner, int64_t n,
                                  int64_t count, const float *rows, int64_t lanes, float *out,
                                  const int more) {
    const int most = WIDTH == 16 ? 4 : 2; /* sums, as registers allow */
    for (int64_t r = 0; r < lanes;) {
        const int wide = lanes - r >= most * WIDTH;
        for (int64_t j = 0; j < n;) {
            const int four = n - j >= 4;
#define MULTIPLY_TILE(N, W)                                                                        \
    NAMED(multiply)(N, W, x + j * outer, outer, inner, count, rows + r, lanes, out + j * lanes + r, \
                    more)
            if (wide && four) MULTIPLY_TILE(4, most);
            else if (wide) MULTIPLY_TILE(1, most);
            else if (four) MULTIPLY_TILE(4, 1);
            else MULTIPLY_TILE(1, 1);
#undef MULTIPLY_TILE
            j += four ? 4 : 1;
        }
        r += wide ? most * WIDTH : WIDTH;
    }
}

/* Replace the scores of a block of slots by e^(score - largest), and rescale earlier sums to the
 * new largest score. */
TARGET INLINE void NAMED(soften)(const struct op *op, int64_t first, int64_t slots,
                                 int64_t lanes) {
    const float scale = number(op->arg[12]), cap = number(op->arg[22]);
    for (int64_t r = 0; r < lanes; r += WIDTH) {
        numbers position, keys;
        memcpy(&position, tile.position + r, sizeof position);
        memcpy(&keys, tile.keys + r, sizeof keys);
        const floats slope = NAMED(at)(tile.slope + r);
        const floats before = NAMED(at)(tile.most + r);
        floats most = before, all = NAMED(at)(tile.all + r), by;
        for (int64_t s = 0; s < slots; s++) {
            float *at = tile.scores + s * lanes + r;
            const numbers ago = position - (int32_t)(first + s);
            const numbers seen = ~(ago >> 31) & (ago - keys) >> 31; /* 0 <= ago < keys */
            floats score = NAMED(at)(at) * scale;
            if (op->arg[24]) score -= slope * __builtin_convertvector(ago, floats);
            if (cap > 0.0f) score = NAMED(capped)(score, cap);
            score = (floats)(((numbers)score & seen) | ((numbers)((floats){0} - INFINITY) & ~seen));
            const numbers larger = score > most;
            most = (floats)(((numbers)score & larger) | ((numbers)most & ~larger));
            memcpy(at, &score, sizeof score);
        }
        /* if all are masked, all are -infinity: e^(-infinity - 0) is 0 */
        const floats from = (floats)((numbers)most & (most > (floats){0} - INFINITY));
        by = NAMED(exponentials)(before - from);
        all *= by;
        for (int64_t s = 0; s < slots; s++) {
            float *at = tile.scores + s * lanes + r;
            const floats e = NAMED(exponentials)(NAMED(at)(at) - from);
            all += e;
            memcpy(at, &e, sizeof e);
        }
        memcpy(tile.most + r, &most, sizeof most);
        memcpy(tile.all + r, &all, sizeof all);
        for (int64_t i = 0; i < op->arg[11]; i++) {
            const floats sum = NAMED(at)(tile.sums + i * lanes + r) * by;
            memcpy(tile.sums + i * lanes + r, &sum, sizeof sum);
        }
    }
}

/* Convert `count` numbers to float32. */
TARGET INLINE const float *NAMED(widen)(const void *from, int64_t at, int64_t count,
                                        int64_t kind, float *room) {
    if (kind == FLOATS) return (const float *)from + at;
    const uint16_t *bits = (const uint16_t *)from + at;
    if (kind == HALF_FLOATS)
        for (int64_t i = 0; i < count; i++) room[i] = half(bits[i]);
    else
        for (int64_t i = 0; i < count; i++) room[i] = widened(bits[i]);
    return room;
}

TARGET static void NAMED(attend_rows)(const struct op *op, int64_t item) {
    const int64_t group = op->arg[9], size = op->arg[10], values = op->arg[11];
    const int64_t heads = op->arg[8], tokens = op->arg[20], many = tokens_of_tile(op);
    /* the last tokens see the most slots: they come first */
    const int64_t pair = item % (op->arg[7] * heads), b = pair / heads, head = pair % heads;
    const int64_t begin = (tiles_of_rows(op) - 1 - item / (op->arg[7] * heads)) * many;
    const int64_t end = begin + many < tokens ? begin + many : tokens, rows = (end - begin) * group;
    const int64_t lanes = (rows + WIDTH - 1) / WIDTH * WIDTH;
    const int64_t start = ((const int64_t *)address(op->arg[14]))[b * op->arg[15]];
    const int64_t window = op->arg[13], last = start + end;
    const float *sinks = address(op->arg[23]), *slopes = address(op->arg[24]);
    int64_t first = first_slot(window, start + begin);
    for (int64_t r = 0; r < lanes; r++) {
        const int64_t row = r < rows ? r : 0, t = begin + row / group;
        const float *q = (const float *)address(op->arg[0]) + b * op->arg[17] +
                         (head * group + row % group) * op->arg[18] + t * op->arg[19];
        for (int64_t i = 0; i < size; i++) tile.q[i * lanes + r] = q[i];
        tile.position[r] = (int32_t)(start + t);
        tile.keys[r] = (int32_t)(start + t + 1 - first_slot(window, start + t));
        tile.most[r] = sinks ? sinks[head * group + row % group] : -INFINITY;
        tile.all[r] = sinks ? 1.0f : 0.0f;
        tile.slope[r] = slopes ? slopes[head * group + row % group] : 0.0f;
    }
    memset(tile.sums, 0, (size_t)(values * lanes) * sizeof(float));
    for (first -= first % KEYS; first < last; first += KEYS) {
        const int64_t slots = last - first < KEYS ? last - first : KEYS;
        const float *k = NAMED(widen)(address(op->arg[1]),
                                      b * op->arg[3] + head * op->arg[5] + first * size,
                                      slots * size, op->arg[16], tile.k);
        const float *v = NAMED(widen)(address(op->arg[2]),
                                      b * op->arg[4] + head * op->arg[6] + first * values,
                                      slots * values, op->arg[16], tile.v);
        NAMED(product)(k, size, 1, slots, size, tile.q, lanes, tile.scores, 0);
        NAMED(soften)(op, first, slots, lanes);
        NAMED(product)(v, 1, values, values, slots, tile.scores, lanes, tile.sums, 1);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = begin + r / group;
        float *out = (float *)address(op->arg[21]) +
                     (((b * tokens + t) * heads + head) * group + r % group) * values;
        for (int64_t i = 0; i < values; i++) out[i] = tile.sums[i * lanes + r] / tile.all[r];
    }
}

#undef floats
#undef numbers

/* RECUR in vectors of WIDTH floats: see each_width.h.
 *
 * A column of the state is summed over rows by fused multiply-adds: the same bits for every WIDTH.
 */
#define MANY 4 /* vectors of columns at a time */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH)));
#define floats NAMED(floats)

/* WIDTH numbers, or fewer unless `whole`. */
TARGET INLINE floats NAMED(some)(const int whole, const float *from, int64_t count) {
    floats found = {0};
    memcpy(&found, from, whole ? sizeof found : 4 * (size_t)count);
    return found;
}

TARGET INLINE void NAMED(put)(const int whole, float *to, floats numbers, int64_t count) {
    memcpy(to, &numbers, whole ? sizeof numbers : 4 * (size_t)count);
}

/* N vectors of columns from `e` on, for all tokens; only `count` columns unless `whole`. The next
 * token's read of a row is accumulated right after this token's write. */
TARGET INLINE void NAMED(recur_columns)(const int N, const int whole, const int plain,
                                        const struct head *x, int64_t e, int64_t count) {
    floats read[N];
    const float *k = x->k, *q = x->q, *v = x->v + e;
    float *z = x->z + e, *row = x->state + e;
    UNROLL for (int n = 0; n < N; n++) read[n] = (floats){0};
    for (int64_t d = 0; !plain && d < x->rows; d++, row += x->columns) {
        UNROLL for (int n = 0; n < N; n += 16 / WIDTH) FETCH(row + 16 * x->columns + n * WIDTH);
        UNROLL for (int n = 0; n < N; n++)
            read[n] = FUSED(EACH(k[d]), NAMED(some)(whole, row + n * WIDTH, count), read[n]);
    }
    for (int64_t t = 0; t < x->tokens; t++) {
        const float *next = t + 1 < x->tokens ? k + x->k_far : k;
        const float beta = x->beta[t * x->heads], factor = exponential(x->logs[t * x->heads]);
        const floats decay = EACH(factor);
        floats written[N], sum[N];
        UNROLL for (int n = 0; n < N; n++) {
            const floats value = NAMED(some)(whole, v + n * WIDTH, count);
            written[n] = (floats)FUSED(-decay, read[n], value) * EACH(beta);
            sum[n] = (floats){0};
            if (!plain) read[n] = (floats){0};
        }
        row = x->state + e;
        for (int64_t d = 0; d < x->rows; d++, row += x->columns) {
            UNROLL for (int n = 0; n < N; n++) {
                const floats kept = NAMED(some)(whole, row + n * WIDTH, count) * decay;
                const floats now = FUSED(EACH(k[d]), written[n], kept);
                NAMED(put)(whole, row + n * WIDTH, now, count);
                sum[n] = FUSED(EACH(q[d]), now, sum[n]);
                if (!plain) read[n] = FUSED(EACH(next[d]), now, read[n]);
            }
        }
        UNROLL for (int n = 0; n < N; n++) NAMED(put)(whole, z + n * WIDTH, sum[n], count);
        k = next, q += x->q_far, v += x->v_far, z += x->heads * x->columns;
    }
}

TARGET INLINE void NAMED(recur_some)(const int plain, const struct head *x, int64_t e, int64_t last) {
    for (; e + MANY * WIDTH <= last; e += MANY * WIDTH)
        NAMED(recur_columns)(MANY, 1, plain, x, e, WIDTH);
    for (; e + WIDTH <= last; e += WIDTH) NAMED(recur_columns)(1, 1, plain, x, e, WIDTH);
    if (e < last) NAMED(recur_columns)(1, 0, plain, x, e, last - e);
}

TARGET static void NAMED(recur)(const struct op *op, int64_t item) {
    const struct head x = head_of(op, item / strips_of(op));
    const int64_t e = item % strips_of(op) * STRIP, last = e + STRIP < x.columns ? e + STRIP : x.columns;
    if (op->arg[19])
        NAMED(recur_some)(1, &x, e, last);
    else
        NAMED(recur_some)(0, &x, e, last);
}

#undef floats
#undef MANY

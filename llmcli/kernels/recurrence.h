/* RECUR in vectors of WIDTH floats: see each_width.h.
 *
 * A column of the state is summed from row to row, each product and its addition rounded once: the
 * same bits for every WIDTH.
 */
#define MANY 4 /* vectors of columns that are taken together */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH)));
#define floats NAMED(floats)

/* WIDTH numbers, or fewer where that is not `whole`. */
TARGET INLINE floats NAMED(some)(const int whole, const float *from, int64_t count) {
    floats found = {0};
    memcpy(&found, from, whole ? sizeof found : 4 * (size_t)count);
    return found;
}

TARGET INLINE void NAMED(put)(const int whole, float *to, floats numbers, int64_t count) {
    memcpy(to, &numbers, whole ? sizeof numbers : 4 * (size_t)count);
}

/* N vectors of columns from `e` on; of one that is not `whole` `count` columns. */
TARGET INLINE void NAMED(recur_columns)(const int N, const int whole, const struct head *x,
                                        int64_t e, int64_t count) {
    const floats decay = EACH(x->decay);
    floats written[N], z[N];
    float *row = x->state + e;
    UNROLL for (int n = 0; n < N; n++) written[n] = z[n] = (floats){0};
    for (int64_t d = 0; !x->plain && d < x->rows; d++, row += x->columns)
        UNROLL for (int n = 0; n < N; n++)
            written[n] = FUSED(EACH(x->k[d]), NAMED(some)(whole, row + n * WIDTH, count), written[n]);
    UNROLL for (int n = 0; n < N; n++) {
        const floats v = NAMED(some)(whole, x->v + e + n * WIDTH, count);
        written[n] = (floats)FUSED(-decay, written[n], v) * EACH(x->beta);
    }
    row = x->state + e;
    for (int64_t d = 0; d < x->rows; d++, row += x->columns)
        UNROLL for (int n = 0; n < N; n++) {
            const floats kept = NAMED(some)(whole, row + n * WIDTH, count) * decay;
            const floats now = FUSED(EACH(x->k[d]), written[n], kept);
            NAMED(put)(whole, row + n * WIDTH, now, count);
            z[n] = FUSED(EACH(x->q[d]), now, z[n]);
        }
    UNROLL for (int n = 0; n < N; n++) NAMED(put)(whole, x->z + e + n * WIDTH, z[n], count);
}

TARGET static void NAMED(recur)(const struct op *op, int64_t item) {
    for (int64_t lane = 0; lane < lanes_of(op, 7); lane++) {
        const struct head x = head_of(op, item, lane);
        int64_t e = 0;
        for (; e + MANY * WIDTH <= x.columns; e += MANY * WIDTH)
            NAMED(recur_columns)(MANY, 1, &x, e, WIDTH);
        for (; e + WIDTH <= x.columns; e += WIDTH) NAMED(recur_columns)(1, 1, &x, e, WIDTH);
        if (e < x.columns) NAMED(recur_columns)(1, 0, &x, e, x.columns - e);
    }
}

#undef floats
#undef MANY

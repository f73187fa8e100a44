/* Many float32 rows times a 16-bit matrix, in vectors of WIDTH floats: see each_width.h and
 * MULTIPLY_ROWS in bfloat16.c.
 *
 * Lanes are rows of w, so that an output is summed over the columns from left to right by fused
 * multiply-adds: the same bits for every WIDTH, number of rows and chunk.
 */
#define LANES_OF_W (2 * WIDTH)
#define ROWS_OF_X (WIDTH == 16 ? 12 : 6) /* with sums in registers */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t NAMED(words) __attribute__((vector_size(4 * WIDTH)));
#define floats NAMED(floats)
#define words NAMED(words)

/* `lanes` rows of w as a zero-padded panel: [columns, LANES_OF_W] of float16 converted to float32,
 * or [pairs of columns, LANES_OF_W] of bfloat16. */
TARGET INLINE void NAMED(turn)(const int halves, const uint16_t *w, int64_t stride, int64_t lanes,
                               int64_t columns, uint32_t *panel) {
    const int64_t pairs = (columns + 1) / 2, whole = columns / WIDTH * WIDTH;
    for (int64_t n = 0; n < LANES_OF_W; n++) {
        const uint16_t *row = w + n * stride;
        float wide[2 * PAIRS];
        for (int64_t k = 0; halves && n < lanes && k < whole; k += WIDTH) {
            const floats some = (floats)HALVES(row + k);
            memcpy(wide + k, &some, sizeof some);
        }
        for (int64_t k = whole; halves && n < lanes && k < columns; k++) {
            uint16_t bits;
            memcpy(&bits, row + k, 2), wide[k] = half(bits);
        }
        for (int64_t k = 0; halves && k < columns; k++)
            panel[k * LANES_OF_W + n] = n < lanes ? bits_of(wide[k]) : 0;
        for (int64_t i = 0; !halves && i < pairs; i++) {
            uint32_t pair = 0;
            if (n < lanes) memcpy(&pair, row + 2 * i, 2 * i + 1 < columns ? 4 : 2);
            panel[i * LANES_OF_W + n] = pair;
        }
    }
}

/* M rows of x (a compile-time constant) times a panel. */
TARGET INLINE void NAMED(some_rows)(const int M, const int halves, const uint32_t *panel,
                                    const float *x, int64_t x_stride, int64_t columns, float *out,
                                    int64_t out_stride, const int more) {
    floats sums[ROWS_OF_X][2];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int h = 0; h < 2; h++) {
            sums[m][h] = (floats){0};
            if (more) memcpy(&sums[m][h], out + m * out_stride + h * WIDTH, sizeof sums[m][h]);
        }
    for (int64_t k = 0; k < columns; k += 2) {
        words pair[2];
        floats even[2], odd[2];
        memcpy(pair, panel + (halves ? k : k / 2) * LANES_OF_W, sizeof pair);
        if (halves) {
            memcpy(even, pair, sizeof even);
            memcpy(odd, panel + (k + 1) * LANES_OF_W, sizeof odd);
        } else {
            UNROLL for (int h = 0; h < 2; h++) {
                even[h] = (floats)(pair[h] << 16);
                odd[h] = (floats)(pair[h] & 0xffff0000);
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int h = 0; h < 2; h++)
                sums[m][h] = FUSED(even[h], EACH(x[m * x_stride + k]), sums[m][h]);
        if (k + 1 == columns) break;
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int h = 0; h < 2; h++)
                sums[m][h] = FUSED(odd[h], EACH(x[m * x_stride + k + 1]), sums[m][h]);
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int h = 0; h < 2; h++)
            memcpy(out + m * out_stride + h * WIDTH, &sums[m][h], sizeof sums[m][h]);
}

TARGET INLINE void NAMED(all_rows)(const int halves, int64_t rows, const uint32_t *panel,
                                   const float *x, int64_t x_stride, int64_t columns, float *out,
                                   int64_t out_stride, int more) {
    for (int64_t m = 0; m < rows;) {
        const int64_t left = rows - m;
#define ROWS_AT_ONCE(M)                                                                            \
    do {                                                                                           \
        NAMED(some_rows)(M, halves, panel, x + m * x_stride, x_stride, columns,                    \
                         out + m * out_stride, out_stride, more);                                  \
        m += M;                                                                                    \
    } while (0)
        if (left >= ROWS_OF_X) ROWS_AT_ONCE(ROWS_OF_X);
        else if (left >= 4) ROWS_AT_ONCE(4);
        else ROWS_AT_ONCE(1);
#undef ROWS_AT_ONCE
    }
}

TARGET INLINE void NAMED(outputs)(const int halves, const struct op *op, int64_t item) {
    const int64_t rows = op->arg[5], outputs = op->arg[6], columns = op->arg[7];
    const int64_t end = (item + 1) * OUTPUTS < outputs ? (item + 1) * OUTPUTS : outputs;
    const float *x = address(op->arg[0]), *bias = address(op->arg[8]);
    uint32_t panel[(2 * PAIRS + 1) * LANES_OF_W] __attribute__((aligned(64)));
    float room[MOST_AT_ONCE * LANES_OF_W] __attribute__((aligned(64)));
    for (int64_t n = item * OUTPUTS; n < end; n += LANES_OF_W) {
        const int64_t lanes = end - n < LANES_OF_W ? end - n : LANES_OF_W;
        const uint16_t *w = (const uint16_t *)address(op->arg[1]) + n * op->arg[2];
        float *out = (float *)address(op->arg[3]) + n;
        for (int64_t k = 0; k < columns; k += 2 * PAIRS) {
            const int64_t some = columns - k < 2 * PAIRS ? columns - k : 2 * PAIRS;
            NAMED(turn)(halves, w + k, op->arg[2], lanes, some, panel);
            if (lanes == LANES_OF_W) {
                NAMED(all_rows)(halves, rows, panel, x + k, op->arg[9], some, out, op->arg[4], k > 0);
                continue;
            }
            for (int64_t m = 0; m < rows; m += MOST_AT_ONCE) {
                const int64_t many = rows - m < MOST_AT_ONCE ? rows - m : MOST_AT_ONCE;
                for (int64_t i = 0; i < many; i++)
                    memcpy(room + i * LANES_OF_W, out + (m + i) * op->arg[4], 4 * (size_t)lanes);
                NAMED(all_rows)(halves, many, panel, x + m * op->arg[9] + k, op->arg[9], some, room,
                                LANES_OF_W, k > 0);
                for (int64_t i = 0; i < many; i++)
                    memcpy(out + (m + i) * op->arg[4], room + i * LANES_OF_W, 4 * (size_t)lanes);
            }
        }
        for (int64_t m = 0; bias && m < rows; m++)
            for (int64_t i = 0; i < lanes; i++) out[m * op->arg[4] + i] += bias[n + i];
    }
}

TARGET static void NAMED(multiply_rows)(const struct op *op, int64_t item) {
    if (op->arg[10])
        NAMED(outputs)(1, op, item);
    else
        NAMED(outputs)(0, op, item);
}

#undef floats
#undef words
#undef LANES_OF_W
#undef ROWS_OF_X

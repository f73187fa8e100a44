/* MULTIPLY_HEADS in vectors of WIDTH floats: see each_width.h.
 *
 * A product with a row is summed in 16 lanes, lane j taking numbers j, j + 16, …; lanes are then
 * added in pairs: j + 8, j + 4, j + 2, j + 1. Rows that are inputs are added in order.
 * Multiply-adds are fused: the same bits for every WIDTH.
 */
#define SHARE (16 / WIDTH) /* vectors of 16 lanes */
#define ROWS 4             /* of w at a time */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH)));
#define floats NAMED(floats)

TARGET INLINE floats NAMED(weights)(const int numbers, const void *w, int64_t at) {
    floats found;
    if (numbers == BFLOATS) return (floats)WIDENED((const uint16_t *)w + at);
    if (numbers == HALF_FLOATS) return (floats)HALVES((const uint16_t *)w + at);
    memcpy(&found, (const float *)w + at, sizeof found);
    return found;
}

/* Add `rows` (1 or ROWS) numbers of x times the rows of w from `at` on to `out`. */
TARGET INLINE void NAMED(add_rows)(const int numbers, const int rows, const float *x, const void *w,
                                   int64_t at, int64_t stride, int64_t columns, float *out) {
    for (int64_t i = 0; i < columns; i += WIDTH) {
        floats sum;
        memcpy(&sum, out + i, sizeof sum);
        UNROLL for (int r = 0; r < rows; r++)
            sum = FUSED(EACH(x[r]), NAMED(weights)(numbers, w, at + r * stride + i), sum);
        memcpy(out + i, &sum, sizeof sum);
    }
}

/* Dot products of these rows of w with all of x. */
TARGET INLINE void NAMED(products)(const int numbers, const int rows, const float *x,
                                   const void *w, int64_t at, int64_t stride, int64_t inputs,
                                   float *out) {
    floats sums[ROWS][SHARE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < SHARE; h++) sums[r][h] = (floats){0};
    for (int64_t i = 0; i < inputs; i += 16)
        UNROLL for (int h = 0; h < SHARE; h++) {
            floats part;
            memcpy(&part, x + i + h * WIDTH, sizeof part);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][h] = FUSED(
                    part, NAMED(weights)(numbers, w, at + r * stride + i + h * WIDTH), sums[r][h]);
        }
    UNROLL for (int r = 0; r < rows; r++) {
        float lanes[16];
        memcpy(lanes, sums[r], sizeof lanes);
        UNROLL for (int half = 8; half; half /= 2)
            UNROLL for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
        out[r] = lanes[0];
    }
}

TARGET INLINE void NAMED(head)(const int numbers, const struct op *op, int64_t item) {
    const int64_t head = item / parts_of_head(op), batch = op->arg[7], heads = op->arg[8];
    const int64_t inputs = op->arg[9], outputs = op->arg[10], behind = op->arg[11];
    const int64_t turned = op->arg[13], each = turned ? COLUMNS : OUTPUTS;
    const int64_t first = item % parts_of_head(op) * each, stride = op->arg[5];
    const int64_t last = first + each < outputs ? first + each : outputs;
    const int64_t rows = turned ? inputs : last - first;
    const int64_t at = head * op->arg[4] + (turned ? first : first * stride);
    const float *x = (const float *)address(op->arg[0]) + head * op->arg[2];
    float *out = (float *)address(op->arg[6]) + head * (outputs + behind);
    const int64_t far = heads * (outputs + behind); /* from sequence to sequence */
    const void *w = address(op->arg[3]);
    for (int64_t b = 0; b < batch; b++) {
        if (turned) memset(out + b * far + first, 0, 4 * (size_t)(last - first));
        if (last == outputs)
            memcpy(out + b * far + outputs, x + b * op->arg[1] + inputs, 4 * (size_t)behind);
    }
    for (int64_t n = 0, some; n < rows; n += some) {
        some = n + ROWS <= rows ? ROWS : 1;
        for (int64_t b = 0; b < batch; b++) {
            const float *row = x + b * op->arg[1];
            float *to = out + b * far + first;
#define SOME(work, from, to, length)                                                               \
    (some == ROWS ? NAMED(work)(numbers, ROWS, from, w, at + n * stride, stride, length, to)       \
                  : NAMED(work)(numbers, 1, from, w, at + n * stride, stride, length, to))
            if (turned)
                SOME(add_rows, row + n, to, last - first);
            else
                SOME(products, row, to + n, inputs);
#undef SOME
        }
    }
}

TARGET static void NAMED(multiply_heads)(const struct op *op, int64_t item) {
    switch (op->arg[12]) {
        case BFLOATS: NAMED(head)(BFLOATS, op, item); break;
        case HALF_FLOATS: NAMED(head)(HALF_FLOATS, op, item); break;
        default: NAMED(head)(FLOATS, op, item);
    }
}

#undef floats
#undef SHARE
#undef ROWS

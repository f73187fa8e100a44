/* Per-head products of latent attention, on float32 rows. */
#include "program.h"

/* JOIN: concatenate two rows. Rows of a group of x are x_stride apart. An item is a group.
 * 0 x, 1 x_stride, 2 numbers of a row of x, 3 y (contiguous), 4 numbers of a row of y,
 * 5 out (contiguous), 6 groups, 7 rows of a group, 8 stride of groups of x */
static int64_t items_join(const struct op *op) { return op->arg[6]; }

static void work_join(const struct op *op, int64_t item, int64_t level) {
    const int64_t first = op->arg[2], second = op->arg[4], rows = op->arg[7];
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[8];
    const float *y = (const float *)address(op->arg[3]) + item * rows * second;
    float *out = (float *)address(op->arg[5]) + item * rows * (first + second);
    (void)level;
    for (int64_t i = 0; i < rows; i++, x += op->arg[1], y += second, out += first + second) {
        memcpy(out, x, 4 * (size_t)first);
        memcpy(out + first, y, 4 * (size_t)second);
    }
}
const struct kernel kernel_join = {items_join, work_join, NULL};

/* MULTIPLY_HEADS: for each sequence and head a row of x times the head's matrix of w [H, ·, ·],
 * whose rows are outputs, or inputs if `turned`. The number of columns of w is a multiple of 16.
 * Further numbers after a row's inputs are copied after its outputs. An item is some outputs of a
 * head, for all sequences; see heads.h.
 * 0 x, 1 stride of sequences of x, 2 of heads of x, 3 w, 4 stride of heads of w, 5 of rows of w,
 * 6 out (contiguous), 7 B, 8 H, 9 inputs, 10 outputs, 11 numbers behind them, 12 `enum numbers` of w,
 * 13 turned */
#define OUTPUTS 32  /* rows of w per item */
#define COLUMNS 256 /* columns of w per item if `turned` */

INLINE int64_t parts_of_head(const struct op *op) {
    const int64_t each = op->arg[13] ? COLUMNS : OUTPUTS;
    return (op->arg[10] + each - 1) / each;
}

static int64_t items_multiply_heads(const struct op *op) { return op->arg[8] * parts_of_head(op); }

static int fetch_multiply_heads(const struct op *op, int64_t piece) {
    return fetch_piece(address(op->arg[3]), op->arg[8] * op->arg[4] * bytes_of(op->arg[12]), piece);
}

#define TEMPLATE "heads.h"
#include "each_width.h"
BY_LEVEL(multiply_heads)
const struct kernel kernel_multiply_heads = {
    items_multiply_heads, work_multiply_heads, fetch_multiply_heads,
};

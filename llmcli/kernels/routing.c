/* Choice and weights of experts, on float32 rows: see vectors.h for sums. */
#include "program.h"
#include "vectors.h"

/* MULTIPLY_FLOAT: out = x W^T + b, with a small matrix. An item is 4 rows, 16 outputs of each.
 * 0 x, 1 x_stride, 2 w, 3 w_stride, 4 out (contiguous), 5 rows M, 6 outputs N, 7 columns K, 8 b or 0 */
#define OUTPUTS 16
#define TOGETHER 4 /* rows of x per pass over a row of w */
INLINE int64_t parts_of(const struct op *op) { return (op->arg[6] + OUTPUTS - 1) / OUTPUTS; }
static int64_t items_multiply_float(const struct op *op) {
    return (op->arg[5] + TOGETHER - 1) / TOGETHER * parts_of(op);
}

INLINE void dots(const int rows, const float *x, int64_t x_stride, const float *w, int64_t columns,
                 float *out, int64_t out_stride, float b) {
    const int64_t whole = columns / LANES * LANES;
    float lanes[TOGETHER][LANES] = {{0}};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < LANES; j++) lanes[m][j] += x[m * x_stride + i + j] * w[i + j];
    for (int m = 0; m < rows; m++) {
        for (int64_t i = whole; i < columns; i++) lanes[m][i - whole] += x[m * x_stride + i] * w[i];
        out[m * out_stride] = folded(lanes[m]) + b;
    }
}

INLINE void multiply_float(const struct op *op, int64_t item) {
    const int64_t outputs = op->arg[6], m = item / parts_of(op) * TOGETHER;
    const int64_t first = item % parts_of(op) * OUTPUTS, left = op->arg[5] - m;
    const int64_t last = first + OUTPUTS < outputs ? first + OUTPUTS : outputs;
    const float *x = (const float *)address(op->arg[0]) + m * op->arg[1], *b = address(op->arg[8]);
    float *out = (float *)address(op->arg[4]) + m * outputs;
    for (int64_t n = first; n < last; n++) {
        const float *w = (const float *)address(op->arg[2]) + n * op->arg[3], plus = b ? b[n] : 0.0f;
        if (left >= TOGETHER)
            dots(TOGETHER, x, op->arg[1], w, op->arg[7], out + n, outputs, plus);
        else
            for (int64_t i = 0; i < left; i++)
                dots(1, x + i * op->arg[1], 0, w, op->arg[7], out + i * outputs + n, 0, plus);
    }
}
EACH_LEVEL(multiply_float)
const struct kernel kernel_multiply_float = {items_multiply_float, work_multiply_float, NULL};

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* The softmax of `count` numbers. */
INLINE void softmax(const float *x, float *out, int64_t count) {
    float most = x[0], sum = 0.0f;
    for (int64_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < count; i++) sum += out[i] = exponential(x[i] - most);
    for (int64_t i = 0; i < count; i++) out[i] /= sum;
}

/* SHARE: the softmax of each row, or the sigmoid of each number. An item is a row.
 * 0 x (contiguous), 1 out, 2 rows, 3 columns, 4 whether it is the sigmoid */
static int64_t items_share(const struct op *op) { return op->arg[2]; }

INLINE void share(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[3];
    const float *x = (const float *)address(op->arg[0]) + item * columns;
    float *out = (float *)address(op->arg[1]) + item * columns;
    if (op->arg[4])
        for (int64_t i = 0; i < columns; i++) out[i] = sigmoid(x[i]);
    else
        softmax(x, out, columns);
}
EACH_LEVEL(share)
const struct kernel kernel_share = {items_share, work_share, NULL};

/* Whether `a` comes before `b` in descending order: NaN before all numbers, as in PyTorch. */
INLINE int larger(float a, float b) { return a > b || (a != a && b == b); }

/* The first of the largest unused numbers; -1 if all are used. */
INLINE int64_t largest(const float *x, const float *used, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (used[i] == 0.0f && (best < 0 || larger(x[i], x[best]))) best = i;
    return best;
}

/* The sum of the `most` (1 or 2) largest numbers. */
INLINE float sum_of_largest(const float *x, int64_t count, int64_t most) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        if (larger(x[i], first)) second = first, first = x[i];
        else if (larger(x[i], second)) second = x[i];
    }
    return most == 1 ? first : first + second;
}

/* CHOOSE: indices of the K largest of each row plus a correction, in descending order, of equal
 * ones the first. Scores outside the best groups (by the sum of the largest, or two largest) count
 * as -infinity. An item is a row.
 * 0 scores (contiguous), 1 out int64 [rows, K], 2 rows, 3 columns E, 4 K, 5 correction or 0,
 * 6 groups, 7 kept groups, 8 room [rows, 3 E], 9 how many of a group's largest are summed: 1 or 2 */
static int64_t items_choose(const struct op *op) { return op->arg[2]; }

INLINE void choose(const struct op *op, int64_t item) {
    const int64_t experts = op->arg[3], groups = op->arg[6], each = experts / groups;
    const float *scores = (const float *)address(op->arg[0]) + item * experts;
    const float *correction = address(op->arg[5]);
    int64_t *out = (int64_t *)address(op->arg[1]) + item * op->arg[4];
    float *x = (float *)address(op->arg[8]) + item * 3 * experts;
    float *used = x + experts, *sums = used + experts;
    for (int64_t e = 0; e < experts; e++) {
        x[e] = scores[e] + (correction ? correction[e] : 0.0f);
        used[e] = 0.0f;
    }
    if (groups > 1) {
        for (int64_t g = 0; g < groups; g++)
            sums[g] = sum_of_largest(x + g * each, each, op->arg[9]);
        for (int64_t kept = 0; kept < op->arg[7]; kept++) used[largest(sums, used, groups)] = 1.0f;
        for (int64_t g = 0; g < groups; g++) {
            for (int64_t e = g * each; used[g] == 0.0f && e < (g + 1) * each; e++) x[e] = -INFINITY;
            used[g] = 0.0f;
        }
    }
    for (int64_t k = 0; k < op->arg[4]; k++) used[out[k] = largest(x, used, experts)] = 1.0f;
}
EACH_LEVEL(choose)
const struct kernel kernel_choose = {items_choose, work_choose, NULL};

/* WEIGH: the weights of the chosen experts. An item is a row.
 * 0 scores (contiguous), 1 chosen int64 [rows, K], 2 out [rows, K], 3 rows, 4 columns E, 5 K,
 * 6 whether to take their softmax, 7 whether to divide by their sum, 8 the number added to that,
 * 9 factor, 10 a factor of each expert [E] or 0 */
static int64_t items_weigh(const struct op *op) { return op->arg[3]; }

INLINE void weigh(const struct op *op, int64_t item) {
    const int64_t count = op->arg[5];
    const float *scores = (const float *)address(op->arg[0]) + item * op->arg[4];
    const int64_t *chosen_ = (const int64_t *)address(op->arg[1]) + item * count;
    float *out = (float *)address(op->arg[2]) + item * count, sum = 0.0f;
    const float factor = number(op->arg[9]);
    for (int64_t k = 0; k < count; k++) sum += out[k] = scores[chosen_[k]];
    if (op->arg[6]) softmax(out, out, count);
    for (int64_t k = 0; op->arg[7] && k < count; k++) out[k] /= sum + number(op->arg[8]);
    for (int64_t k = 0; factor != 1.0f && k < count; k++) out[k] *= factor;
    const float *factors = address(op->arg[10]);
    for (int64_t k = 0; factors && k < count; k++) out[k] *= factors[chosen_[k]];
}
EACH_LEVEL(weigh)
const struct kernel kernel_weigh = {items_weigh, work_weigh, NULL};

/* SUM_EXPERTS: out = sum of weight * y, plus z. An item is a token.
 * 0 y [B, K, T, D], 1 weights [B, T, K], 2 z [B, T, D] or 0, 3 out, 4 tokens B T, 5 columns D, 6 K,
 * 7 T */
static int64_t items_sum_experts(const struct op *op) { return op->arg[4]; }

INLINE void sum_experts(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[5], count = op->arg[6], tokens = op->arg[7];
    const float *weights = (const float *)address(op->arg[1]) + item * count;
    const float *y = address(op->arg[0]), *z = address(op->arg[2]);
    float *out = (float *)address(op->arg[3]) + item * columns;
    y += (item / tokens * count * tokens + item % tokens) * columns;
    for (int64_t k = 0; k < count; k++, y += tokens * columns)
        for (int64_t i = 0; i < columns; i++)
            out[i] = k ? out[i] + y[i] * weights[k] : y[i] * weights[k];
    for (int64_t i = 0; z && i < columns; i++) out[i] += z[item * columns + i];
}
EACH_LEVEL(sum_experts)
const struct kernel kernel_sum_experts = {items_sum_experts, work_sum_experts, NULL};

/* SCALE_ROWS: each row times its factor. An item is a row.
 * 0 x (contiguous), 1 factors [rows], 2 out, 3 rows, 4 columns */
static int64_t items_scale_rows(const struct op *op) { return op->arg[3]; }

INLINE void scale_rows(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[4];
    const float factor = ((const float *)address(op->arg[1]))[item];
    float *out = (float *)address(op->arg[2]) + item * op->arg[4];
    for (int64_t i = 0; i < op->arg[4]; i++) out[i] = x[i] * factor;
}
EACH_LEVEL(scale_rows)
const struct kernel kernel_scale_rows = {items_scale_rows, work_scale_rows, NULL};

/* Operations between the products of a decoder, on float32 rows: see vectors.h for sums. */
#include "program.h"
#include "vectors.h"

/* ---- norms ----------------------------------------------------------------------------------- */

/* NORMALIZE: x / sqrt(mean x^2 + eps) * w, or with `centred` (x - mean x) / sqrt(var x + eps) * w + b.
 * An item is a row. Rows of a group are x_stride apart. The offset is added to w, which has one row
 * for all, or several used in turn.
 * 0 x, 1 x_stride, 2 out (contiguous), 3 rows, 4 columns, 5 w, 6 b or 0, 7 eps, 8 centred, 9 offset,
 * 10 rows of a group, 11 stride of groups, 12 rows of w */
static int64_t items_normalize(const struct op *op) { return op->arg[3]; }

INLINE void normalize(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[4], whole = columns / LANES * LANES;
    const float *x = (const float *)address(op->arg[0]) + item / op->arg[10] * op->arg[11]
                     + item % op->arg[10] * op->arg[1];
    float *out = (float *)address(op->arg[2]) + item * columns;
    const float *w = (const float *)address(op->arg[5]) + item % op->arg[12] * columns;
    const float *b = address(op->arg[6]);
    const float offset = number(op->arg[9]);
    float lanes[LANES] = {0}, mean = 0.0f;
    if (op->arg[8]) {
        for (int64_t i = 0; i < whole; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += x[i + j];
        for (int64_t i = whole; i < columns; i++) lanes[i - whole] += x[i];
        mean = folded(lanes) / (float)columns;
        memset(lanes, 0, sizeof lanes);
    }
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (int64_t i = whole; i < columns; i++) lanes[i - whole] += (x[i] - mean) * (x[i] - mean);
    float by = 1.0f / sqrtf(folded(lanes) / (float)columns + number(op->arg[7]));
    if (b)
        for (int64_t i = 0; i < columns; i++) out[i] = (x[i] - mean) * by * (w[i] + offset) + b[i];
    else
        for (int64_t i = 0; i < columns; i++) out[i] = (x[i] - mean) * by * (w[i] + offset);
}
EACH_LEVEL(normalize)
const struct kernel kernel_normalize = {items_normalize, work_normalize, NULL};

/* ---- positions ------------------------------------------------------------------------------- */

/* ROTATE: x [B, T, N, d] into out (contiguous), the first R numbers of each of the N heads by the
 * tables cos and sin [positions, R], whose first half of sin is negative. An item is a token.
 * Token t of sequence b has the position starts[b * starts_stride] + t.
 * 0 x, 1 stride of tokens, 2 out, 3 sequences B, 4 tokens T, 5 heads N, 6 size d, 7 rotated R,
 * 8 cos, 9 sin, 10 starts, 11 starts_stride */
static int64_t items_rotate(const struct op *op) { return op->arg[3] * op->arg[4]; }

INLINE void rotate(const struct op *op, int64_t item) {
    const int64_t heads = op->arg[5], size = op->arg[6], rotated = op->arg[7], half = rotated / 2;
    const int64_t *starts = address(op->arg[10]), token = item % op->arg[4];
    const int64_t at = starts[item / op->arg[4] * op->arg[11]] + token;
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    const float *cosines = (const float *)address(op->arg[8]) + at * rotated;
    const float *sines = (const float *)address(op->arg[9]) + at * rotated;
    float *out = (float *)address(op->arg[2]) + item * heads * size;
    for (int64_t n = 0; n < heads; n++, x += size, out += size) {
        for (int64_t i = 0; i < half; i++)
            out[i] = x[i] * cosines[i] + x[i + half] * sines[i];
        for (int64_t i = half; i < rotated; i++)
            out[i] = x[i] * cosines[i] + x[i - half] * sines[i];
        for (int64_t i = rotated; i < size; i++) out[i] = x[i];
    }
}
EACH_LEVEL(rotate)
const struct kernel kernel_rotate = {items_rotate, work_rotate, NULL};

/* GROW: each token's numbers times 1 + beta * log(1 + (p + first) / original), p its position as in
 * ROTATE, the quotient rounded down. An item is a token.
 * 0 x, 1 stride of tokens, 2 out (contiguous), 3 sequences B, 4 tokens T, 5 columns, 6 beta,
 * 7 original, 8 first, 9 starts, 10 starts_stride */
static int64_t items_grow(const struct op *op) { return op->arg[3] * op->arg[4]; }

INLINE void grow(const struct op *op, int64_t item) {
    const int64_t *starts = address(op->arg[9]), tokens = op->arg[4], columns = op->arg[5];
    const int64_t at = starts[item / tokens * op->arg[10]] + item % tokens;
    const double steps = (double)((at + op->arg[8]) / op->arg[7]);
    const float factor = (float)(1.0 + (double)number(op->arg[6]) * log1p(steps));
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    float *out = (float *)address(op->arg[2]) + item * columns;
    for (int64_t i = 0; i < columns; i++) out[i] = x[i] * factor;
}
EACH_LEVEL(grow)
const struct kernel kernel_grow = {items_grow, work_grow, NULL};

/* ---- keys and values -------------------------------------------------------------------------- */

/* NARROW: float32 to bfloat16 or float16, rounded to even. An item is a row.
 * 0 x, 1 x_stride, 2 out (contiguous), 3 rows, 4 columns, 5 `enum numbers` of out */
static int64_t items_narrow(const struct op *op) { return op->arg[3]; }

INLINE void narrow(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    uint16_t *out = (uint16_t *)address(op->arg[2]) + item * op->arg[4];
    if (op->arg[5] == HALF_FLOATS)
        for (int64_t i = 0; i < op->arg[4]; i++) out[i] = halved(x[i]);
    else
        for (int64_t i = 0; i < op->arg[4]; i++) out[i] = narrowed(x[i]);
}
EACH_LEVEL(narrow)
const struct kernel kernel_narrow = {items_narrow, work_narrow, NULL};

/* STORE: one new row of each head of each sequence into its cache [B, K, C, d], at slot
 * starts[b * starts_stride]. An item is a sequence. Strides are in bytes.
 * 0 x, 1 of sequences, 2 of heads, 3 cache, 4 of sequences, 5 of heads, 6 of slots,
 * 7 sequences B, 8 heads K, 9 bytes of a row, 10 starts, 11 starts_stride, 12 slots C; nothing is
 * written beyond the last */
static int64_t items_store(const struct op *op) { return op->arg[7]; }

static void work_store(const struct op *op, int64_t b, int64_t level) {
    const int64_t at = ((const int64_t *)address(op->arg[10]))[b * op->arg[11]];
    const char *x = (const char *)address(op->arg[0]) + b * op->arg[1];
    char *cache = (char *)address(op->arg[3]) + b * op->arg[4] + at * op->arg[6];
    (void)level;
    for (int64_t k = 0; at < op->arg[12] && k < op->arg[8]; k++)
        memcpy(cache + k * op->arg[5], x + k * op->arg[2], (size_t)op->arg[9]);
}
const struct kernel kernel_store = {items_store, work_store, NULL};

/* ---- element-wise ------------------------------------------------------------------------ */

#define PART 16384 /* numbers per item */

/* The numbers of an item. */
INLINE int64_t end_of(int64_t item, int64_t count) {
    return (item + 1) * PART < count ? (item + 1) * PART : count;
}
INLINE int64_t parts_of(int64_t count) { return (count + PART - 1) / PART; }

/* ADD: out = x + y. 0 x, 1 y, 2 out, 3 count */
static int64_t items_add(const struct op *op) { return parts_of(op->arg[3]); }

INLINE void add(const struct op *op, int64_t item) {
    const float *x = address(op->arg[0]), *y = address(op->arg[1]);
    float *out = address(op->arg[2]);
    for (int64_t i = item * PART, end = end_of(item, op->arg[3]); i < end; i++) out[i] = x[i] + y[i];
}
EACH_LEVEL(add)
const struct kernel kernel_add = {items_add, work_add, NULL};

/* SCALE: out = x * factor. 0 x, 1 factor, 2 out, 3 count */
static int64_t items_scale(const struct op *op) { return parts_of(op->arg[3]); }

INLINE void scale(const struct op *op, int64_t item) {
    const float *x = address(op->arg[0]), factor = number(op->arg[1]);
    float *out = address(op->arg[2]);
    for (int64_t i = item * PART, end = end_of(item, op->arg[3]); i < end; i++) out[i] = x[i] * factor;
}
EACH_LEVEL(scale)
const struct kernel kernel_scale = {items_scale, work_scale, NULL};

/* SOFT_CAP: out = cap * tanh(x / cap). 0 x, 1 cap, 2 out, 3 count */
static int64_t items_soft_cap(const struct op *op) { return parts_of(op->arg[3]); }

INLINE void soft_cap(const struct op *op, int64_t item) {
    const float *x = address(op->arg[0]), cap = number(op->arg[1]);
    float *out = address(op->arg[2]);
    const int64_t end = end_of(item, op->arg[3]);
    int64_t i = item * PART;
    for (; i + VECTOR <= end; i += VECTOR) {
        vector part;
        memcpy(&part, x + i, sizeof part);
        part = soft_capped(part, cap);
        memcpy(out + i, &part, sizeof part);
    }
    for (; i < end; i++) out[i] = soft_capped((vector){0} + x[i], cap)[0];
}
EACH_LEVEL(soft_cap)
const struct kernel kernel_soft_cap = {items_soft_cap, work_soft_cap, NULL};

/* The numbers of `program.py`. */
enum activation { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID };

INLINE vector activated(const int kind, vector x) {
    if (kind == RELU || kind == RELU2) {
        x = chosen(x > 0.0f, x, chosen(x != x, x, (vector){0}));
        return kind == RELU ? x : x * x;
    }
    if (kind == GELU) {
        vector y = x * 0.70710678f;
        for (int j = 0; j < VECTOR; j++) y[j] = erff(y[j]);
        return 0.5f * x * (1.0f + y);
    }
    if (kind == SILU) return silu(x);
    if (kind == SIGMOID) return 1.0f / (1.0f + exponentials(-x));
    vector y = kind == QUICK_GELU ? 1.702f * x
                                  : 1.59576912f * (x + 0.044715f * x * x * x); /* 2 sqrt(2 / pi) */
    return x / (1.0f + exponentials(-y));
}

INLINE void activate_row(const int kind, const float *x, float *out, int64_t count, float limit) {
    vector part = {0}, most = part + limit;
    const int64_t whole = count / VECTOR * VECTOR;
    for (int64_t i = 0; i < whole; i += VECTOR) {
        memcpy(&part, x + i, sizeof part);
        part = activated(kind, chosen(part > most, most, part));
        memcpy(out + i, &part, sizeof part);
    }
    for (int64_t i = whole; i < count; i++)
        out[i] = activated(kind, (vector){0} + (x[i] > limit ? limit : x[i]))[0];
}

#define EACH_ACTIVATION(call)                                                                      \
    switch (op->arg[0]) {                                                                          \
        case SILU: call(SILU); break;                                                              \
        case GELU: call(GELU); break;                                                              \
        case GELU_TANH: call(GELU_TANH); break;                                                    \
        case QUICK_GELU: call(QUICK_GELU); break;                                                  \
        case RELU: call(RELU); break;                                                              \
        case RELU2: call(RELU2); break;                                                            \
        case SIGMOID: call(SIGMOID); break;                                                        \
    }

/* ACTIVATE: out = f(min(x, limit)), rows of x `x_stride` apart. An item is a row.
 * 0 f, 1 x, 2 x_stride, 3 out (contiguous), 4 rows, 5 columns, 6 limit, infinity for none */
static int64_t items_activate(const struct op *op) { return op->arg[4]; }

INLINE void activate(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[1]) + item * op->arg[2];
    float *out = (float *)address(op->arg[3]) + item * op->arg[5];
#define ACTIVATED(f) activate_row(f, x, out, op->arg[5], number(op->arg[6]))
    EACH_ACTIVATION(ACTIVATED)
}
EACH_LEVEL(activate)
const struct kernel kernel_activate = {items_activate, work_activate, NULL};

/* GATE: out = x * y, or with `clamps` x * (clip(y, -limit, limit) + offset). Rows are `x_stride`
 * and `y_stride` apart, those of out contiguous. An item is a row.
 * 0 x, 1 y, 2 y_stride, 3 out, 4 rows, 5 columns, 6 clamps, 7 limit, 8 offset, 9 x_stride */
static int64_t items_gate(const struct op *op) { return op->arg[4]; }

INLINE void gate(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[9];
    const float *y = (const float *)address(op->arg[1]) + item * op->arg[2];
    float *out = (float *)address(op->arg[3]) + item * op->arg[5];
    if (op->arg[6]) {
        const float limit = number(op->arg[7]), offset = number(op->arg[8]);
        for (int64_t i = 0; i < op->arg[5]; i++) {
            const float low = y[i] < -limit ? -limit : y[i];
            out[i] = x[i] * ((low > limit ? limit : low) + offset);
        }
        return;
    }
    for (int64_t i = 0; i < op->arg[5]; i++) out[i] = x[i] * y[i];
}
EACH_LEVEL(gate)
const struct kernel kernel_gate = {items_gate, work_gate, NULL};

/* What lies between the products of a decoder, on float32 rows.
 *
 * Sums go over 16 lanes, lane j taking numbers j, j + 16, …, which are then added in pairs: one order
 * on every level. No fused multiply-add (the build says -ffp-contract=off).
 */
#include "program.h"

#define LANES 16

INLINE float folded(float lanes[LANES]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

/* 8 numbers: a register with AVX2; the compiler takes more where they are smaller. */
#define VECTOR 8
typedef float vector __attribute__((vector_size(4 * VECTOR)));
typedef int32_t ints __attribute__((vector_size(4 * VECTOR)));

/* `a` where the mask is set, else `b`. */
INLINE vector chosen(ints mask, vector a, vector b) {
    return (vector)(((ints)a & mask) | ((ints)b & ~mask));
}

/* e^x, with at most 2 units in the last place of error; 0 below -87.3, at most e^88.
 * x = n log 2 + r, e^r by a polynomial (Cephes). */
INLINE vector exponentials(vector x) {
    vector y = chosen(x > 88.0f, (vector){0} + 88.0f, x);
    y = chosen(y < -87.3f, (vector){0} - 87.3f, y);
    vector n = y * 1.44269504f + 12582912.0f; /* rounded to a whole number in its lowest bits */
    ints power = (ints)n << 23;
    n -= 12582912.0f;
    vector r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vector e = (vector)((ints)p + power);
    return chosen(x < -87.3f, (vector){0}, chosen(x != x, x, e));
}

INLINE float exponential(float x) { return exponentials((vector){0} + x)[0]; }

/* ---- norms ----------------------------------------------------------------------------------- */

/* NORMALIZE: x / sqrt(mean x^2 + eps) * w, or with `centred` (x - mean x) / sqrt(var x + eps) * w + b.
 * An item is a row.
 * 0 x, 1 x_stride, 2 out (contiguous), 3 rows, 4 columns, 5 w, 6 b or 0, 7 eps, 8 centred */
static int64_t items_normalize(const struct op *op) { return op->arg[3]; }

INLINE void normalize(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[4], whole = columns / LANES * LANES;
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    float *out = (float *)address(op->arg[2]) + item * columns;
    const float *w = address(op->arg[5]), *b = address(op->arg[6]);
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
        for (int64_t i = 0; i < columns; i++) out[i] = (x[i] - mean) * by * w[i] + b[i];
    else
        for (int64_t i = 0; i < columns; i++) out[i] = (x[i] - mean) * by * w[i];
}
EACH_LEVEL(normalize)
const struct kernel kernel_normalize = {items_normalize, work_normalize};

/* ---- positions ------------------------------------------------------------------------------- */

/* ROTATE: x [B, T, N, d] into out (contiguous), the first R numbers of each of the N heads by the
 * tables cos and sin [positions, R], whose first half of sin is negative. An item is a token.
 * Token t of sequence b has the position starts[b * starts_stride] + t.
 * 0 x, 1 distance of tokens, 2 out, 3 sequences B, 4 tokens T, 5 heads N, 6 size d, 7 rotated R,
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
const struct kernel kernel_rotate = {items_rotate, work_rotate};

/* ---- keys and values -------------------------------------------------------------------------- */

/* NARROW: float32 to bfloat16, rounded to even. An item is a row.
 * 0 x, 1 x_stride, 2 out (contiguous), 3 rows, 4 columns */
static int64_t items_narrow(const struct op *op) { return op->arg[3]; }

INLINE uint16_t narrowed(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? bits >> 16 | 0x40 : rounded);
}

INLINE void narrow(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    uint16_t *out = (uint16_t *)address(op->arg[2]) + item * op->arg[4];
    for (int64_t i = 0; i < op->arg[4]; i++) out[i] = narrowed(x[i]);
}
EACH_LEVEL(narrow)
const struct kernel kernel_narrow = {items_narrow, work_narrow};

/* STORE: one new row of each head of each sequence into its cache [B, K, C, d], at slot
 * starts[b * starts_stride]. An item is a sequence. Distances are in bytes.
 * 0 x, 1 of sequences, 2 of heads, 3 cache, 4 of sequences, 5 of heads, 6 of slots,
 * 7 sequences B, 8 heads K, 9 bytes of a row, 10 starts, 11 starts_stride, 12 slots C, of which
 * none is written beyond the last */
static int64_t items_store(const struct op *op) { return op->arg[7]; }

static void work_store(const struct op *op, int64_t b, int64_t level) {
    const int64_t at = ((const int64_t *)address(op->arg[10]))[b * op->arg[11]];
    const char *x = (const char *)address(op->arg[0]) + b * op->arg[1];
    char *cache = (char *)address(op->arg[3]) + b * op->arg[4] + at * op->arg[6];
    (void)level;
    for (int64_t k = 0; at < op->arg[12] && k < op->arg[8]; k++)
        memcpy(cache + k * op->arg[5], x + k * op->arg[2], (size_t)op->arg[9]);
}
const struct kernel kernel_store = {items_store, work_store};

/* ---- attention of one token over the cache ---------------------------------------------------- */

/* ATTEND: the G queries of a key/value head with the keys of a block of slots, and their values.
 * An item is a block of `SLOTS` of one head of one sequence; its part of the result goes to `room`:
 * of each query the largest score, the sum of e^(score - largest), and that sum of the values.
 * A query at position p sees slots max(0, p - window + 1) to p. Sizes are multiples of 16.
 * 0 q [B, K, G, d], 1 k, 2 v [B, K, C, ·] bfloat16 (float32 with `wide`), 3 distance of sequences
 * of k, 4 of v, 5 of heads of k, 6 of v, 7 B, 8 K, 9 G, 10 size d, 11 size of a value e,
 * 12 scale, 13 window or 0, 14 starts, 15 starts_stride, 16 room, 17 blocks of room for each head,
 * 18 wide, 19 distance of sequences of q */
#define SLOTS 256
#define MOST_QUERIES 4 /* that share a pass */
#define MOST_SIZE 512  /* of a head */

struct span {
    int64_t first, last; /* slots, and the blocks in which they lie */
};

INLINE struct span span_of(const struct op *op, int64_t b) {
    const int64_t at = ((const int64_t *)address(op->arg[14]))[b * op->arg[15]];
    const int64_t window = op->arg[13];
    return (struct span){window && at - window + 1 > 0 ? at - window + 1 : 0, at + 1};
}

INLINE int64_t blocks_of(const struct op *op, int64_t b) {
    struct span s = span_of(op, b);
    return (s.last + SLOTS - 1) / SLOTS - s.first / SLOTS;
}

static int64_t items_attend(const struct op *op) {
    int64_t items = 0;
    for (int64_t b = 0; b < op->arg[7]; b++) items += blocks_of(op, b) * op->arg[8];
    return items;
}

/* 16 numbers from `at` on as two vectors: of bfloat16 the even and the odd ones, which a shift and a
 * mask make float32; of float32 (`wide`) the first and the last 8. */
INLINE void load(const void *rows, int64_t at, const int wide, vector out[2]) {
    if (wide) {
        memcpy(out, (const float *)rows + at, 2 * sizeof *out);
    } else {
        ints pairs;
        memcpy(&pairs, (const uint16_t *)rows + at, sizeof pairs);
        out[0] = (vector)(pairs << 16);
        out[1] = (vector)(pairs & (int32_t)0xffff0000);
    }
}

/* As `folded`, in registers. */
INLINE float summed(const vector *sums) {
    typedef float four __attribute__((vector_size(16)));
    vector eight = sums[0] + sums[1];
    four low = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    low += __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    low += __builtin_shufflevector(low, low, 2, 3, 2, 3);
    return low[0] + low[1];
}

/* Scores of `slots` keys with G queries, a number that the compiler knows, and their values. */
INLINE void attend_queries(const int G, const int wide, const struct op *op, const float *q,
                           const void *k, const void *v, int64_t slots, float *room) {
    const int64_t size = op->arg[10], values = op->arg[11], stride = values + 2;
    const float scale = number(op->arg[12]);
    float scores[MOST_QUERIES][SLOTS];
    vector queries[MOST_QUERIES][MOST_SIZE / VECTOR];
    for (int g = 0; g < G; g++) {
        scores[g][0] = 0.0f; /* there is a slot, which the compiler does not know */
        for (int64_t i = 0; i < size; i++) { /* as `load` orders keys */
            int64_t j = i % LANES, to = wide ? j : j / 2 + j % 2 * VECTOR;
            memcpy((float *)queries[g] + i - j + to, q + g * size + i, sizeof *q);
        }
    }
    for (int64_t s = 0; s < slots; s++) {
        vector sums[MOST_QUERIES][2] = {{{0}}}, key[2];
        for (int64_t i = 0; i < size; i += LANES) {
            load(k, s * size + i, wide, key);
            UNROLL for (int g = 0; g < G; g++)
                UNROLL for (int h = 0; h < 2; h++)
                    sums[g][h] += queries[g][i / VECTOR + h] * key[h];
        }
        UNROLL for (int g = 0; g < G; g++) scores[g][s] = summed(sums[g]) * scale;
    }
    for (int g = 0; g < G; g++) {
        vector all = {0}, e;
        float most = scores[g][0], lanes[LANES] = {0};
        for (int64_t s = 1; s < slots; s++) most = scores[g][s] > most ? scores[g][s] : most;
        for (int64_t s = slots; s % VECTOR; s++) scores[g][s] = -INFINITY;
        for (int64_t s = 0; s < slots; s += VECTOR) {
            memcpy(&e, scores[g] + s, sizeof e);
            e = exponentials(e - most);
            memcpy(scores[g] + s, &e, sizeof e);
            all += e;
        }
        memcpy(lanes, &all, sizeof all);
        room[g * stride] = most;
        room[g * stride + 1] = folded(lanes);
    }
    for (int64_t i = 0; i < values; i += LANES) {
        vector sums[MOST_QUERIES][2] = {{{0}}}, part[2];
        for (int64_t s = 0; s < slots; s++) {
            load(v, s * values + i, wide, part);
            UNROLL for (int g = 0; g < G; g++)
                UNROLL for (int h = 0; h < 2; h++) sums[g][h] += scores[g][s] * part[h];
        }
        for (int g = 0; g < G; g++)
            for (int j = 0; j < LANES; j++) {
                int from = wide ? j : j / 2 + j % 2 * VECTOR;
                room[g * stride + 2 + i + j] = sums[g][from / VECTOR][from % VECTOR];
            }
    }
}

INLINE void attend(const struct op *op, int64_t item) {
    int64_t b = 0, blocks;
    for (; item >= (blocks = blocks_of(op, b)) * op->arg[8]; b++) item -= blocks * op->arg[8];
    const int64_t head = item / blocks, queries = op->arg[9], wide = op->arg[18];
    const int64_t size = op->arg[10], values = op->arg[11], stride = values + 2;
    const struct span seen = span_of(op, b);
    const int64_t block = seen.first / SLOTS + item % blocks;
    const int64_t first = block * SLOTS > seen.first ? block * SLOTS : seen.first;
    const int64_t last = (block + 1) * SLOTS < seen.last ? (block + 1) * SLOTS : seen.last;
    const int64_t bytes = wide ? 4 : 2;
    const char *k = (const char *)address(op->arg[1]) +
                    (b * op->arg[3] + head * op->arg[5] + first * size) * bytes;
    const char *v = (const char *)address(op->arg[2]) +
                    (b * op->arg[4] + head * op->arg[6] + first * values) * bytes;
    const float *q = (const float *)address(op->arg[0]) + b * op->arg[19] + head * queries * size;
    float *room = (float *)address(op->arg[16]) +
                  ((b * op->arg[8] + head) * op->arg[17] + item % blocks) * queries * stride;
    for (int64_t g = 0, n; g < queries; g += n) {
        n = queries - g < MOST_QUERIES ? queries - g : MOST_QUERIES;
#define QUERIES(n, wide)                                                                           \
    attend_queries(n, wide, op, q + g * size, k, v, last - first, room + g * stride)
        switch (wide ? -1 : n) {
            case 1: QUERIES(1, 0); break;
            case 2: QUERIES(2, 0); break;
            case 3: QUERIES(3, 0); break;
            case 4: QUERIES(4, 0); break;
            default: n = 1; QUERIES(1, 1);
        }
    }
}
EACH_LEVEL(attend)
const struct kernel kernel_attend = {items_attend, work_attend};

/* COMBINE: the parts of all blocks. An item is a sequence's head with its G queries. The arguments
 * of ATTEND, and 20 out [B, K, G, e]. */
static int64_t items_combine(const struct op *op) { return op->arg[7] * op->arg[8]; }

INLINE void combine(const struct op *op, int64_t item) {
    const int64_t b = item / op->arg[8], queries = op->arg[9], values = op->arg[11];
    const int64_t stride = values + 2, blocks = blocks_of(op, b), far = queries * stride;
    const float *room = (const float *)address(op->arg[16]) + item * op->arg[17] * far;
    float *out = (float *)address(op->arg[20]) + item * queries * values;
    for (int64_t g = 0; g < queries; g++, room += stride, out += values) {
        float most = room[0], sum = 0.0f;
        for (int64_t i = 1; i < blocks; i++) most = room[i * far] > most ? room[i * far] : most;
        for (int64_t j = 0; j < values; j++) out[j] = 0.0f;
        for (int64_t i = 0; i < blocks; i++) {
            float by = exponential(room[i * far] - most);
            sum += by * room[i * far + 1];
            for (int64_t j = 0; j < values; j++) out[j] += by * room[i * far + 2 + j];
        }
        for (int64_t j = 0; j < values; j++) out[j] /= sum;
    }
}
EACH_LEVEL(combine)
const struct kernel kernel_combine = {items_combine, work_combine};

/* ---- element by element ------------------------------------------------------------------------ */

#define PART 16384 /* numbers of an item */

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
const struct kernel kernel_add = {items_add, work_add};

/* SCALE: out = x * factor. 0 x, 1 factor, 2 out, 3 count */
static int64_t items_scale(const struct op *op) { return parts_of(op->arg[3]); }

INLINE void scale(const struct op *op, int64_t item) {
    const float *x = address(op->arg[0]), factor = number(op->arg[1]);
    float *out = address(op->arg[2]);
    for (int64_t i = item * PART, end = end_of(item, op->arg[3]); i < end; i++) out[i] = x[i] * factor;
}
EACH_LEVEL(scale)
const struct kernel kernel_scale = {items_scale, work_scale};

/* The numbers of `program.py`. */
enum activation { SILU, GELU, GELU_TANH, RELU };

INLINE vector activated(const int kind, vector x) {
    if (kind == RELU) return chosen(x > 0.0f, x, chosen(x != x, x, (vector){0}));
    if (kind == GELU) {
        vector y = x * 0.70710678f;
        for (int j = 0; j < VECTOR; j++) y[j] = erff(y[j]);
        return 0.5f * x * (1.0f + y);
    }
    vector y = kind == SILU ? x : 1.59576912f * (x + 0.044715f * x * x * x); /* 2 sqrt(2 / pi) */
    return x / (1.0f + exponentials(-y));
}

INLINE void activate_row(const int kind, const float *x, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i += VECTOR) {
        size_t bytes = (size_t)(count - i < VECTOR ? count - i : VECTOR) * sizeof *x;
        vector part = {0};
        memcpy(&part, x + i, bytes);
        part = activated(kind, part);
        memcpy(out + i, &part, bytes);
    }
}

#define EACH_ACTIVATION(call)                                                                      \
    switch (op->arg[0]) {                                                                          \
        case SILU: call(SILU); break;                                                              \
        case GELU: call(GELU); break;                                                              \
        case GELU_TANH: call(GELU_TANH); break;                                                    \
        case RELU: call(RELU); break;                                                              \
    }

/* ACTIVATE: out = f(x), rows of x `x_stride` apart. An item is a row.
 * 0 f, 1 x, 2 x_stride, 3 out (contiguous), 4 rows, 5 columns */
static int64_t items_activate(const struct op *op) { return op->arg[4]; }

INLINE void activate(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[1]) + item * op->arg[2];
    float *out = (float *)address(op->arg[3]) + item * op->arg[5];
#define ACTIVATED(f) activate_row(f, x, out, op->arg[5])
    EACH_ACTIVATION(ACTIVATED)
}
EACH_LEVEL(activate)
const struct kernel kernel_activate = {items_activate, work_activate};

/* GATE: out = x * y, rows of y `y_stride` apart, x and out contiguous. An item is a row.
 * 0 x, 1 y, 2 y_stride, 3 out, 4 rows, 5 columns */
static int64_t items_gate(const struct op *op) { return op->arg[4]; }

INLINE void gate(const struct op *op, int64_t item) {
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[5];
    const float *y = (const float *)address(op->arg[1]) + item * op->arg[2];
    float *out = (float *)address(op->arg[3]) + item * op->arg[5];
    for (int64_t i = 0; i < op->arg[5]; i++) out[i] = x[i] * y[i];
}
EACH_LEVEL(gate)
const struct kernel kernel_gate = {items_gate, work_gate};

/* Mixers whose state has one size: gated delta rule, Mamba-2, and the convolution before them.
 *
 * Of each of B sequences one token, or of one sequence B tokens that follow each other, `lanes`: their
 * states then are 0 apart, and an item takes them one after the other.
 */
#include "program.h"
#include "vectors.h"

/* Tokens that share a state, whose distance from sequence to sequence is the argument before B. */
INLINE int64_t lanes_of(const struct op *op, const int before) {
    return op->arg[before] ? 1 : op->arg[before + 1];
}

/* ---- the convolution -------------------------------------------------------------------------- */

/* CONVOLVE: of each channel the weighted sum of the last L inputs, and its SiLU. The input at position
 * p of a sequence, starts[b * starts_stride], is put into slot p % L of its ring; w has that of the
 * current one last. An item is `CHANNELS` channels of a sequence, or of all that share a ring.
 * 0 x [B, C], 1 x_stride, 2 ring [B, L, C], both bfloat16 (float32 with `wide`), 3 w [C, L],
 * 4 b or 0, 5 out [B, C], 6 SiLU of it [B, C] or 0, 7 distance of rings, 8 B, 9 C, 10 L, 11 wide,
 * 12 starts, 13 starts_stride */
#define CHANNELS 512
#define MOST_TAPS 8 /* of a filter */

INLINE int64_t parts_of(const struct op *op) { return (op->arg[9] + CHANNELS - 1) / CHANNELS; }
static int64_t items_convolve(const struct op *op) {
    return op->arg[8] / lanes_of(op, 7) * parts_of(op);
}

/* `rows`: inputs, the oldest first. */
INLINE void weigh_inputs(const int taps, const float *const *rows, const float *w, const float *b,
                         float *out, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
        float sum = w[c * taps] * rows[0][c];
        for (int j = 1; j < taps; j++) sum += w[c * taps + j] * rows[j][c];
        out[c] = sum;
    }
    for (int64_t c = 0; b && c < count; c++) out[c] += b[c];
}

INLINE void silu_row(const float *x, float *out, int64_t count) {
    const int64_t whole = count / VECTOR * VECTOR;
    for (int64_t i = 0; i < whole; i += VECTOR) {
        vector part;
        memcpy(&part, x + i, sizeof part);
        part = silu(part);
        memcpy(out + i, &part, sizeof part);
    }
    for (int64_t i = whole; i < count; i++) out[i] = silu((vector){0} + x[i])[0];
}

/* One token of channels `first` to `first` + `count` - 1. */
INLINE void convolve_token(const struct op *op, int64_t b, int64_t first, int64_t count) {
    const int64_t at = ((const int64_t *)address(op->arg[12]))[b * op->arg[13]];
    const int64_t channels = op->arg[9], taps = op->arg[10], bytes = op->arg[11] ? 4 : 2;
    const char *x = (const char *)address(op->arg[0]) + (b * op->arg[1] + first) * bytes;
    char *ring = (char *)address(op->arg[2]) + (b * op->arg[7] + first) * bytes;
    const float *w = (const float *)address(op->arg[3]) + first * taps, *bias = address(op->arg[4]);
    float *out = (float *)address(op->arg[5]) + b * channels + first, *act = address(op->arg[6]);
    float wide[MOST_TAPS][CHANNELS];
    const float *rows[MOST_TAPS];
    memcpy(ring + at % taps * channels * bytes, x, (size_t)(count * bytes));
    for (int64_t j = 0; j < taps; j++) {
        const char *row = ring + (at + 1 + j) % taps * channels * bytes;
        rows[j] = op->arg[11] ? (const float *)row : wide[j];
        for (int64_t c = 0; !op->arg[11] && c < count; c++)
            wide[j][c] = widened(((const uint16_t *)row)[c]);
    }
    bias = bias ? bias + first : NULL;
    switch (taps) {
        case 2: weigh_inputs(2, rows, w, bias, out, count); break;
        case 3: weigh_inputs(3, rows, w, bias, out, count); break;
        case 4: weigh_inputs(4, rows, w, bias, out, count); break;
        default: weigh_inputs((int)taps, rows, w, bias, out, count);
    }
    if (act) silu_row(out, act + b * channels + first, count);
}

INLINE void convolve(const struct op *op, int64_t item) {
    const int64_t lanes = lanes_of(op, 7), b = item / parts_of(op);
    const int64_t first = item % parts_of(op) * CHANNELS, left = op->arg[9] - first;
    for (int64_t lane = 0; lane < lanes; lane++)
        convolve_token(op, b + lane, first, left < CHANNELS ? left : CHANNELS);
}
EACH_LEVEL(convolve)
const struct kernel kernel_convolve = {items_convolve, work_convolve, NULL};

/* ---- what enters the recurrence ---------------------------------------------------------------- */

/* UNIT: x / sqrt(sum of x^2 + eps) * factor, of each of N rows of a token. An item is a token.
 * 0 x, 1 distance of tokens, 2 out (contiguous), 3 tokens, 4 rows N, 5 columns, 6 eps, 7 factor */
static int64_t items_unit(const struct op *op) { return op->arg[3]; }

INLINE void unit(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[5], whole = columns / LANES * LANES;
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    float *out = (float *)address(op->arg[2]) + item * op->arg[4] * columns;
    for (int64_t n = 0; n < op->arg[4]; n++, x += columns, out += columns) {
        float lanes[LANES] = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += x[i + j] * x[i + j];
        for (int64_t i = whole; i < columns; i++) lanes[i - whole] += x[i] * x[i];
        const float by = 1.0f / sqrtf(folded(lanes) + number(op->arg[6])) * number(op->arg[7]);
        for (int64_t i = 0; i < columns; i++) out[i] = x[i] * by;
    }
}
EACH_LEVEL(unit)
const struct kernel kernel_unit = {items_unit, work_unit, NULL};

/* DECAY: dt = softplus(x + bias), but at least `least` and at most `most`, and -e^A_log * dt. An item
 * is a row.
 * 0 x, 1 x_stride, 2 bias, 3 A_log, 4 dt (contiguous), 5 -e^A_log * dt (contiguous), 6 rows,
 * 7 columns, 8 least, 9 most */
static int64_t items_decay(const struct op *op) { return op->arg[6]; }

INLINE void decay(const struct op *op, int64_t item) {
    const int64_t columns = op->arg[7];
    const float *x = (const float *)address(op->arg[0]) + item * op->arg[1];
    const float *bias = address(op->arg[2]), *rates = address(op->arg[3]);
    float *steps = (float *)address(op->arg[4]) + item * columns;
    float *logs = (float *)address(op->arg[5]) + item * columns;
    const vector least = (vector){0} + number(op->arg[8]), most = (vector){0} + number(op->arg[9]);
    for (int64_t i = 0; i < columns; i += VECTOR) {
        const size_t bytes = 4 * (size_t)(columns - i < VECTOR ? columns - i : VECTOR);
        vector part = {0}, plus = {0}, rate = {0};
        memcpy(&part, x + i, bytes), memcpy(&plus, bias + i, bytes), memcpy(&rate, rates + i, bytes);
        part = softplus(part + plus);
        part = chosen(part < least, least, part);
        part = chosen(part > most, most, part);
        rate = -exponentials(rate) * part;
        memcpy(steps + i, &part, bytes), memcpy(logs + i, &rate, bytes);
    }
}
EACH_LEVEL(decay)
const struct kernel kernel_decay = {items_decay, work_decay, NULL};

/* ---- the recurrence ---------------------------------------------------------------------------- */

/* RECUR: S <- e^g S, then S <- S + beta k (v - k^T S)^T, or with `plain` S + beta k v^T, and z = S^T q.
 * Head h reads the queries and keys of head h / (H / K), or h % K where they are `tiled`. An item is
 * a head of a sequence, or of all that share a state.
 * 0 q [B, K, d], 1 distance of sequences, 2 k [B, K, d], 3 of sequences, 4 v [B, H, e], 5 of sequences,
 * 6 state [B, H, d, e], 7 of sequences, 8 B, 9 H, 10 K, 11 d, 12 e, 13 beta [B, H], 14 g [B, H],
 * 15 z [B, H, e], 16 plain, 17 tiled */
static int64_t items_recur(const struct op *op) { return op->arg[8] / lanes_of(op, 7) * op->arg[9]; }

static int fetch_recur(const struct op *op, int64_t piece) {
    const int64_t states = op->arg[8] / lanes_of(op, 7) * op->arg[9];
    return fetch_piece(address(op->arg[6]), 4 * states * op->arg[11] * op->arg[12], piece);
}

struct head {
    const float *q, *k, *v;
    float *state, *z, beta, decay;
    int64_t rows, columns, plain;
};

INLINE struct head head_of(const struct op *op, int64_t item, int64_t lane) {
    const int64_t heads = op->arg[9], keys = op->arg[10], d = op->arg[11], e = op->arg[12];
    const int64_t h = item % heads, b = item / heads + lane, at = b * heads + h;
    const int64_t key = op->arg[17] ? h % keys : h / (heads / keys);
    return (struct head){
        .q = (const float *)address(op->arg[0]) + b * op->arg[1] + key * d,
        .k = (const float *)address(op->arg[2]) + b * op->arg[3] + key * d,
        .v = (const float *)address(op->arg[4]) + b * op->arg[5] + h * e,
        .state = (float *)address(op->arg[6]) + b * op->arg[7] + h * d * e,
        .z = (float *)address(op->arg[15]) + at * e,
        .beta = ((const float *)address(op->arg[13]))[at],
        .decay = exponential(((const float *)address(op->arg[14]))[at]),
        .rows = d, .columns = e, .plain = op->arg[16],
    };
}

#define TEMPLATE "recurrence.h"
#include "each_width.h"
BY_LEVEL(recur)
const struct kernel kernel_recur = {items_recur, work_recur, fetch_recur};

/* ADD_SCALED: out = z + a number of each head * x. An item is a sequence.
 * 0 z [B, H, e], 1 x [B, H, e], 2 distance of sequences of x, 3 numbers [H], 4 out [B, H, e], 5 B, 6 H,
 * 7 e */
static int64_t items_add_scaled(const struct op *op) { return op->arg[5]; }

INLINE void add_scaled(const struct op *op, int64_t item) {
    const int64_t heads = op->arg[6], size = op->arg[7];
    const float *z = (const float *)address(op->arg[0]) + item * heads * size;
    const float *x = (const float *)address(op->arg[1]) + item * op->arg[2];
    const float *factors = address(op->arg[3]);
    float *out = (float *)address(op->arg[4]) + item * heads * size;
    for (int64_t h = 0; h < heads; h++, z += size, x += size, out += size)
        for (int64_t i = 0; i < size; i++) out[i] = z[i] + factors[h] * x[i];
}
EACH_LEVEL(add_scaled)
const struct kernel kernel_add_scaled = {items_add_scaled, work_add_scaled, NULL};

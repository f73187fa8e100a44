/* Mixers with a fixed-size state: gated delta rule, Mamba-2, and the convolution before them. */
#include "program.h"
#include "vectors.h"

/* ---- the convolution -------------------------------------------------------------------------- */

/* CONVOLVE: per channel the weighted sum of the last L inputs, and its SiLU. The input at position
 * p of a sequence, which starts at starts[b * starts_stride], is stored in slot p % L of its ring;
 * the last weight of w is for the current input. `lengths`: number of tokens without padding. An
 * item is `CHANNELS` channels of a sequence.
 * 0 x [B, T, C], 1 stride of sequences, 2 of tokens, 3 ring [B, L, C], both bfloat16 (float32 with
 * `wide`), 4 w [C, L], 5 b or 0, 6 out [B, T, C], 7 SiLU of it [B, T, C] or 0, 8 B, 9 T, 10 C, 11 L,
 * 12 wide, 13 starts, 14 starts_stride, 15 lengths [B] or 0 */
#define CHANNELS 256
#define MOST_TAPS 8 /* of a filter */

INLINE int64_t parts_of(const struct op *op) { return (op->arg[10] + CHANNELS - 1) / CHANNELS; }
static int64_t items_convolve(const struct op *op) { return op->arg[8] * parts_of(op); }

/* `rows`: inputs, the oldest first. */
INLINE void weigh_inputs(const int64_t taps, const float *const *rows, float (*w)[CHANNELS],
                         const float *b, float *out, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
        float sum = w[0][c] * rows[0][c];
        for (int64_t j = 1; j < taps; j++) sum += w[j][c] * rows[j][c];
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

/* With usual numbers of taps as compile-time constants. */
INLINE void convolve_taps(const int64_t taps, const struct op *op, int64_t item) {
    const int64_t b = item / parts_of(op), first = item % parts_of(op) * CHANNELS;
    const int64_t tokens = op->arg[9], channels = op->arg[10];
    const int64_t wide = op->arg[12], bytes = wide ? 4 : 2, left = channels - first;
    const int64_t count = left < CHANNELS ? left : CHANNELS;
    const int64_t start = ((const int64_t *)address(op->arg[13]))[b * op->arg[14]];
    const int64_t *lengths = address(op->arg[15]), length = lengths ? lengths[b] : tokens;
    const char *x = (const char *)address(op->arg[0]) + (b * op->arg[1] + first) * bytes;
    char *ring = (char *)address(op->arg[3]) + (b * taps * channels + first) * bytes;
    const float *w = (const float *)address(op->arg[4]) + first * taps, *bias = address(op->arg[5]);
    float *out = (float *)address(op->arg[6]) + b * tokens * channels + first;
    float *act = (float *)address(op->arg[7]);
    float turned[MOST_TAPS][CHANNELS], widened_[MOST_TAPS][CHANNELS];
    const float *rows[MOST_TAPS] = {0};
    for (int64_t c = 0; c < count; c++)
        for (int64_t j = 0; j < taps; j++) turned[j][c] = w[c * taps + j];
    bias = bias ? bias + first : NULL;
    act = act ? act + b * tokens * channels + first : NULL;
    for (int64_t t = 1 - taps; t < tokens; t++, x += t > 0 ? op->arg[2] * bytes : 0) {
        const char *row = t < 0 ? ring + (start + t + taps) % taps * channels * bytes : x;
        float *own = widened_[(t + taps) % taps];
        for (int64_t j = 0; j + 1 < taps; j++) rows[j] = rows[j + 1];
        rows[taps - 1] = wide ? (const float *)row : own;
        for (int64_t c = 0; !wide && c < count; c++) own[c] = widened(((const uint16_t *)row)[c]);
        if (t < 0) continue;
        weigh_inputs(taps, rows, turned, bias, out, count);
        out += channels;
        if (act) silu_row(out - channels, act, count), act += channels;
    }
    x = (const char *)address(op->arg[0]) + (b * op->arg[1] + first) * bytes;
    for (int64_t t = length > taps ? length - taps : 0; t < length; t++)
        memcpy(ring + (start + t) % taps * channels * bytes, x + t * op->arg[2] * bytes,
               (size_t)(count * bytes));
}

INLINE void convolve(const struct op *op, int64_t item) {
    switch (op->arg[11]) {
        case 3: convolve_taps(3, op, item); break;
        case 4: convolve_taps(4, op, item); break;
        default: convolve_taps(op->arg[11], op, item);
    }
}
EACH_LEVEL(convolve)
const struct kernel kernel_convolve = {items_convolve, work_convolve, NULL};

/* ---- inputs of the recurrence ---------------------------------------------------------------- */

/* UNIT: x / sqrt(sum of x^2 + eps) * factor, for each of N rows of a token. An item is a token.
 * 0 x, 1 stride of tokens, 2 out (contiguous), 3 tokens, 4 rows N, 5 columns, 6 eps, 7 factor */
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

/* DECAY: dt = softplus(x + bias) clamped to `least` … `most`, and -e^A_log * dt. An item is a row.
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

/* RECUR: token by token S <- e^g S, then S <- S + beta k (v - k^T S)^T, or with `plain` S + beta k v^T,
 * and z = S^T q. Head h reads the queries and keys of head h / (H / K), or h % K if `tiled`. An
 * item is `STRIP` columns of a head's state, which stay in the cache over all T tokens, so that
 * this costs no more than products of chunks.
 * 0 q [B, T, K, d], 1 stride of sequences, 2 of tokens, 3 k [B, T, K, d], 4 of sequences, 5 of
 * tokens, 6 v [B, T, H, e], 7 of sequences, 8 of tokens, 9 state [B, H, d, e], 10 B, 11 T, 12 H, 13 K,
 * 14 d, 15 e, 16 beta [B, T, H], 17 g [B, T, H], 18 z [B, T, H, e], 19 plain, 20 tiled */
#define STRIP 64

INLINE int64_t strips_of(const struct op *op) { return (op->arg[15] + STRIP - 1) / STRIP; }
static int64_t items_recur(const struct op *op) {
    return op->arg[10] * op->arg[12] * strips_of(op);
}

static int fetch_recur(const struct op *op, int64_t piece) {
    const int64_t states = op->arg[10] * op->arg[12];
    return fetch_piece(address(op->arg[9]), 4 * states * op->arg[14] * op->arg[15], piece);
}

/* Of a head: strides of tokens; beta and g have the number of heads. */
struct head {
    const float *q, *k, *v, *beta, *logs;
    float *state, *z;
    int64_t rows, columns, tokens, heads, q_far, k_far, v_far;
};

INLINE struct head head_of(const struct op *op, int64_t item) {
    const int64_t heads = op->arg[12], keys = op->arg[13], d = op->arg[14], e = op->arg[15];
    const int64_t h = item % heads, b = item / heads, at = b * op->arg[11] * heads + h;
    const int64_t key = op->arg[20] ? h % keys : h / (heads / keys);
    return (struct head){
        .q = (const float *)address(op->arg[0]) + b * op->arg[1] + key * d, .q_far = op->arg[2],
        .k = (const float *)address(op->arg[3]) + b * op->arg[4] + key * d, .k_far = op->arg[5],
        .v = (const float *)address(op->arg[6]) + b * op->arg[7] + h * e, .v_far = op->arg[8],
        .state = (float *)address(op->arg[9]) + item * d * e,
        .beta = (const float *)address(op->arg[16]) + at,
        .logs = (const float *)address(op->arg[17]) + at,
        .z = (float *)address(op->arg[18]) + at * e,
        .rows = d, .columns = e, .tokens = op->arg[11], .heads = heads,
    };
}

#define TEMPLATE "recurrence.h"
#include "each_width.h"
BY_LEVEL(recur)
const struct kernel kernel_recur = {items_recur, work_recur, fetch_recur};

/* ADD_SCALED: out = z + factor of each head * x. An item is a sequence.
 * 0 z [B, H, e], 1 x [B, H, e], 2 stride of sequences of x, 3 factors [H], 4 out [B, H, e], 5 B,
 * 6 H, 7 e */
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

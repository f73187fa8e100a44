/* Softmax attention over the cache, of one token and of many, on float32 queries.
 *
 * A query at position p sees slots first_slot(window, p) to p. With a cap c a score s is
 * c * tanh(s / c). A head's sink is an additional score without a value. Before the cap, a head's
 * slope times the distance of the key is taken off a score (ALiBi).
 */
#include "program.h"
#include "vectors.h"

/* ---- attention of one token over the cache ---------------------------------------------------- */

/* ATTEND: the G queries of a key/value head with the keys of a block of slots, and their values.
 * An item is a block of `SLOTS` of one head of one sequence; its partial results are stored in
 * `room`: per query the largest score, the sum of e^(score - largest), and the values weighted by
 * it. Sizes are multiples of 16.
 * 0 q [B, K, G, d], 1 k, 2 v [B, K, C, ·], both of one of `enum numbers`, 3 stride of sequences
 * of k, 4 of v, 5 of heads of k, 6 of v, 7 B, 8 K, 9 G, 10 size d, 11 size of a value e,
 * 12 scale, 13 window, 14 starts, 15 starts_stride, 16 room, 17 blocks of room for each head,
 * 18 `enum numbers` of k and v, 19 stride of sequences of q, 21 cap or 0, 23 stride of slots of v,
 * 24 slopes [K, G] or 0;
 * with stride 0 of heads of k, all heads share keys and values, and their blocks are consecutive */
#define SLOTS 256
#define MOST_QUERIES 4 /* per pass */
#define KEYS_AHEAD 32  /* slots of prefetched keys */
#define MOST_SIZE 512  /* of a head */

/* The first slot that a query at position `at` sees: of the last `window` ones, of its chunk of
 * -`window` ones, or with 0 of all. */
INLINE int64_t first_slot(int64_t window, int64_t at) {
    if (window < 0) return at - at % -window;
    return window && at >= window ? at - window + 1 : 0;
}

struct span {
    int64_t first, last; /* slots, and their blocks */
};

INLINE struct span span_of(const struct op *op, int64_t b) {
    const int64_t at = ((const int64_t *)address(op->arg[14]))[b * op->arg[15]];
    return (struct span){first_slot(op->arg[13], at), at + 1};
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

INLINE void fetch_rows(const void *rows, int64_t at, int64_t count, const int numbers) {
    const int64_t bytes = bytes_of(numbers);
    for (int64_t i = 0; i < count; i += 64 / bytes) FETCH((const char *)rows + (at + i) * bytes);
}

/* An item: queries, keys and values of its slots, and its part of `room`. */
struct place {
    const float *q;
    const void *k, *v;
    const float *slopes; /* of its queries, or NULL */
    float *room;
    int64_t slots, behind; /* slots of following blocks, with consecutive keys */
};

INLINE struct place place_of(const struct op *op, int64_t item) {
    int64_t b = 0, blocks;
    for (; item >= (blocks = blocks_of(op, b)) * op->arg[8]; b++) item -= blocks * op->arg[8];
    const int64_t heads = op->arg[8], queries = op->arg[9], size = op->arg[10];
    const int64_t head = op->arg[5] ? item / blocks : item % heads;
    const int64_t part = op->arg[5] ? item % blocks : item / heads;
    const int64_t values = op->arg[11], bytes = bytes_of(op->arg[18]);
    const struct span seen = span_of(op, b);
    const int64_t block = seen.first / SLOTS + part;
    const int64_t first = block * SLOTS > seen.first ? block * SLOTS : seen.first;
    const int64_t last = (block + 1) * SLOTS < seen.last ? (block + 1) * SLOTS : seen.last;
    return (struct place){
        .q = (const float *)address(op->arg[0]) + b * op->arg[19] + head * queries * size,
        .k = (const char *)address(op->arg[1]) +
             (b * op->arg[3] + head * op->arg[5] + first * size) * bytes,
        .v = (const char *)address(op->arg[2]) +
             (b * op->arg[4] + head * op->arg[6] + first * op->arg[23]) * bytes,
        .slopes = op->arg[24] ? (const float *)address(op->arg[24]) + head * queries : NULL,
        .room = (float *)address(op->arg[16]) +
                ((b * heads + head) * op->arg[17] + part) * queries * (values + 2),
        .slots = last - first, .behind = seen.last - last,
    };
}

/* COMBINE: combine the partial results of all blocks. An item is a sequence's head with its G
 * queries. The arguments of ATTEND, and 20 out [B, K, G, e], 22 sinks [K, G] or 0. */
static int64_t items_combine(const struct op *op) { return op->arg[7] * op->arg[8]; }

INLINE void combine(const struct op *op, int64_t item) {
    const int64_t b = item / op->arg[8], queries = op->arg[9], values = op->arg[11];
    const int64_t stride = values + 2, blocks = blocks_of(op, b), far = queries * stride;
    const float *room = (const float *)address(op->arg[16]) + item * op->arg[17] * far;
    float *out = (float *)address(op->arg[20]) + item * queries * values;
    const float *sinks = address(op->arg[22]);
    for (int64_t g = 0; g < queries; g++, room += stride, out += values) {
        float most = room[0], sum = 0.0f;
        for (int64_t i = 1; i < blocks; i++) most = room[i * far] > most ? room[i * far] : most;
        if (sinks) {
            const float sink = sinks[item % op->arg[8] * queries + g];
            most = sink > most ? sink : most, sum = exponential(sink - most);
        }
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
const struct kernel kernel_combine = {items_combine, work_combine, NULL};

/* ---- attention of many tokens ------------------------------------------------------------------ */

/* ATTEND_ROWS: T queries of each head, the first of sequence b at position starts[b *
 * starts_stride], with the keys and values of all visible slots. An item is some tokens of the G
 * heads that share keys; see attend_rows.h.
 * 0 q, 1 k, 2 v [B, K, C, ·], both of one of `enum numbers`, 3 stride of sequences of k, 4 of v,
 * 5 of heads of k, 6 of v, 7 B, 8 K, 9 G, 10 size d, 11 size of a value e, 12 scale,
 * 13 window, 14 starts, 15 starts_stride, 16 `enum numbers` of k and v, 17 stride of
 * sequences of q, 18 of heads, 19 of tokens, 20 T, 21 out [B, T, K, G, e], 22 cap or 0,
 * 23 sinks [K, G] or 0, 24 slopes [K, G] or 0 */
#define MOST_ROWS 64 /* per item, or G */

INLINE int64_t tokens_of_tile(const struct op *op) {
    return op->arg[9] < MOST_ROWS ? MOST_ROWS / op->arg[9] : 1;
}

INLINE int64_t tiles_of_rows(const struct op *op) {
    return (op->arg[20] + tokens_of_tile(op) - 1) / tokens_of_tile(op);
}

#define KEYS 64       /* slots at a time */
#define MOST_LANES 128 /* rows of an item in vectors; maximum of G */

/* Buffers of one item, with rows of queries as lanes: queries [d, lanes], scores [KEYS, lanes],
 * sums of values [e, lanes], keys [KEYS, d] and values [KEYS, e]. */
struct tile {
    float q[MOST_SIZE * MOST_LANES], scores[KEYS * MOST_LANES], sums[MOST_SIZE * MOST_LANES];
    float k[KEYS * MOST_SIZE], v[KEYS * MOST_SIZE];
    float most[MOST_LANES], all[MOST_LANES], by[MOST_LANES], slope[MOST_LANES];
    int32_t position[MOST_LANES], keys[MOST_LANES]; /* slots that a row sees */
};
static _Thread_local struct tile tile __attribute__((aligned(64)));

#define TEMPLATE "attend_one.h"
#include "each_width.h"
#define TEMPLATE "attend_rows.h"
#include "each_width.h"
BY_LEVEL(attend)
BY_LEVEL(attend_rows)
const struct kernel kernel_attend = {items_attend, work_attend, NULL};

static int64_t items_attend_rows(const struct op *op) {
    return op->arg[7] * op->arg[8] * tiles_of_rows(op);
}

const struct kernel kernel_attend_rows = {items_attend_rows, work_attend_rows, NULL};

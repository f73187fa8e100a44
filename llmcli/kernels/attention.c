/* Softmax attention over the cache, of one token and of many, on float32 queries: see vectors.h.
 *
 * A query at position p sees slots max(0, p - window + 1) to p.
 */
#include "program.h"
#include "vectors.h"

/* ---- attention of one token over the cache ---------------------------------------------------- */

/* ATTEND: the G queries of a key/value head with the keys of a block of slots, and their values.
 * An item is a block of `SLOTS` of one head of one sequence; its part of the result goes to `room`:
 * of each query the largest score, the sum of e^(score - largest), and that sum of the values.
 * Sizes are multiples of 16.
 * 0 q [B, K, G, d], 1 k, 2 v [B, K, C, ·] bfloat16 (float32 with `wide`), 3 distance of sequences
 * of k, 4 of v, 5 of heads of k, 6 of v, 7 B, 8 K, 9 G, 10 size d, 11 size of a value e,
 * 12 scale, 13 window or 0, 14 starts, 15 starts_stride, 16 room, 17 blocks of room for each head,
 * 18 wide, 19 distance of sequences of q */
#define SLOTS 256
#define MOST_QUERIES 4 /* that share a pass */
#define KEYS_AHEAD 16  /* slots whose keys are fetched before they are needed */
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

INLINE const char *row_at(const void *rows, int64_t at, const int wide) {
    return (const char *)rows + at * (wide ? 4 : 2);
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
    const int64_t line = wide ? 16 : 32; /* numbers of a line of the cache */
    for (int64_t s = 0; s < slots; s++) {
        vector sums[MOST_QUERIES][2] = {{{0}}}, key[2];
        /* keys that come next, and the values of this one: memory is far away */
        for (int64_t i = 0; i < size; i += line) FETCH(row_at(k, (s + KEYS_AHEAD) * size + i, wide));
        for (int64_t i = 0; i < values; i += line) FETCH(row_at(v, s * values + i, wide));
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

/* ---- attention of many tokens ------------------------------------------------------------------ */

/* ATTEND_ROWS: T queries of each head, the first of sequence b at position starts[b *
 * starts_stride], with the keys and values of all slots that they see. An item is some tokens of
 * the G heads that share keys; see attend_rows.h.
 * 0 q, 1 k, 2 v [B, K, C, ·] bfloat16 (float32 with `wide`), 3 distance of sequences of k, 4 of v,
 * 5 of heads of k, 6 of v, 7 B, 8 K, 9 G, 10 size d, 11 size of a value e, 12 scale,
 * 13 window or 0, 14 starts, 15 starts_stride, 16 wide, 17 distance of sequences of q, 18 of heads,
 * 19 of tokens, 20 T, 21 out [B, T, K, G, e] */
#define MOST_ROWS 64 /* of an item, or G */

INLINE int64_t tokens_of_tile(const struct op *op) {
    return op->arg[9] < MOST_ROWS ? MOST_ROWS / op->arg[9] : 1;
}

INLINE int64_t tiles_of_rows(const struct op *op) {
    return (op->arg[20] + tokens_of_tile(op) - 1) / tokens_of_tile(op);
}

#define KEYS 64       /* slots that are taken at a time */
#define MOST_LANES 128 /* rows of an item in vectors: G is at most that */

/* Of one item, lanes being rows of queries: they [d, lanes], scores [KEYS, lanes], sums of values
 * [e, lanes], keys [KEYS, d] and values [KEYS, e]. */
struct tile {
    float q[MOST_SIZE * MOST_LANES], scores[KEYS * MOST_LANES], sums[MOST_SIZE * MOST_LANES];
    float k[KEYS * MOST_SIZE], v[KEYS * MOST_SIZE];
    float most[MOST_LANES], all[MOST_LANES], by[MOST_LANES];
    int32_t position[MOST_LANES];
};
static _Thread_local struct tile tile __attribute__((aligned(64)));

#ifdef X86
#define WIDTH 16
#define FUSED(a, b, c) _mm512_fmadd_ps(a, b, c)
#define NAMED(name) name##_avx512
#define TARGET WITH_AVX512
#include "attend_rows.h"

#define WIDTH 8
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
#define NAMED(name) name##_avx2
#define TARGET WITH_AVX2
#include "attend_rows.h"
#endif

typedef float quad __attribute__((vector_size(16)));

INLINE quad fused(quad a, quad b, quad c) {
#ifdef WITH_DOTPROD /* ARM */
    return (quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else /* a function call for each number, where the processor is not known to do it */
    return (quad){
        __builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
        __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3]),
    };
#endif
}

#define WIDTH 4
#define FUSED(a, b, c) fused(a, b, c)
#define NAMED(name) name##_portable
#define TARGET
#include "attend_rows.h"

static int64_t items_attend_rows(const struct op *op) {
    return op->arg[7] * op->arg[8] * tiles_of_rows(op);
}

static void work_attend_rows(const struct op *op, int64_t item, int64_t level) {
#ifdef X86
    if (level >= AVX512) {
        attend_rows_avx512(op, item);
        return;
    }
    if (level >= AVX2) {
        attend_rows_avx2(op, item);
        return;
    }
#endif
    (void)level;
    attend_rows_portable(op, item);
}
const struct kernel kernel_attend_rows = {items_attend_rows, work_attend_rows};

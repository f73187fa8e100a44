/* Mixtures of experts of random shapes, from the router to the sum: see attend.c. */
#include "drawn.h"

#include "packed.h"

struct segment {
    const uint8_t *packed;
    int64_t format, rows, column;
    const struct stored *stored;
};

void llmcli_run(const struct op *, int64_t, struct counter *, const struct team *, int64_t *);
int64_t llmcli_packed_size(int64_t, int64_t, int64_t);

static void *room(int64_t bytes) { return malloc((size_t)bytes); }

/* One bit less of every byte: float16 numbers among them are finite. */
static uint8_t *drawn_bytes(int64_t count) {
    uint8_t *bytes = room(count);
    for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)next() & 0xbf;
    return bytes;
}

/* Logits that are NaN, infinite, or all equal. */
static void spoil(float *x, int64_t count) {
    static const uint32_t special[] = {0x7fc00000, 0xffc00000, 0x7f800000, 0xff800000, 0, 0x80000000};
    const int64_t how = below(4);
    for (int64_t i = 0; i < count; i++) {
        if (how == 1) x[i] = 0.25f;
        if (how == 2 && !below(4)) x[i] = float_of(special[below(6)]);
    }
}

/* Packed experts, a segment or two, of K columns; `P` products. */
static uint64_t packed(const struct team *team, const int64_t *chosen, const int64_t *rows_of,
                       int64_t P, int64_t x_rows, int64_t each, int64_t E) {
    const int64_t K = 256 * (1 + below(2)), count = 1 + below(2), N = 16 * (2 + below(3));
    struct segment segments[2] = {{0}};
    int64_t columns = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t f = below(FORMATS), rows = i ? 16 : N;
        segments[i] = (struct segment){drawn_bytes(llmcli_packed_size(f, E * rows, K)), f, rows,
                                       columns, NULL};
        columns += rows;
    }
    float *x = drawn(x_rows * K, 0), *out = room(4 * P * columns);
    float *bias = below(2) ? drawn(E * (columns + 1), 0) : NULL;
    const int64_t D = 1 + below(2);
    void *seen = room(activation_size(D) * x_rows * K / 32);
    const struct op ops[2] = {
        {QUANTIZE, {to(x), K, to(seen), x_rows, K, D, 1}},
        {MULTIPLY_EXPERTS, {to(seen), to(segments), count, to(out), columns, P, K, to(chosen),
                            to(rows_of), each, to(bias), columns + 1, D}},
    };
    struct counter counters[2];
    llmcli_run(ops, 2, counters, team, NULL);
    const uint64_t hash = hashed(1, out, P * columns);
    free((void *)segments[0].packed), free((void *)segments[1].packed);
    free(x), free(out), free(bias), free(seen);
    return hash;
}

/* A hash of what all of it gives. */
uint64_t experts(const struct team *team) {
    uint64_t hash = 14695981039346656037ull;
    for (int turn = 0; turn < 150; turn++) {
        const int64_t T = 1 + below(5), D = 1 + below(90), N = 1 + below(50), each = 1 + below(5);
        const int64_t groups = 1 + below(4), E = groups * each, kept = 1 + below(groups);
        const int64_t K = turn % 5 ? 1 + below(E) : E, after = below(3) == 0, halves = below(2);
        const int64_t by_pair = below(2), x_rows = by_pair ? T * K : T, P = T * K;
        const int64_t best = each > 1 ? 1 + below(2) : 1, wide = halves || below(2);
        float *x = drawn(T * D, 0), *router = drawn(E * D, 0), *b = below(2) ? drawn(E, 0) : NULL;
        float *correction = below(2) ? drawn(E, 0) : NULL, *logits = room(4 * T * E);
        float *factors = below(2) ? drawn(E, 0) : NULL;
        float *scores = room(4 * T * E), *spare = room(12 * T * E), *weights = room(4 * P);
        int64_t *chosen = room(8 * P), *by_place = room(8 * P), *rows = room(8 * P);
        const struct op route[4] = {
            {MULTIPLY_FLOAT, {to(x), D, to(router), D, to(logits), T, E, D, to(b)}},
            {SHARE, {to(logits), to(scores), T, E, below(2)}},
            {CHOOSE, {to(after ? logits : scores), to(chosen), T, E, K, to(correction), groups, kept,
                      to(spare), best}},
            {WEIGH, {to(after ? logits : scores), to(chosen), to(weights), T, E, K, after,
                     !after && below(2), bits_of(1e-20f), bits_of(below(2) ? 1.0f : 1.75f),
                     to(factors)}},
        };
        struct counter counters[4];
        llmcli_run(route, 1, counters, team, NULL);
        hash = hashed(hash, logits, T * E);
        for (int64_t t = 0; t < T; t++) spoil(logits + t * E, E);
        llmcli_run(route + 1, 3, counters, team, NULL);
        hash = hashed(hashed(hash, scores, T * E), weights, P);

        /* pairs in the order [K, T], whose rows are theirs or the token's */
        for (int64_t p = 0; p < P; p++) {
            by_place[p] = chosen[p % T * K + p / T], rows[p] = by_pair ? p : p % T;
            hash = (hash ^ (uint64_t)by_place[p]) * 0x100000001b3ull;
        }
        const int64_t listed = by_pair || T > 1 ? to(rows) : 0, a_row = by_pair ? 1 : K;
        void *w = drawn(E * N * D + 7, 1), *in = drawn(x_rows * D, !wide);
        float *bias = below(2) ? drawn(E * N, 0) : NULL, *y = room(4 * P * N);
        float *widened_x = room(4 * x_rows * ((D + 31) / 32 * 32));
        float *z = below(2) ? drawn(T * N, 0) : NULL, *out = room(4 * T * N);
        float *scaled = room(4 * T * N);
        const struct op multiply[4] = {
            {WIDEN, {to(in), D, to(widened_x), x_rows, D, wide, halves, 1}},
            {MULTIPLY_EXPERTS_BFLOAT16,
             {to(widened_x), to(w) + below(15), D, to(y), P, N, D, halves, N * D, to(by_place),
              listed, a_row, to(bias), N}},
            {SUM_EXPERTS, {to(y), to(weights), to(z), to(out), T, N, K, T}},
            {SCALE_ROWS, {to(out), to(weights), to(scaled), T, N}},
        };
        llmcli_run(multiply, 4, counters, team, NULL);
        hash = hashed(hashed(hashed(hash, y, P * N), out, T * N), scaled, T * N);
        hash ^= packed(team, by_place, (const int64_t *)address(listed), P, x_rows, a_row, E);
        free(x), free(router), free(b), free(correction), free(factors), free(logits);
        free(scores), free(spare);
        free(weights), free(chosen), free(by_place), free(rows), free(w), free(in), free(bias);
        free(y), free(widened_x), free(z), free(out), free(scaled);
    }
    return hash;
}

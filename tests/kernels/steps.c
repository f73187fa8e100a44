/* Operations between products, of random shapes, products of many rows, and the token that is chosen at
 * the end: see attend.c. */
#include "drawn.h"

struct sampling {
    int64_t penalties, greedy, top_k;
    double temperature, top_p, min_p, repetition, presence, frequency;
};

void llmcli_run(const struct op *, int64_t, struct counter *, const struct team *, int64_t *);
int64_t llmcli_choose(const float *, int64_t, const struct sampling *, const int64_t *, const int64_t *,
                      double, double *, double *, int64_t);

static float *room(int64_t count) { return malloc((size_t)count * sizeof(float)); }

/* Rows with gaps between them, but that the last one ends with its numbers; a few of any size. */
static float *rows_of(int64_t rows, int64_t columns, int64_t stride) {
    const int64_t count = (rows - 1) * stride + columns;
    float *x = drawn(count, 0);
    for (int64_t i = 0; i < count; i++)
        if (!below(19)) x[i] *= (float)(1 << below(24));
    return x;
}

/* The next token, of logits that are often equal and now and then no numbers. */
static uint64_t token(const struct team *team) {
    static const double shares[] = {1.0, 0.999, 0.9, 0.3}, least[] = {0.0, 0.0, 0.02, 0.5};
    const int64_t vocab = 1 + below(below(4) ? 100 : 3000), steps = below(2) ? 4 : 1 << 20;
    float *logits = drawn(vocab, 0);
    int64_t *prompt = malloc((size_t)vocab * 8), *output = malloc((size_t)vocab * 8);
    double *spare = malloc((size_t)vocab * 32), best;
    for (int64_t i = 0; i < vocab; i++) {
        logits[i] = 2 * (float)(int64_t)(logits[i] * (float)steps) / (float)steps;
        prompt[i] = below(3), output[i] = below(3);
    }
    if (!below(12)) logits[below(vocab)] = below(2) ? NAN : below(2) ? INFINITY : -INFINITY;
    const struct sampling how = {
        below(2), !below(5), below(2) * below(vocab + 3), 0.3 + (double)below(3), shares[below(4)],
        least[below(4)], 1.3, 0.25, -0.5,
    };
    const int64_t *asked = below(2) ? prompt : NULL, *said = below(2) ? output : NULL;
    const double u = (double)next() / 16777216.0;
    const int64_t chosen = llmcli_choose(logits, vocab, &how, asked, said, u, &best, spare, team->level);
    const float score = (float)best;
    free(logits), free(prompt), free(output), free(spare);
    return hashed((uint64_t)chosen, &score, 1);
}

/* A hash of what all of it gives. */
uint64_t steps(const struct team *team) {
    enum { GELU = 1, ACTIVATIONS = 7 };
    uint64_t hash = 14695981039346656037ull;
    for (int turn = 0; turn < 120; turn++) {
        const int64_t B = 1 + below(3), T = 1 + below(3), N = 1 + below(4), d = 1 + below(70);
        const int64_t rows = B * T, columns = N * d, count = rows * columns;
        const int64_t far = columns + below(5), R = 2 * below(d / 2 + 1), slots = T + below(4);
        const int64_t f = below(ACTIVATIONS), narrow = 1 + below(2), centred = below(2);
        const int64_t own = 1 + below(2), limit = bits_of(below(2) ? INFINITY : 0.3f);
        float *x = rows_of(rows, columns, far), *y = drawn(count, 0), *w = drawn(own * columns, 0);
        float *b = below(2) ? drawn(columns, 0) : NULL, *cosines = drawn(slots * R, 0);
        float *sines = drawn(slots * R, 0), *turned = room(count), *normed = room(count);
        float *sum = room(count), *scaled = room(count), *capped = room(count), *act = room(count);
        float *gated = room(count), *grown = room(count);
        uint16_t *small = malloc((size_t)count * 2);
        int64_t starts[3];
        for (int64_t i = 0; i < B; i++) starts[i] = below(slots - T + 1);

        /* the first row of each head, into a cache that has no room for some */
        const int64_t C = 1 + below(4);
        float *cache = drawn(B * N * C * d, 0);
        const struct op ops[10] = {
            {ROTATE, {to(x), far, to(turned), B, T, N, d, R, to(cosines), to(sines), to(starts), 1}},
            {NORMALIZE, {to(x), far, to(normed), rows, columns, to(w), to(b), bits_of(1e-5f), centred,
                         bits_of(below(2) ? 1.0f : 0.0f), rows, 0, own}},
            {NARROW, {to(x), far, to(small), rows, columns, narrow}},
            {ADD, {to(turned), to(y), to(sum), count}},
            {SCALE, {to(y), bits_of(0.7f), to(scaled), count}},
            {SOFT_CAP, {to(turned), bits_of(1.5f), to(capped), count}},
            {ACTIVATE, {f, to(x), far, to(act), rows, columns, limit}},
            {GATE, {to(y), to(x), far, to(gated), rows, columns, below(2), bits_of(0.4f), bits_of(1.0f),
                    columns}},
            {STORE, {to(y), 4 * T * columns, 4 * d, to(cache), 4 * N * C * d, 4 * C * d, 4 * d, B, N,
                     4 * d, to(starts), 1, C}},
            {GROW, {to(x), far, to(grown), B, T, columns, bits_of(0.5f), 1 + below(3), below(2),
                    to(starts), 1}},
        };
        struct counter counters[10];
        llmcli_run(ops, 10, counters, team, NULL);
        hash = hashed(hashed(hashed(hash, turned, count), normed, count), sum, count);
        hash = hashed(hashed(hashed(hash, scaled, count), capped, count), gated, count);
        hash = hashed(hashed(hash, cache, B * N * C * d), grown, count);
        if (f != GELU) hash = hashed(hash, act, count); /* that of each machine's C library */
        for (int64_t i = 0; i < count; i++) hash = (hash ^ small[i]) * 0x100000001b3ull;
        free(y), free(w), free(b), free(cosines), free(sines), free(turned), free(normed), free(sum);
        free(scaled), free(capped), free(act), free(gated), free(grown), free(small), free(cache), free(x);

        /* many float32 rows with weights of 16 bits */
        const int64_t M = 1 + below(turn % 4 ? 12 : 90), O = 1 + below(turn % 3 ? 40 : 150);
        const int64_t K = 1 + below(turn % 5 ? 70 : 600), x_far = K + below(4), w_far = K + below(4);
        float *many = drawn((M - 1) * x_far + K, 0), *out = room(M * O);
        float *bias = below(2) ? drawn(O, 0) : NULL;
        void *weights = drawn((O - 1) * w_far + K, narrow);
        const struct op product = {
            MULTIPLY_ROWS, {to(many), to(weights), w_far, to(out), O, M, O, K, to(bias), x_far, narrow == 2},
        };
        llmcli_run(&product, 1, counters, team, NULL);
        hash = hashed(hash, out, M * O);
        free(many), free(out), free(bias), free(weights);
        for (int i = 0; i < 5; i++) hash = (hash ^ token(team)) * 0x100000001b3ull;
    }
    return hash;
}

/* Tokens of recurrent mixers of random shapes, from the convolution to the norm: see attend.c. */
#include "drawn.h"

void llmcli_run(const struct op *, int64_t, struct counter *, const struct team *, int64_t *);

static float *room(int64_t count) { return malloc((size_t)count * sizeof(float)); }

/* A few numbers that are NaN, infinite, zero or small. */
static void spoil(float *x, int64_t count) {
    static const uint32_t special[] = {0x7fc00000, 0xffc00000, 0x7f800000, 0xff800000,
                                       0,          0x80000000, 0x42c80000, 0xc2c80000};
    for (int64_t i = 0; i < count; i++)
        if (!below(9)) x[i] = float_of(special[below(8)]);
}

/* Tokens of B sequences, or so many of one, through the convolution. */
static uint64_t convolutions(const struct team *team, int64_t B, int64_t lanes) {
    const int64_t C = 1 + below(below(3) ? 90 : 1200), L = 1 + below(8), wide = below(2);
    const int64_t far = C + below(5), states = lanes ? 1 : B, T = lanes ? B : 1 + below(12);
    B = states * T;
    float *w = drawn(C * L, 0), *b = below(2) ? drawn(C, 0) : NULL;
    float *out = room(B * C), *act = below(4) ? room(B * C) : NULL;
    void *x = drawn(B * far, !wide), *ring = drawn(states * L * C, !wide);
    int64_t starts[3], lengths[3], padded = below(2);
    for (int64_t i = 0; i < states; i++) starts[i] = below(1000), lengths[i] = below(T + 1);
    const struct op op = {
        CONVOLVE, {to(x), T * far, far, to(ring), to(w), to(b), to(out), to(act), states, T, C, L, wide,
                   to(starts), 1, padded ? to(lengths) : 0},
    };
    struct counter counter;
    llmcli_run(&op, 1, &counter, team, NULL);
    uint64_t hash = hashed(hashed(1, out, B * C), act, act ? B * C : 0);
    hash = hashed(hash, ring, states * L * C / (wide ? 1 : 2));
    free(w), free(b), free(out), free(act), free(x), free(ring);
    return hash;
}

/* A hash of what all of it gives. */
uint64_t recurrent(const struct team *team) {
    uint64_t hash = 14695981039346656037ull;
    for (int turn = 0; turn < 150; turn++) {
        const int64_t states = 1 + below(3), T = below(2) ? 1 : 1 + below(4), B = states * T;
        const int64_t K = 1 + below(3), H = K * (1 + below(4)), d = 1 + below(40);
        const int64_t e = 1 + below(turn % 5 ? 40 : 150), far = 2 * K * d + H * e + below(9);
        const int64_t values = H * e;
        float *x = drawn(B * far, 0), *q = room(B * K * d), *k = room(B * K * d), *v = x + 2 * K * d;
        float *raw = drawn(B * (H + 1), 0), *bias = drawn(H, 0), *rate = drawn(H, 0);
        float *dt = room(B * H), *log_decay = room(B * H), *beta = drawn(B * H, 0);
        float *state = drawn(states * H * d * e, 0), *z = room(B * values), *more = room(B * values);
        float *w = drawn(H * e, 0), *normed = room(B * values);
        if (turn % 3 == 0) spoil(raw, B * (H + 1)), spoil(state, states * H * d * e);
        hash ^= convolutions(team, states, turn % 3 == 0);
        const struct op ops[6] = {
            {UNIT, {to(x), far, to(q), B, K, d, bits_of(1e-6f), bits_of(0.3f)}},
            {UNIT, {to(x + K * d), far, to(k), B, K, d, bits_of(1e-6f), bits_of(1.0f)}},
            {DECAY, {to(raw), H + 1, to(bias), to(rate), to(dt), to(log_decay), B, H, bits_of(0.01f),
                     bits_of(below(2) ? INFINITY : 0.7f)}},
            {RECUR, {to(q), T * K * d, K * d, to(k), T * K * d, K * d, to(v), T * far, far, to(state),
                     states, T, H, K, d, e, to(beta), to(log_decay), to(z), below(2), below(2)}},
            {ADD_SCALED, {to(z), to(v), far, to(bias), to(more), B, H, e}},
            {NORMALIZE, {to(more), e, to(normed), B * H, e, to(w), 0, bits_of(1e-5f), 0, 0, B * H, 0, H}},
        };
        struct counter counters[6];
        llmcli_run(ops, 6, counters, team, NULL);
        hash = hashed(hashed(hash, q, B * K * d), k, B * K * d);
        hash = hashed(hashed(hash, dt, B * H), log_decay, B * H);
        hash = hashed(hashed(hash, state, states * H * d * e), z, B * values);
        hash = hashed(hashed(hash, more, B * values), normed, B * values);
        free(x), free(q), free(k), free(raw), free(bias), free(rate), free(dt), free(log_decay);
        free(beta), free(state), free(z), free(more), free(w), free(normed);
    }
    return hash;
}

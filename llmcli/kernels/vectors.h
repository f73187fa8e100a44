/* Sums and exponentials that have the same bits at every level.
 *
 * Sums are over 16 lanes, lane j taking numbers j, j + 16, …; lanes are then added in pairs: the
 * same order on every level. No fused multiply-add (built with -ffp-contract=off).
 */
#ifndef LLMCLI_VECTORS_H
#define LLMCLI_VECTORS_H

#include "common.h"

#define LANES 16

INLINE float folded(float lanes[LANES]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

/* 8 numbers: a register with AVX2, several smaller ones otherwise. */
#define VECTOR 8
typedef float vector __attribute__((vector_size(4 * VECTOR)));
typedef int32_t ints __attribute__((vector_size(4 * VECTOR)));

/* `a` where the mask is set, else `b`. */
INLINE vector chosen(ints mask, vector a, vector b) {
    return (vector)(((ints)a & mask) | ((ints)b & ~mask));
}

/* `name(x)` is e^x of a type of vectors on a `target`, with an error of at most 2 ulp; 0 below
 * -87.3, at most e^88. x = n log 2 + r, e^r by a polynomial (Cephes). */
#define EXPONENTIALS(target, name, vector, ints)                                                   \
    target INLINE vector name(vector x) {                                                                 \
        const vector most = (vector){0} + 88.0f, least = (vector){0} - 87.3f;                      \
        const ints large = x > most, small = x < least, nan = x != x;                              \
        vector y = (vector)(((ints)most & large) | ((ints)x & ~large));                            \
        y = (vector)(((ints)least & small) | ((ints)y & ~small));                                  \
        vector n = y * 1.44269504f + 12582912.0f; /* rounded to an integer in its low bits */  \
        ints power = (ints)n << 23 & ~nan; /* no sum of integers overflows */                      \
        n -= 12582912.0f;                                                                          \
        vector r = (y - n * 0.693359375f) + n * 2.12194440e-4f;                                    \
        vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;                                        \
        p = p * r + 8.3334519073e-3f;                                                              \
        p = p * r + 4.1665795894e-2f;                                                              \
        p = p * r + 1.6666665459e-1f;                                                              \
        p = p * r + 5.0000001201e-1f;                                                              \
        p = p * r * r + r + 1.0f;                                                                  \
        ints e = (ints)p + power;                                                                  \
        return (vector)(~small & (((ints)x & nan) | (e & ~nan)));                                  \
    }
EXPONENTIALS(, exponentials, vector, ints)

/* `name(x, cap)` is cap * tanh(x / cap), with `exponentials` of this type; near 0 a polynomial
 * (Cephes). */
#define SOFT_CAPS(target, name, exponentials, vector, ints)                                        \
    target INLINE vector name(vector x, float cap) {                                               \
        const vector y = x / cap, square = y * y;                                                  \
        const vector size = (vector)((ints)y & 0x7fffffff);                                        \
        vector p = square * -5.70498872745e-3f + 2.06390887954e-2f;                                \
        p = p * square - 5.37397155531e-2f;                                                        \
        p = p * square + 1.33314442036e-1f;                                                        \
        p = p * square - 3.33332819422e-1f;                                                        \
        p = p * square * y + y;                                                                    \
        const vector far = 1.0f - 2.0f / (exponentials(size + size) + 1.0f);                       \
        const ints near = size < 0.625f, sign = (ints)y & ~0x7fffffff;                             \
        return (vector)(((ints)p & near) | (((ints)far | sign) & ~near)) * cap;                    \
    }

SOFT_CAPS(, soft_capped, exponentials, vector, ints)

INLINE float exponential(float x) { return exponentials((vector){0} + x)[0]; }

INLINE vector silu(vector x) { return x / (1.0f + exponentials(-x)); }

/* log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 atanh(u / (2 + u)),
 * whose series is truncated at 2^-29: no small number is added to 1. Error at most 4 ulp; 0 below
 * -87.3. */
INLINE vector softplus(vector x) {
    const vector u = exponentials((vector)((ints)x | ~0x7fffffff)), s = u / (u + 2.0f), t = s * s;
    vector p = t * (1.0f / 15) + 1.0f / 13;
    p = p * t + 1.0f / 11;
    p = p * t + 1.0f / 9;
    p = p * t + 1.0f / 7;
    p = p * t + 1.0f / 5;
    p = p * t + 1.0f / 3;
    p = p * t + 1.0f;
    return chosen(x > 0.0f, x, (vector){0}) + (s + s) * p;
}

#endif

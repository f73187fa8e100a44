/* Shared by the products with packed weights at every level; see packed.c. */
#ifndef LLMCLI_PACKED_H
#define LLMCLI_PACKED_H

#include "formats.h"

/* A run of a row of x: integers in D digits of 8 bits, 256 q[0] + q[1] or q[0] alone. Runs of one
 * digit have a smaller stride: see `activation_at`. */
struct activation {
    float d;
    int32_t sums[2]; /* of the first and the last 16 integers */
    float added;     /* d times both: the factor of a minimum of 32 columns */
    int8_t q[2][RUN];
};

INLINE int64_t activation_size(const int D) { return sizeof(struct activation) - (2 - D) * RUN; }

/* Run i of a row at x. */
INLINE const struct activation *activation_at(const int D, const struct activation *x, int64_t i) {
    return (const void *)((const char *)x + i * activation_size(D));
}

/* The sum of a run, or of half `part` of it if halves have separate scales. */
INLINE float added_by(const int f, const struct activation *a, int part) {
    return formats[f].parts == 2 ? a->d * (float)a->sums[part] : a->added;
}

/* Prefetch run `at` of the next group while this one is read: the hardware prefetcher detects the
 * next planes too late (SmolLM2's matrices, uncached: see the tests' benchmarks). */
INLINE void fetch_next(const int f, const uint8_t *group, int64_t columns, int64_t at) {
    const int run = codes_size(f) + high_size(f) + scale_size(f) + min_size(f) + top_size(f) / 8;
    const uint8_t *next = group + group_size(f, columns) + at * run;
    UNROLL for (int i = 0; i < run; i += 64) FETCH(next + i);
}

#endif

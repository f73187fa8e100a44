/* What the products with packed weights share at every level; see packed.c. */
#ifndef LLMCLI_PACKED_H
#define LLMCLI_PACKED_H

#include "formats.h"

/* A run of a row of x. */
struct activation {
    int8_t q[RUN];
    float d;
    int32_t sums[2]; /* of the first 16 numbers of q, of the others */
    float added;     /* d times both: what a minimum of 32 columns is multiplied by */
};

/* Of a run, or of half `part` of it where a format's halves have scales. */
INLINE float added_by(const int f, const struct activation *a, int part) {
    return formats[f].parts == 2 ? a->d * (float)a->sums[part] : a->added;
}

/* Fetches run `at` of the next group while this one is read: the processor alone finds out too late
 * where the planes go on (SmolLM2's matrices, not in a cache: see the tests' benchmarks). */
INLINE void fetch_next(const int f, const uint8_t *group, int64_t columns, int64_t at) {
    const int run = codes_size(f) + high_size(f) + scale_size(f) + min_size(f) + top_size(f) / 8;
    const uint8_t *next = group + group_size(f, columns) + at * run;
    UNROLL for (int i = 0; i < run; i += 64) FETCH(next + i);
}

#endif

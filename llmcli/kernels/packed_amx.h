/* Products with packed weights by AMX: tiles of 16 rows of x and a group of 16 rows. See packed.c.
 *
 * A tile's product of 32 columns (16 if these have a scale) is moved through memory to AVX-512
 * registers, and scaled and added as at other levels. The weights of `SLICE` runs are decoded once
 * for all rows of x; between slices the sums are in the output. The inner loop is over groups for
 * the same 16 rows, so that outputs are contiguous; the runs of these 16 rows are interleaved.
 */
#ifndef LLMCLI_PACKED_AMX_H
#define LLMCLI_PACKED_AMX_H

#include "amx.h"
#include "packed_vnni.h"

#define TILE 16   /* rows of x */
#define SLICE 32  /* runs decoded at a time: a group's fit in the L1 cache */
#define PANELS 16 /* groups decoded at a time */

/* Tiles 0 and 1 are sums, 2 and 3 of x, 4 and 5 of weights, for 32 columns or for 16. */
static const struct tile_config tile_configs[2] = {
    {1, 0, {0}, {64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 8, 8}},
    {1, 0, {0}, {64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 4, 4}},
};

/* Decoded runs of a group. */
struct panel {
    int8_t q[SLICE * 8][64];
    float scale[SLICE * 2][ROWS], min[SLICE * 2][ROWS];
};

WITH_VNNI INLINE void decode(const int f, const uint8_t *group, int64_t columns, int64_t first,
                             int runs, struct panel *to) {
    const int parts = formats[f].parts;
    const __m512i offset = _mm512_set1_epi8((char)offset_vnni(f));
    struct planes p = planes_of(f, group, columns);
    p.codes += first * codes_size(f), p.high += first * high_size(f);
    p.scale += first * scale_size(f), p.min += first * min_size(f);
    p.top += first / 8 * top_size(f);
    for (int at = 0; at < runs; at++) {
        UNROLL for (int g = 0; g < 8; g++)
            _mm512_storeu_si512(to->q[8 * at + g], _mm512_sub_epi8(word_vnni(f, &p, g), offset));
        for (int part = 0; part < parts; part++) {
            const int i = parts * at + part;
            _mm512_storeu_ps(to->scale[i], scale_vnni(f, p.scale, p.top, ROWS * part));
            if (formats[f].min)
                _mm512_storeu_ps(to->min[i], scale_vnni(f, p.min, p.top + 2 * ROWS, ROWS * part));
        }
        next_run(f, &p, at);
    }
}

/* A digit of 16 rows of x times step i of a panel, a run or half of one. */
#define START(i, digit, sum, a, b)                                                                 \
    do {                                                                                           \
        TILE_ZERO(sum);                                                                            \
        TILE_LOAD(a, activation_at(D, x, TILE * ((i) / parts))->q[digit] +                         \
                         RUN / parts * ((i) % parts), activation_size(D));                         \
        TILE_LOAD(b, panel->q[8 / parts * (i)], 64);                                               \
        TILE_DOT(sum, a, b);                                                                       \
        TILE_STORE(sum, dots[sum], 64);                                                            \
    } while (0)

/* `dots`: dot products of the digits of x. */
WITH_VNNI INLINE void add_step(const int f, const int D, int32_t dots[][TILE][ROWS],
                               const struct panel *panel, const struct activation *x, int i,
                               __m512 sums[TILE]) {
    const int parts = formats[f].parts;
    const __m512 scale = _mm512_loadu_ps(panel->scale[i]);
    __m512 min = _mm512_setzero_ps();
    if (formats[f].min) min = _mm512_loadu_ps(panel->min[i]);
    UNROLL for (int m = 0; m < TILE; m++) {
        const struct activation *a = activation_at(D, x, TILE * (i / parts) + m);
        __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(a->d));
        __m512i dot = _mm512_loadu_si512(dots[0][m]);
        if (D == 2)
            dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8), _mm512_loadu_si512(dots[1][m]));
        sums[m] = _mm512_add_ps(sums[m], _mm512_mul_ps(_mm512_cvtepi32_ps(dot), by));
        if (formats[f].min) {
            __m512 added = _mm512_mul_ps(min, _mm512_set1_ps(added_by(f, a, i % parts)));
            sums[m] = formats[f].top ? _mm512_sub_ps(sums[m], added) : _mm512_add_ps(sums[m], added);
        }
    }
}

/* `first`: `out` is empty. */
WITH_VNNI INLINE void tile_amx(const int f, const int D, const struct panel *panel, int runs,
                               int first, const struct activation *x, float *out,
                               int64_t out_stride, __mmask16 kept) {
    const int parts = formats[f].parts, steps = runs * parts;
    int32_t dots[2][TILE][ROWS] __attribute__((aligned(64)));
    __m512 sums[TILE];
    UNROLL for (int m = 0; m < TILE; m++)
        sums[m] = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(kept, out + m * out_stride);
    int i = 0;
    for (; D == 2 && i < steps; i++) {
        START(i, 0, 0, 2, 4);
        START(i, 1, 1, 3, 5);
        add_step(f, D, dots, panel, x, i, sums);
    }
    for (; i + 1 < steps; i += 2) {
        START(i, 0, 0, 2, 4);
        START(i + 1, 0, 1, 3, 5);
        add_step(f, D, dots, panel, x, i, sums);
        add_step(f, D, dots + 1, panel, x, i + 1, sums);
    }
    if (i < steps) {
        START(i, 0, 0, 2, 4);
        add_step(f, D, dots, panel, x, i, sums);
    }
    UNROLL for (int m = 0; m < TILE; m++) _mm512_mask_storeu_ps(out + m * out_stride, kept, sums[m]);
}

/* At most `PANELS` groups times `tiles` of x; `rows`: number of existing rows in the groups. */
WITH_VNNI INLINE void groups_amx(const int f, const int D, const uint8_t *groups, int64_t count,
                                 int64_t columns, const struct activation *x, int64_t tiles,
                                 float *out, int64_t out_stride, int64_t rows) {
    static _Thread_local struct panel panels[PANELS];
    const int64_t runs = columns / RUN, size = group_size(f, columns);
    struct tile_config before; /* another library may configure its threads only once */
    TILE_CONFIGURATION(&before);
    TILE_CONFIGURE(&tile_configs[formats[f].parts - 1]);
    for (int64_t at = 0; at < runs; at += SLICE) {
        const int taken = runs - at < SLICE ? (int)(runs - at) : SLICE;
        for (int64_t n = 0; n < count; n++)
            decode(f, groups + n * size, columns, at, taken, panels + n);
        for (int64_t m = 0; m < tiles; m++)
            for (int64_t n = 0; n < count; n++) {
                const int64_t left = rows - n * ROWS;
                const __mmask16 kept = (__mmask16)((1u << (left < ROWS ? left : ROWS)) - 1);
                tile_amx(f, D, panels + n, taken, at == 0,
                         activation_at(D, x, TILE * (m * runs + at)),
                         out + TILE * m * out_stride + n * ROWS, out_stride, kept);
            }
    }
    TILE_CONFIGURE(&before);
}

#endif

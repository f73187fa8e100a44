/* The product of many float32 rows with a bfloat16 matrix by AMX: see bfloat16.c.
 *
 * A row of x is split into three bfloat16 rows: rounded numbers, the rounded remainder, and its
 * remainder, with 8 of a number's 24 bits each. Products of bfloat16 numbers are exact in float32.
 */
#ifndef LLMCLI_BFLOAT16_AMX_H
#define LLMCLI_BFLOAT16_AMX_H

#include "amx.h"

#define TILE 16    /* rows of x, rows of w */
#define COLUMNS 32 /* of a tile of x */
#define SLICE 8    /* tiles of columns of weights rearranged at a time */
#define PANELS 8   /* tiles of rows of w rearranged at a time */

/* Tiles 0 to 3 are sums, 4 and 5 of x, 6 and 7 of w. */
static const struct tile_config bfloat16_tiles = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16},
};

#define PIECES 3

/* 16 rows of 32 columns. */
struct pieces {
    uint16_t of[PIECES][TILE][COLUMNS];
};

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? bits >> 16 | 0x40 : rounded);
}

/* `rows` rows of x, `stride` apart, `columns` of them; zeros beyond. */
WITH_AVX512 static void split(const float *x, int64_t stride, int64_t rows, int64_t columns,
                              struct pieces *to) {
    for (int64_t k = 0; k < columns; k += COLUMNS, to++) {
        const int64_t count = columns - k < COLUMNS ? columns - k : COLUMNS;
        memset(to, 0, sizeof *to);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t i = 0; i < count; i++) {
                float rest = x[m * stride + k + i];
                for (int j = 0; j < PIECES; j++) {
                    const uint16_t rounded = to_bfloat16(rest);
                    to->of[j][m][i] = rounded;
                    rest -= widened(rounded);
                    rest = rest == rest ? rest : 0.0f; /* no remainder of infinity */
                }
            }
    }
}

/* Transpose 16 x 16 words. */
WITH_AVX512 INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    UNROLL for (int i = 0; i < 16; i += 8)
        UNROLL for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    UNROLL for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

/* 32 columns of `rows` rows of w as a tile: pairs of columns, each of 16 rows; zeros beyond. */
WITH_AVX512 INLINE void lay_out(const uint16_t *w, int64_t stride, int64_t rows, int64_t columns,
                                uint16_t to[TILE][COLUMNS]) {
    const __mmask32 kept = columns < COLUMNS ? (1u << columns) - 1 : 0xffffffff;
    __m512i r[16];
    UNROLL for (int n = 0; n < 16; n++)
        r[n] = n < rows ? _mm512_maskz_loadu_epi16(kept, w + n * stride) : _mm512_setzero_si512();
    transpose(r);
    UNROLL for (int n = 0; n < 16; n++) _mm512_storeu_si512(to[n], r[n]);
}

/* Add 32 rows of x times 32 of w, `count` tiles of columns, to `out`; `first`: `out` is empty. */
WITH_AVX512 INLINE void block(const struct pieces *x, int64_t x_stride,
                              uint16_t w[2][SLICE][TILE][COLUMNS], int64_t count, float *out,
                              int64_t stride, int first) {
    float *lower = out + TILE * stride;
    if (first) {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    } else {
        TILE_LOAD(0, out, 4 * stride); TILE_LOAD(1, out + TILE, 4 * stride);
        TILE_LOAD(2, lower, 4 * stride); TILE_LOAD(3, lower + TILE, 4 * stride);
    }
    for (int64_t k = 0; k < count; k++) {
        TILE_LOAD(6, w[0][k], 64); TILE_LOAD(7, w[1][k], 64);
        UNROLL for (int j = 0; j < PIECES; j++) {
            TILE_LOAD(4, x[k].of[j], 64); TILE_LOAD(5, x[k + x_stride].of[j], 64);
            TILE_DOT_BFLOAT16(0, 4, 6); TILE_DOT_BFLOAT16(1, 4, 7);
            TILE_DOT_BFLOAT16(2, 5, 6); TILE_DOT_BFLOAT16(3, 5, 7);
        }
    }
    TILE_STORE(0, out, 4 * stride); TILE_STORE(1, out + TILE, 4 * stride);
    TILE_STORE(2, lower, 4 * stride); TILE_STORE(3, lower + TILE, 4 * stride);
}

/* At most PANELS * 16 rows of w with all rows of x. */
WITH_AVX512 static void multiply_amx(const struct pieces *x, int64_t rows, const uint16_t *w,
                                     int64_t w_stride, int64_t outputs, int64_t columns, float *out,
                                     int64_t out_stride) {
    static _Thread_local uint16_t panels[PANELS][SLICE][TILE][COLUMNS] __attribute__((aligned(64)));
    const int64_t tiles = (columns + COLUMNS - 1) / COLUMNS;
    struct tile_config before; /* another library may configure its threads only once */
    TILE_CONFIGURATION(&before);
    TILE_CONFIGURE(&bfloat16_tiles);
    for (int64_t k = 0; k < tiles; k += SLICE) {
        const int64_t count = tiles - k < SLICE ? tiles - k : SLICE;
        for (int64_t n = 0; n < (outputs + 31) / 32 * 2; n++)
            for (int64_t i = 0; i < count; i++)
                lay_out(w + n * TILE * w_stride + (k + i) * COLUMNS, w_stride, outputs - n * TILE,
                        columns - (k + i) * COLUMNS, panels[n][i]);
        for (int64_t m = 0; m < rows; m += 2 * TILE)
            for (int64_t n = 0; n < outputs; n += 2 * TILE) {
                const struct pieces *at = x + m / TILE * tiles + k;
                const int64_t high = rows - m < 32 ? rows - m : 32;
                const int64_t wide = outputs - n < 32 ? outputs - n : 32;
                float *to = out + m * out_stride + n, part[32][32];
                if (high == 32 && wide == 32) {
                    block(at, tiles, panels + n / TILE, count, to, out_stride, k == 0);
                    continue;
                }
                for (int64_t i = 0; k && i < high; i++)
                    memcpy(part[i], to + i * out_stride, (size_t)wide * sizeof *to);
                block(at, tiles, panels + n / TILE, count, part[0], 32, k == 0);
                for (int64_t i = 0; i < high; i++)
                    memcpy(to + i * out_stride, part[i], (size_t)wide * sizeof *to);
            }
    }
    TILE_CONFIGURE(&before);
}

#endif

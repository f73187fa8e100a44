/* Products with packed weights by AVX2: 8 rows per register. See packed.c.
 */
#ifndef LLMCLI_PACKED_AVX2_H
#define LLMCLI_PACKED_AVX2_H

#include "packed.h"

/* How often products of pairs can be added in 16 bits; digits are at most 127. */
INLINE int sums_in_16_bits(int f) {
    int most = (1 << (formats[f].codes + formats[f].high)) - 1;
    return 32767 / (most * 2 * 127);
}

/* Codes of word g, 8 rows of the group from h * 8 on. */
WITH_AVX2 INLINE __m256i word_avx2(const int f, const struct planes *p, int g, int h) {
    const int at = 64 * (g / 4) + 32 * h, codes = formats[f].codes;
    const __m256i nibble = _mm256_set1_epi8(15), two = _mm256_set1_epi8(3);
    __m256i code, high;
    if (codes == 8) return _mm256_loadu_si256((const void *)(p->codes + 64 * g + 32 * h));
    if (codes == 4) {
        code = _mm256_loadu_si256((const void *)(p->codes + 64 * (g % 4) + 32 * h));
        code = _mm256_and_si256(g < 4 ? code : _mm256_srli_epi16(code, 4), nibble);
    } else {
        code = _mm256_loadu_si256((const void *)(p->codes + at));
        code = _mm256_and_si256(_mm256_srli_epi16(code, 2 * (g % 4)), two);
    }
    if (formats[f].high == 1) {
        const __m256i bit = _mm256_set1_epi8((char)(1 << codes));
        high = _mm256_loadu_si256((const void *)(p->high + 32 * h));
        high = g < codes ? _mm256_slli_epi16(high, codes - g) : _mm256_srli_epi16(high, g - codes);
        code = _mm256_or_si256(code, _mm256_and_si256(high, bit));
    }
    if (formats[f].high == 2) {
        const __m256i bits = _mm256_set1_epi8(48);
        const int shift = 2 * (g % 4);
        high = _mm256_loadu_si256((const void *)(p->high + at));
        high = shift < 4 ? _mm256_slli_epi16(high, 4 - shift) : _mm256_srli_epi16(high, shift - 4);
        code = _mm256_or_si256(code, _mm256_and_si256(high, bits));
    }
    if (formats[f].table) {
        __m128i table = _mm_loadu_si128((const void *)tables[formats[f].table - 1]);
        code = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
    }
    return code;
}

WITH_AVX2 INLINE __m256 scale_avx2(const int f, const uint8_t *plane, const uint8_t *top, int i) {
    if (formats[f].scale == HALVES)
        return _mm256_cvtph_ps(_mm_loadu_si128((const void *)(plane + 2 * i)));
    __m128i bytes = _mm_loadl_epi64((const void *)(plane + i));
    if (formats[f].scale == POWERS) {
        __m256i e = _mm256_cvtepu8_epi32(bytes), one = _mm256_set1_epi32(1);
        __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
        __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(
            _mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, one)));
    }
    __m256i numbers = formats[f].scale == BYTES ? _mm256_cvtepu8_epi32(bytes)
                                                : _mm256_cvtepi8_epi32(bytes);
    __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(top + 2 * (i % ROWS))));
    return _mm256_mul_ps(d, _mm256_cvtepi32_ps(numbers));
}

/* H halves of the group's rows, from h on. */
WITH_AVX2 INLINE void tile_avx2(const int f, const int D, const int M, const int H, int h,
                                const uint8_t *group, int64_t columns, const struct activation *x,
                                float *out, int64_t out_stride, int rows) {
    const int64_t runs = columns / RUN;
    const int parts = formats[f].parts;
    const int exact = formats[f].codes == 8 || formats[f].table;
    const int most = exact ? 1 : sums_in_16_bits(f), per_part = 8 / parts;
    const __m256i ones = _mm256_set1_epi16(1);
    struct planes p = planes_of(f, group, columns);
    __m256 sums[4][2];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < H; j++) sums[i][j] = _mm256_setzero_ps();
    for (int64_t at = 0; at < runs; at++) {
        if (M == 1) fetch_next(f, group, columns, at);
        __m256i pairs[4][2][2][2], dots[4][2][2][2];
        UNROLL for (int step = 0; step < 8; step++) {
            /* words that share bytes are consecutive; parts alternate */
            const int g = formats[f].codes == 4 ? 4 * (step & 1) + step / 2 : step;
            const int part = parts == 2 ? g / 4 : 0;
            const int nth = parts == 2 ? (formats[f].codes == 4 ? step / 2 : step % 4) : step;
            UNROLL for (int j = 0; j < H; j++) {
                __m256i code = word_avx2(f, &p, g, h + j), size = code;
                if (exact) size = _mm256_abs_epi8(code);
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int digit = 0; digit < D; digit++) {
                        int32_t four;
                        memcpy(&four, activation_at(D, x, i * runs + at)->q[digit] + 4 * g, 4);
                        __m256i xg = _mm256_set1_epi32(four);
                        if (exact) xg = _mm256_sign_epi8(xg, code);
                        __m256i two = _mm256_maddubs_epi16(size, xg);
                        __m256i *pair = &pairs[i][j][part][digit], *dot = &dots[i][j][part][digit];
                        *pair = nth % most == 0 ? two : _mm256_add_epi16(*pair, two);
                        if (nth % most == most - 1 || nth == per_part - 1) {
                            __m256i four_sums = _mm256_madd_epi16(*pair, ones);
                            *dot = nth < most ? four_sums : _mm256_add_epi32(*dot, four_sums);
                        }
                    }
            }
        }
        UNROLL for (int part = 0; part < parts; part++)
            UNROLL for (int j = 0; j < H; j++) {
                const int first = ROWS * part + 8 * (h + j);
                __m256 min = _mm256_setzero_ps(), scale = scale_avx2(f, p.scale, p.top, first);
                if (formats[f].min) min = scale_avx2(f, p.min, p.top + 2 * ROWS, first);
                UNROLL for (int i = 0; i < M; i++) {
                    const struct activation *a = activation_at(D, x, i * runs + at);
                    int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                    __m256i dot = dots[i][j][part][0];
                    if (D == 2)
                        dot = _mm256_add_epi32(_mm256_slli_epi32(dot, 8), dots[i][j][part][1]);
                    if (formats[f].offset)
                        dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(formats[f].offset * sum));
                    __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(a->d));
                    __m256 added = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), by);
                    sums[i][j] = _mm256_add_ps(sums[i][j], added);
                    if (formats[f].min) {
                        added = _mm256_mul_ps(min, _mm256_set1_ps(added_by(f, a, part)));
                        sums[i][j] = formats[f].top ? _mm256_sub_ps(sums[i][j], added)
                                                    : _mm256_add_ps(sums[i][j], added);
                    }
                }
            }
        next_run(f, &p, at);
    }
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < H; j++) {
            float *to = out + i * out_stride + 8 * (h + j);
            if (rows == ROWS) {
                _mm256_storeu_ps(to, sums[i][j]);
            } else {
                float last[8];
                int left = rows - 8 * (h + j);
                _mm256_storeu_ps(last, sums[i][j]);
                if (left > 0) memcpy(to, last, (left < 8 ? left : 8) * sizeof(float));
            }
        }
}

#endif

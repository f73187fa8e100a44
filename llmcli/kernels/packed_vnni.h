/* Products with packed weights by AVX-512 with VNNI: 16 rows per register. See packed.c.
 */
#ifndef LLMCLI_PACKED_VNNI_H
#define LLMCLI_PACKED_VNNI_H

#include "packed.h"

/* The offset to subtract from the bytes of `word_vnni`. */
INLINE int offset_vnni(int f) {
    return formats[f].codes == 8 || formats[f].table ? 128 : formats[f].offset;
}

/* Codes of word g, as unsigned bytes: signed ones, and numbers of tables, plus 128. */
WITH_VNNI INLINE __m512i word_vnni(const int f, const struct planes *p, int g) {
    const int at = 64 * (g / 4), codes = formats[f].codes;
    __m512i code;
    if (codes == 8)
        return _mm512_xor_si512(_mm512_loadu_si512(p->codes + 64 * g), _mm512_set1_epi8(-128));
    if (codes == 4) {
        code = _mm512_loadu_si512(p->codes + 64 * (g % 4));
        code = _mm512_and_si512(g < 4 ? code : _mm512_srli_epi16(code, 4), _mm512_set1_epi8(15));
    } else {
        code = _mm512_srli_epi16(_mm512_loadu_si512(p->codes + at), 2 * (g % 4));
        code = _mm512_and_si512(code, _mm512_set1_epi8(3));
    }
    if (formats[f].high == 1) {
        const __m512i bit = _mm512_set1_epi8((char)(1 << codes));
        __mmask64 set = _mm512_test_epi8_mask(_mm512_loadu_si512(p->high),
                                              _mm512_set1_epi8((char)(1 << g)));
        code = _mm512_mask_add_epi8(code, set, code, bit);
    }
    if (formats[f].high == 2) {
        const int shift = 2 * (g % 4);
        __m512i high = _mm512_loadu_si512(p->high + at);
        high = shift < 4 ? _mm512_slli_epi16(high, 4 - shift) : _mm512_srli_epi16(high, shift - 4);
        /* code | (high & 48) */
        code = _mm512_ternarylogic_epi32(code, high, _mm512_set1_epi8(48), 0xf8);
    }
    if (formats[f].table) {
        __m128i table = _mm_loadu_si128((const void *)tables[formats[f].table - 1]);
        table = _mm_xor_si128(table, _mm_set1_epi8(-128));
        code = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
    }
    return code;
}

WITH_VNNI INLINE __m512 scale_vnni(const int f, const uint8_t *plane, const uint8_t *top, int i) {
    if (formats[f].scale == HALVES)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(plane + 2 * i)));
    __m128i bytes = _mm_loadu_si128((const void *)(plane + i));
    if (formats[f].scale == POWERS) {
        __m512i e = _mm512_cvtepu8_epi32(bytes), one = _mm512_set1_epi32(1);
        __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
        __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        return _mm512_castsi512_ps(
            _mm512_mask_mov_epi32(small, _mm512_cmpgt_epi32_mask(e, one), normal));
    }
    __m512i numbers = formats[f].scale == BYTES ? _mm512_cvtepu8_epi32(bytes)
                                                : _mm512_cvtepi8_epi32(bytes);
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)top));
    return _mm512_mul_ps(d, _mm512_cvtepi32_ps(numbers));
}

WITH_VNNI INLINE void tile_vnni(const int f, const int D, const int M, const uint8_t *group,
                                int64_t columns, const struct activation *x, float *out,
                                int64_t out_stride, int rows) {
    const int64_t runs = columns / RUN;
    const int parts = formats[f].parts, steps = 8 / parts;
    const int offset = offset_vnni(f);
    struct planes p = planes_of(f, group, columns);
    __m512 sums[8];
    UNROLL for (int i = 0; i < M; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t at = 0; at < runs; at++) {
        fetch_next(f, group, columns, at);
        UNROLL for (int part = 0; part < parts; part++) {
            __m512i dots[8][2]; /* of both digits; with one digit, alternating words of a run */
            UNROLL for (int i = 0; i < M; i++) {
                const struct activation *a = activation_at(D, x, i * runs + at);
                const int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                dots[i][0] = _mm512_setzero_si512();
                dots[i][1] = _mm512_set1_epi32(-offset * sum);
            }
            UNROLL for (int step = 0; step < steps; step++) {
                /* words that share bytes are consecutive */
                const int g = parts == 2 ? 4 * part + step : 4 * (step & 1) + step / 2;
                const __m512i code = word_vnni(f, &p, g);
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int digit = 0; digit < D; digit++) {
                        __m512i *dot = &dots[i][D == 2 ? digit : step & 1];
                        int32_t four;
                        memcpy(&four, activation_at(D, x, i * runs + at)->q[digit] + 4 * g, 4);
                        *dot = _mm512_dpbusd_epi32(*dot, code, _mm512_set1_epi32(four));
                    }
            }
            __m512 min = _mm512_setzero_ps(), scale = scale_vnni(f, p.scale, p.top, ROWS * part);
            if (formats[f].min) min = scale_vnni(f, p.min, p.top + 2 * ROWS, ROWS * part);
            UNROLL for (int i = 0; i < M; i++) {
                const struct activation *a = activation_at(D, x, i * runs + at);
                __m512i dot = D == 2 ? _mm512_slli_epi32(dots[i][0], 8) : dots[i][0];
                dot = _mm512_add_epi32(dot, dots[i][1]);
                __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(a->d));
                sums[i] = _mm512_add_ps(sums[i], _mm512_mul_ps(_mm512_cvtepi32_ps(dot), by));
                if (formats[f].min) {
                    __m512 added = _mm512_mul_ps(min, _mm512_set1_ps(added_by(f, a, part)));
                    sums[i] = formats[f].top ? _mm512_sub_ps(sums[i], added)
                                             : _mm512_add_ps(sums[i], added);
                }
            }
        }
        next_run(f, &p, at);
    }
    const __mmask16 kept = (__mmask16)((1u << rows) - 1);
    UNROLL for (int i = 0; i < M; i++) _mm512_mask_storeu_ps(out + i * out_stride, kept, sums[i]);
}

#endif

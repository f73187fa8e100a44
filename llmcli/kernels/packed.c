/* Products of float32 rows with packed weights, whose activations are rounded to 8 bits.
 *
 *     out[m][n] = sum over runs of 32 columns of  (sum of q x) * (scale * d)  [+ min * (d * sum x)]
 *
 * Axes: M rows of x, K columns, N rows of the weights, 16 of which are a group (formats.h). Of each
 * run of x, d = max|x| / 127 and the integers are x / d, rounded to even; q are those of the weight.
 *
 * The sum of q x is an integer and exact in any order. The float32 sum of a row goes over its runs
 * (or halves of runs, where these have scales) from left to right, each product rounded and added
 * in a step of its own: no fused multiply-add, so that all levels, compilers and tiles give the same
 * bits, whatever the number of rows, threads and chunks.
 */
#include "formats.h"
#include "program.h"

#define CHUNK_BYTES (48 << 10) /* of weights: what a thread takes at a time */

/* A run of a row of x. */
struct activation {
    int8_t q[RUN];
    float d;
    int32_t sums[2]; /* of the first 16 numbers of q, of the others */
    int32_t unused;
};

/* Several matrices with the same columns, whose outputs lie side by side. */
struct segment {
    const uint8_t *packed;
    int64_t format, rows, column; /* of the first output */
};

typedef void (*tile_fn)(const uint8_t *group, int64_t columns, const struct activation *x,
                        float *out, int64_t out_stride, int rows);

/* ---- activations ---------------------------------------------------------------------------- */

/* Infinities and NaN make d a NaN, and with it every output; what is too small to divide by is 0. */
INLINE void quantize_run(const float *x, struct activation *a) {
    uint32_t most = 0;
    for (int i = 0; i < RUN; i++) {
        uint32_t size = bits_of(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int finite = most < 0x7f800000, used = most >= 0x03000000; /* 2^-121 */
    float inverse = finite && used ? 127.0f / float_of(most) : 0.0f;
    a->d = !finite ? float_of(0x7fc00000) : used ? float_of(most) / 127.0f : 0.0f;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            /* rounded to even: at 1.5 * 2^23 the distance of numbers is 1 */
            float shifted = (finite ? x[i] : 0.0f) * inverse + 12582912.0f;
            int32_t q = (int32_t)(bits_of(shifted) - 0x4b400000u);
            a->q[i] = (int8_t)q;
            sum += q;
        }
        a->sums[half] = sum;
    }
    a->unused = 0;
}

static void quantize_portable(const float *x, struct activation *a, int64_t runs) {
    for (int64_t i = 0; i < runs; i++) quantize_run(x + RUN * i, a + i);
}

#ifdef X86
WITH_AVX2 static void quantize_avx2(const float *x, struct activation *a, int64_t runs) {
    for (int64_t i = 0; i < runs; i++) quantize_run(x + RUN * i, a + i);
}
#endif

/* ---- portable ------------------------------------------------------------------------------- */

INLINE void tile_portable(const int f, const int M, const uint8_t *group, int64_t columns,
                          const struct activation *x, float *out, int64_t out_stride, int rows) {
    const int64_t runs = columns / RUN;
    const int parts = formats[f].parts;
    struct planes p = planes_of(f, group, columns);
    float sums[8][ROWS] = {{0}};
    for (int64_t at = 0; at < runs; at++) {
        int32_t dots[8][2][ROWS] = {{{0}}};
        for (int g = 0; g < 8; g++) {
            int8_t q[64]; /* 4 columns of 16 rows */
            for (int i = 0; i < 64; i++) q[i] = (int8_t)number_at(f, &p, g, i);
            for (int m = 0; m < M; m++) {
                const int8_t *xg = x[m * runs + at].q + 4 * g;
                int32_t *dot = dots[m][parts == 2 ? g / 4 : 0];
                for (int r = 0; r < ROWS; r++)
                    dot[r] += q[4 * r] * xg[0] + q[4 * r + 1] * xg[1] + q[4 * r + 2] * xg[2] +
                              q[4 * r + 3] * xg[3];
            }
        }
        for (int part = 0; part < parts; part++)
            for (int r = 0; r < ROWS; r++) {
                float scale = scale_at(f, p.scale, p.top, ROWS * part + r), min = 0;
                if (formats[f].min) min = scale_at(f, p.min, p.top + 2 * ROWS, ROWS * part + r);
                for (int m = 0; m < M; m++) {
                    const struct activation *a = x + m * runs + at;
                    int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                    sums[m][r] += (float)dots[m][part][r] * (scale * a->d);
                    if (formats[f].min) {
                        float added = min * (a->d * (float)sum);
                        sums[m][r] = formats[f].top ? sums[m][r] - added : sums[m][r] + added;
                    }
                }
            }
        next_run(f, &p, at);
    }
    for (int m = 0; m < M; m++) memcpy(out + m * out_stride, sums[m], rows * sizeof(float));
}

#ifdef X86

/* How often products of pairs can be added in 16 bits, and the largest code times 2 * 127. */
INLINE int sums_in_16_bits(int f) {
    int most = (1 << (formats[f].codes + formats[f].high)) - 1;
    return 32767 / (most * 2 * 127);
}

/* Fetches run `at` of the next group while this one is read: the processor alone finds out too late
 * where the planes go on (SmolLM2's matrices, not in a cache: see the tests' benchmarks). */
INLINE void fetch_next(const int f, const uint8_t *group, int64_t columns, int64_t at) {
    const int run = codes_size(f) + high_size(f) + scale_size(f) + min_size(f) + top_size(f) / 8;
    const uint8_t *next = group + group_size(f, columns) + at * run;
    UNROLL for (int i = 0; i < run; i += 64) FETCH(next + i);
}

/* ---- AVX2: 8 rows a register ---------------------------------------------------------------- */

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

/* H halves of the group's rows, the first of which is h. */
WITH_AVX2 INLINE void tile_avx2(const int f, const int M, const int H, int h, const uint8_t *group,
                                int64_t columns, const struct activation *x, float *out,
                                int64_t out_stride, int rows) {
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
        __m256i pairs[4][2][2], dots[4][2][2];
        UNROLL for (int step = 0; step < 8; step++) {
            /* words that share their bytes follow each other; each part gets its words in turn */
            const int g = formats[f].codes == 4 ? 4 * (step & 1) + step / 2 : step;
            const int part = parts == 2 ? g / 4 : 0;
            const int nth = parts == 2 ? (formats[f].codes == 4 ? step / 2 : step % 4) : step;
            UNROLL for (int j = 0; j < H; j++) {
                __m256i code = word_avx2(f, &p, g, h + j), size = code;
                if (exact) size = _mm256_abs_epi8(code);
                UNROLL for (int i = 0; i < M; i++) {
                    int32_t four;
                    memcpy(&four, x[i * runs + at].q + 4 * g, 4);
                    __m256i xg = _mm256_set1_epi32(four);
                    if (exact) xg = _mm256_sign_epi8(xg, code);
                    __m256i two = _mm256_maddubs_epi16(size, xg);
                    __m256i *pair = &pairs[i][j][part], *dot = &dots[i][j][part];
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
                    const struct activation *a = x + i * runs + at;
                    int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                    __m256i dot = dots[i][j][part];
                    if (formats[f].offset)
                        dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(formats[f].offset * sum));
                    __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(a->d));
                    __m256 added = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), by);
                    sums[i][j] = _mm256_add_ps(sums[i][j], added);
                    if (formats[f].min) {
                        added = _mm256_mul_ps(min, _mm256_set1_ps(a->d * (float)sum));
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

/* ---- AVX-512 with VNNI: 16 rows a register --------------------------------------------------- */

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

WITH_VNNI INLINE void tile_vnni(const int f, const int M, const uint8_t *group, int64_t columns,
                                const struct activation *x, float *out, int64_t out_stride,
                                int rows) {
    const int64_t runs = columns / RUN;
    const int parts = formats[f].parts;
    const int offset = formats[f].codes == 8 || formats[f].table ? 128 : formats[f].offset;
    struct planes p = planes_of(f, group, columns);
    __m512 sums[8];
    UNROLL for (int i = 0; i < M; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t at = 0; at < runs; at++) {
        if (M == 1) fetch_next(f, group, columns, at);
        __m512i dots[8][2]; /* of the first 16 columns, of the others */
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int part = 0; part < 2; part++)
                dots[i][part] = _mm512_set1_epi32(-offset * x[i * runs + at].sums[part]);
        UNROLL for (int step = 0; step < 8; step++) {
            const int g = 4 * (step & 1) + step / 2;
            __m512i code = word_vnni(f, &p, g);
            UNROLL for (int i = 0; i < M; i++) {
                int32_t four;
                memcpy(&four, x[i * runs + at].q + 4 * g, 4);
                dots[i][g / 4] = _mm512_dpbusd_epi32(dots[i][g / 4], code, _mm512_set1_epi32(four));
            }
        }
        UNROLL for (int part = 0; part < parts; part++) {
            __m512 min = _mm512_setzero_ps(), scale = scale_vnni(f, p.scale, p.top, ROWS * part);
            if (formats[f].min) min = scale_vnni(f, p.min, p.top + 2 * ROWS, ROWS * part);
            UNROLL for (int i = 0; i < M; i++) {
                const struct activation *a = x + i * runs + at;
                int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                __m512i dot = dots[i][part];
                if (parts == 1) dot = _mm512_add_epi32(dot, dots[i][1]);
                __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(a->d));
                sums[i] = _mm512_add_ps(sums[i], _mm512_mul_ps(_mm512_cvtepi32_ps(dot), by));
                if (formats[f].min) {
                    __m512 added = _mm512_mul_ps(min, _mm512_set1_ps(a->d * (float)sum));
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

#ifdef WITH_DOTPROD

/* ---- ARM with dot products of bytes: 4 rows a register --------------------------------------- */

/* Numbers of word g, rows h * 4 to h * 4 + 3 of the group. */
WITH_DOTPROD INLINE int8x16_t word_dotprod(const int f, const struct planes *p, int g, int h) {
    const int at = 64 * (g / 4) + 16 * h, codes = formats[f].codes;
    uint8x16_t code, high;
    if (codes == 8) return vreinterpretq_s8_u8(vld1q_u8(p->codes + 64 * g + 16 * h));
    if (codes == 4) {
        code = vld1q_u8(p->codes + 64 * (g % 4) + 16 * h);
        code = g < 4 ? vandq_u8(code, vdupq_n_u8(15)) : vshrq_n_u8(code, 4);
    } else {
        code = vshlq_u8(vld1q_u8(p->codes + at), vdupq_n_s8((int8_t)(-2 * (g % 4))));
        code = vandq_u8(code, vdupq_n_u8(3));
    }
    if (formats[f].high == 1) {
        high = vshlq_u8(vld1q_u8(p->high + 16 * h), vdupq_n_s8((int8_t)(codes - g)));
        code = vorrq_u8(code, vandq_u8(high, vdupq_n_u8((uint8_t)(1 << codes))));
    }
    if (formats[f].high == 2) {
        high = vshlq_u8(vld1q_u8(p->high + at), vdupq_n_s8((int8_t)(4 - 2 * (g % 4))));
        code = vorrq_u8(code, vandq_u8(high, vdupq_n_u8(48)));
    }
    if (formats[f].table) return vqtbl1q_s8(vld1q_s8(tables[formats[f].table - 1]), code);
    return vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8((int8_t)formats[f].offset));
}

INLINE float32x4_t halves_dotprod(const uint8_t *at) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
}

INLINE float32x4_t scale_dotprod(const int f, const uint8_t *plane, const uint8_t *top, int i) {
    if (formats[f].scale == HALVES) return halves_dotprod(plane + 2 * i);
    if (formats[f].scale == POWERS) {
        float powers[4];
        for (int j = 0; j < 4; j++) powers[j] = power(plane[i + j]);
        return vld1q_f32(powers);
    }
    uint32_t four;
    memcpy(&four, plane + i, 4);
    uint8x8_t bytes = vcreate_u8(four);
    int16x4_t numbers = vget_low_s16(formats[f].scale == BYTES
                                         ? vreinterpretq_s16_u16(vmovl_u8(bytes))
                                         : vmovl_s8(vreinterpret_s8_u8(bytes)));
    return vmulq_f32(halves_dotprod(top + 2 * (i % ROWS)), vcvtq_f32_s32(vmovl_s16(numbers)));
}

/* H quarters of the group's rows, the first of which is h. */
WITH_DOTPROD INLINE void tile_dotprod(const int f, const int M, const int H, int h,
                                      const uint8_t *group, int64_t columns,
                                      const struct activation *x, float *out, int64_t out_stride,
                                      int rows) {
    const int64_t runs = columns / RUN;
    const int parts = formats[f].parts;
    struct planes p = planes_of(f, group, columns);
    float32x4_t sums[4][4];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < H; j++) sums[i][j] = vdupq_n_f32(0);
    for (int64_t at = 0; at < runs; at++) {
        int32x4_t dots[4][4];
        UNROLL for (int g = 0; g < 8; g++) {
            const int part = parts == 2 ? g / 4 : 0;
            const int first = g % (8 / parts) == 0, last = g % (8 / parts) == 8 / parts - 1;
            UNROLL for (int j = 0; j < H; j++) {
                int8x16_t numbers = word_dotprod(f, &p, g, h + j);
                UNROLL for (int i = 0; i < M; i++) {
                    int32_t four;
                    memcpy(&four, x[i * runs + at].q + 4 * g, 4);
                    dots[i][j] = vdotq_s32(first ? vdupq_n_s32(0) : dots[i][j], numbers,
                                           vreinterpretq_s8_s32(vdupq_n_s32(four)));
                }
                if (!last) continue;
                const int row = ROWS * part + 4 * (h + j);
                float32x4_t min = vdupq_n_f32(0), scale = scale_dotprod(f, p.scale, p.top, row);
                if (formats[f].min) min = scale_dotprod(f, p.min, p.top + 2 * ROWS, row);
                UNROLL for (int i = 0; i < M; i++) {
                    const struct activation *a = x + i * runs + at;
                    int32_t sum = parts == 2 ? a->sums[part] : a->sums[0] + a->sums[1];
                    float32x4_t by = vmulq_n_f32(scale, a->d);
                    float32x4_t added = vmulq_f32(vcvtq_f32_s32(dots[i][j]), by);
                    sums[i][j] = vaddq_f32(sums[i][j], added);
                    if (formats[f].min) {
                        added = vmulq_n_f32(min, a->d * (float)sum);
                        sums[i][j] = formats[f].top ? vsubq_f32(sums[i][j], added)
                                                    : vaddq_f32(sums[i][j], added);
                    }
                }
            }
        }
        next_run(f, &p, at);
    }
    UNROLL for (int i = 0; i < M; i++) {
        float results[ROWS];
        UNROLL for (int j = 0; j < H; j++) vst1q_f32(results + 4 * j, sums[i][j]);
        int left = rows - 4 * h;
        if (left > 0)
            memcpy(out + i * out_stride + 4 * h, results,
                   (left < 4 * H ? left : 4 * H) * sizeof(float));
    }
}

#endif

/* ---- tiles by level, format and number of rows ----------------------------------------------- */

#define PORTABLE_TILE(f, M)                                                                        \
    static void portable_##f##_##M(const uint8_t *group, int64_t columns,                          \
                                   const struct activation *x, float *out, int64_t out_stride,     \
                                   int rows) {                                                     \
        tile_portable(f, M, group, columns, x, out, out_stride, rows);                             \
    }
#define AVX2_TILE(f, M)                                                                            \
    WITH_AVX2 static void avx2_##f##_##M(const uint8_t *group, int64_t columns,                    \
                                         const struct activation *x, float *out,                   \
                                         int64_t out_stride, int rows) {                           \
        const int H = M == 1 ? 2 : 1;                                                              \
        for (int h = 0; h < 2; h += H)                                                             \
            tile_avx2(f, M, H, h, group, columns, x, out, out_stride, rows);                       \
    }
#define VNNI_TILE(f, M)                                                                            \
    WITH_VNNI static void vnni_##f##_##M(const uint8_t *group, int64_t columns,                    \
                                         const struct activation *x, float *out,                   \
                                         int64_t out_stride, int rows) {                           \
        tile_vnni(f, M, group, columns, x, out, out_stride, rows);                                 \
    }
#define DOTPROD_TILE(f, M)                                                                         \
    WITH_DOTPROD static void dotprod_##f##_##M(const uint8_t *group, int64_t columns,              \
                                               const struct activation *x, float *out,             \
                                               int64_t out_stride, int rows) {                     \
        const int H = M == 4 ? 2 : 4;                                                              \
        for (int h = 0; h < 4; h += H)                                                             \
            tile_dotprod(f, M, H, h, group, columns, x, out, out_stride, rows);                    \
    }

/* Rows of x that share a pass over the weights: 1, 2, 4 or 8, as many as there are registers for.
 * A level's tiles by the logarithm of that. */
#define PASSES 4
#ifdef X86
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILE(f, 1) PORTABLE_TILE(f, 2) PORTABLE_TILE(f, 4)                                    \
    AVX2_TILE(f, 1) AVX2_TILE(f, 2) AVX2_TILE(f, 4)                                                \
    VNNI_TILE(f, 1) VNNI_TILE(f, 2) VNNI_TILE(f, 4) VNNI_TILE(f, 8)                                \
    static const tile_fn tiles_##f[3][PASSES] = {                                                  \
        {portable_##f##_1, portable_##f##_2, portable_##f##_4, NULL},                              \
        {avx2_##f##_1, avx2_##f##_2, avx2_##f##_4, NULL},                                          \
        {vnni_##f##_1, vnni_##f##_2, vnni_##f##_4, vnni_##f##_8},                                  \
    };
#elif defined(WITH_DOTPROD)
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILE(f, 1) PORTABLE_TILE(f, 2) PORTABLE_TILE(f, 4)                                    \
    DOTPROD_TILE(f, 1) DOTPROD_TILE(f, 2) DOTPROD_TILE(f, 4)                                       \
    static const tile_fn tiles_##f[2][PASSES] = {                                                  \
        {portable_##f##_1, portable_##f##_2, portable_##f##_4, NULL},                              \
        {dotprod_##f##_1, dotprod_##f##_2, dotprod_##f##_4, NULL},                                 \
    };
#else
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILE(f, 1) PORTABLE_TILE(f, 2) PORTABLE_TILE(f, 4)                                    \
    static const tile_fn tiles_##f[1][PASSES] = {                                                  \
        {portable_##f##_1, portable_##f##_2, portable_##f##_4, NULL},                              \
    };
#endif

EACH_TILE(Q4_0) EACH_TILE(Q4_1) EACH_TILE(Q5_0) EACH_TILE(Q5_1) EACH_TILE(Q8_0) EACH_TILE(Q2_K)
EACH_TILE(Q3_K) EACH_TILE(Q4_K) EACH_TILE(Q5_K) EACH_TILE(Q6_K) EACH_TILE(IQ4_NL)
EACH_TILE(IQ4_XS) EACH_TILE(MXFP4)

#define ROW(f) [f] = tiles_##f
static const tile_fn (*const tiles[FORMATS])[PASSES] = {
    ROW(Q4_0), ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0), ROW(Q2_K), ROW(Q3_K),
    ROW(Q4_K), ROW(Q5_K), ROW(Q6_K), ROW(IQ4_NL), ROW(IQ4_XS), ROW(MXFP4),
};

INLINE int tiles_of(int64_t level) {
    if (level == DOTPROD) return 1;
    return level == VNNI ? 2 : level == PORTABLE ? 0 : 1;
}

/* ---- operations ------------------------------------------------------------------------------ */

/* QUANTIZE: rows of x [M, K], `x_stride` apart, into `out` [M, K / 32]. An item is a row.
 * 0 x, 1 x_stride, 2 out, 3 rows M, 4 columns K */
static int64_t items_quantize(const struct op *op) { return op->arg[3]; }

static void work_quantize(const struct op *op, int64_t m, int64_t level) {
    const int64_t runs = op->arg[4] / RUN;
    const float *x = (const float *)address(op->arg[0]) + m * op->arg[1];
    struct activation *a = (struct activation *)address(op->arg[2]) + m * runs;
#ifdef X86
    if (level >= AVX2) {
        quantize_avx2(x, a, runs);
        return;
    }
#endif
    (void)level;
    quantize_portable(x, a, runs);
}

/* MULTIPLY: what QUANTIZE gives with the rows of all segments. An item is some groups of one.
 * 0 activations, 1 segments, 2 their number, 3 out, 4 out_stride, 5 rows M, 6 columns K,
 * 7 bias of all outputs or 0 */
INLINE int64_t groups_of(const struct segment *s) { return (s->rows + ROWS - 1) / ROWS; }

INLINE int64_t chunk_of(const struct segment *s, int64_t columns) {
    int64_t chunk = CHUNK_BYTES / group_size(s->format, columns);
    return chunk < 1 ? 1 : chunk;
}

static int64_t items_multiply(const struct op *op) {
    const struct segment *segments = address(op->arg[1]);
    int64_t items = 0;
    for (int64_t i = 0; i < op->arg[2]; i++) {
        int64_t chunk = chunk_of(segments + i, op->arg[6]);
        items += (groups_of(segments + i) + chunk - 1) / chunk;
    }
    return items;
}

static void work_multiply(const struct op *op, int64_t item, int64_t level) {
    const struct segment *s = address(op->arg[1]);
    const struct activation *x = address(op->arg[0]);
    const float *bias = address(op->arg[7]);
    const int64_t out_stride = op->arg[4], rows = op->arg[5], columns = op->arg[6];
    for (;; s++) {
        int64_t chunk = chunk_of(s, columns), items = (groups_of(s) + chunk - 1) / chunk;
        if (item < items) break;
        item -= items;
    }
    const tile_fn *by_rows = tiles[s->format][tiles_of(level)];
    const int64_t size = group_size(s->format, columns), chunk = chunk_of(s, columns);
    int64_t first = item * chunk, last = first + chunk < groups_of(s) ? first + chunk : groups_of(s);
    int64_t begin = first * ROWS, end = last * ROWS < s->rows ? last * ROWS : s->rows;
    for (int64_t m = 0; m < rows;) {
        int pass = PASSES - 1;
        while (!by_rows[pass] || rows - m < 1 << pass) pass--;
        float *out = (float *)address(op->arg[3]) + m * out_stride + s->column;
        for (int64_t n = first; n < last; n++) {
            int64_t left = s->rows - n * ROWS;
            by_rows[pass](s->packed + n * size, columns, x + m * (columns / RUN), out + n * ROWS,
                          out_stride, left < ROWS ? left : ROWS);
        }
        for (int64_t i = m; bias && i < m + (1 << pass); i++, out += out_stride)
            for (int64_t n = begin; n < end; n++) out[n] += bias[s->column + n];
        m += 1 << pass;
    }
}

const struct kernel kernel_quantize = {items_quantize, work_quantize};
const struct kernel kernel_multiply = {items_multiply, work_multiply};

/* ---- what is exported ------------------------------------------------------------------------ */

/* Activations as the products read them: `count` numbers rounded to 8 bits, in float32. */
void llmcli_seen(const float *x, float *out, int64_t count) {
    for (int64_t i = 0; i < count / RUN; i++, x += RUN, out += RUN) {
        struct activation a;
        quantize_run(x, &a);
        for (int j = 0; j < RUN; j++) out[j] = (float)a.q[j] * a.d;
    }
}

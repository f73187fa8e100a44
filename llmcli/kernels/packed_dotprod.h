/* Products with packed weights by ARM's dot products of bytes: 4 rows per register. See packed.c.
 */
#ifndef LLMCLI_PACKED_DOTPROD_H
#define LLMCLI_PACKED_DOTPROD_H

#include "packed.h"

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

/* H quarters of the group's rows, from h on. */
WITH_DOTPROD INLINE void tile_dotprod(const int f, const int D, const int M, const int H, int h,
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
        int32x4_t dots[4][4][2];
        UNROLL for (int g = 0; g < 8; g++) {
            const int part = parts == 2 ? g / 4 : 0;
            const int first = g % (8 / parts) == 0, last = g % (8 / parts) == 8 / parts - 1;
            UNROLL for (int j = 0; j < H; j++) {
                int8x16_t numbers = word_dotprod(f, &p, g, h + j);
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int digit = 0; digit < D; digit++) {
                        int32x4_t *dot = &dots[i][j][digit];
                        int32_t four;
                        memcpy(&four, activation_at(D, x, i * runs + at)->q[digit] + 4 * g, 4);
                        *dot = vdotq_s32(first ? vdupq_n_s32(0) : *dot, numbers,
                                         vreinterpretq_s8_s32(vdupq_n_s32(four)));
                    }
                if (!last) continue;
                const int row = ROWS * part + 4 * (h + j);
                float32x4_t min = vdupq_n_f32(0), scale = scale_dotprod(f, p.scale, p.top, row);
                if (formats[f].min) min = scale_dotprod(f, p.min, p.top + 2 * ROWS, row);
                UNROLL for (int i = 0; i < M; i++) {
                    const struct activation *a = activation_at(D, x, i * runs + at);
                    int32x4_t dot = dots[i][j][0];
                    if (D == 2) dot = vaddq_s32(vshlq_n_s32(dot, 8), dots[i][j][1]);
                    float32x4_t by = vmulq_n_f32(scale, a->d);
                    float32x4_t added = vmulq_f32(vcvtq_f32_s32(dot), by);
                    sums[i][j] = vaddq_f32(sums[i][j], added);
                    if (formats[f].min) {
                        added = vmulq_n_f32(min, added_by(f, a, part));
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

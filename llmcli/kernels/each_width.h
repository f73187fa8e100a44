/* Includes TEMPLATE, which defines functions in vectors of WIDTH floats, for every level that has
 * vectors of its own: TARGET are the function's attributes, NAMED(name) its name, FUSED(a, b, c) is
 * a * b + c rounded once, EACH(x) has x in all lanes, WIDENED(bits) and HALVES(bits) are the bfloat16 or
 * float16 numbers at that address. BY_WIDTH(name) makes `work_name`, which calls the function of the level.
 */
#include "common.h"

#ifndef LLMCLI_EACH_WIDTH_H
#define LLMCLI_EACH_WIDTH_H

typedef float quad __attribute__((vector_size(16)));

INLINE quad fused(quad a, quad b, quad c) {
#ifdef WITH_DOTPROD /* ARM */
    return (quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else /* a function call for each number, where the processor is not known to do it */
    return (quad){
        __builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
        __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3]),
    };
#endif
}

INLINE quad each(float x) { return (quad){x, x, x, x}; }
INLINE quad four_widened(const uint16_t *bits) {
    return (quad){widened(bits[0]), widened(bits[1]), widened(bits[2]), widened(bits[3])};
}
INLINE quad four_halves(const uint16_t *bits) {
    return (quad){half(bits[0]), half(bits[1]), half(bits[2]), half(bits[3])};
}

#ifdef X86
#define BY_WIDTH(name)                                                                             \
    static void work_##name(const struct op *op, int64_t item, int64_t level) {                    \
        if (level >= AVX512)                                                                       \
            name##_avx512(op, item);                                                               \
        else if (level >= AVX2)                                                                    \
            name##_avx2(op, item);                                                                 \
        else                                                                                       \
            name##_portable(op, item);                                                             \
    }
#else
#define BY_WIDTH(name)                                                                             \
    static void work_##name(const struct op *op, int64_t item, int64_t level) {                    \
        (void)level;                                                                               \
        name##_portable(op, item);                                                                 \
    }
#endif

#endif

#ifdef X86
#define WIDTH 16
#define FUSED(a, b, c) _mm512_fmadd_ps(a, b, c)
#define EACH(x) _mm512_set1_ps(x)
#define WIDENED(bits)                                                                              \
    _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(bits))), 16)
#define HALVES(bits) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(bits)))
#define NAMED(name) name##_avx512
#define TARGET WITH_AVX512
#include TEMPLATE
#undef WIDTH
#undef FUSED
#undef EACH
#undef WIDENED
#undef HALVES
#undef NAMED
#undef TARGET

#define WIDTH 8
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
#define EACH(x) _mm256_set1_ps(x)
#define WIDENED(bits)                                                                              \
    _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(bits))), 16)
#define HALVES(bits) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(bits)))
#define NAMED(name) name##_avx2
#define TARGET WITH_AVX2
#include TEMPLATE
#undef WIDTH
#undef FUSED
#undef EACH
#undef WIDENED
#undef HALVES
#undef NAMED
#undef TARGET
#endif

#define WIDTH 4
#define FUSED(a, b, c) fused(a, b, c)
#define EACH(x) each(x)
#define WIDENED(bits) four_widened(bits)
#define HALVES(bits) four_halves(bits)
#define NAMED(name) name##_portable
#define TARGET
#include TEMPLATE
#undef WIDTH
#undef FUSED
#undef EACH
#undef WIDENED
#undef HALVES
#undef NAMED
#undef TARGET
#undef TEMPLATE

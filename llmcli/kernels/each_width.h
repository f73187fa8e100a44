/* Includes TEMPLATE, which defines functions in vectors of WIDTH floats, for every level with its
 * own vectors; `BY_LEVEL` (program.h) calls them.
 */
#include "common.h"

#ifndef LLMCLI_EACH_WIDTH_H
#define LLMCLI_EACH_WIDTH_H

typedef float quad __attribute__((vector_size(16)));

INLINE quad fused(quad a, quad b, quad c) {
#ifdef WITH_DOTPROD /* ARM */
    return (quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else /* a function call per number, without a known instruction */
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

#define FUSED_4(a, b, c) fused(a, b, c)
#define EACH_4(x) each(x)
#define WIDENED_4(bits) four_widened(bits)
#define HALVES_4(bits) four_halves(bits)
#define LEVEL_4 _portable
#define TARGET_4

#define FUSED_8(a, b, c) _mm256_fmadd_ps(a, b, c)
#define EACH_8(x) _mm256_set1_ps(x)
#define WIDENED_8(bits)                                                                            \
    _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(bits))), 16)
#define HALVES_8(bits) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(bits)))
#define LEVEL_8 _avx2
#define TARGET_8 WITH_AVX2

#define FUSED_16(a, b, c) _mm512_fmadd_ps(a, b, c)
#define EACH_16(x) _mm512_set1_ps(x)
#define WIDENED_16(bits)                                                                           \
    _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(bits))), 16)
#define HALVES_16(bits) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(bits)))
#define LEVEL_16 _avx512
#define TARGET_16 WITH_AVX512

/* Macros for templates: FUSED(a, b, c) is a fused a * b + c, EACH(x) has x in all lanes,
 * WIDENED(bits) and HALVES(bits) load bfloat16 or float16 numbers, TARGET are a function's
 * attributes, NAMED(name) its name. */
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define FUSED JOINED(FUSED_, WIDTH)
#define EACH JOINED(EACH_, WIDTH)
#define WIDENED JOINED(WIDENED_, WIDTH)
#define HALVES JOINED(HALVES_, WIDTH)
#define TARGET JOINED(TARGET_, WIDTH)
#define NAMED(name) JOINED(name, JOINED(LEVEL_, WIDTH))

#endif

#ifdef X86
#define WIDTH 16
#include TEMPLATE
#undef WIDTH
#define WIDTH 8
#include TEMPLATE
#undef WIDTH
#endif
#define WIDTH 4
#include TEMPLATE
#undef WIDTH
#undef TEMPLATE

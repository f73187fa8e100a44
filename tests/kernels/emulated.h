/* AVX-512 intrinsics computed by SIMDe, for a processor that has AVX2, FMA and F16C only.
 *
 * For `-include`: what the kernels call is then defined, and their target attributes are nothing,
 * so that the same sources run here, levels `avx512` and `vnni` included.
 */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#define target(...) unused

/* What SIMDe 0.7.4 lacks; GCC may have them as macros. */
#undef _mm512_extractf32x8_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_extractf32x8_ps(all, half) simde__m512_to_private(all).m256[half]

static inline simde__m512 emulated_cvtepi32_ps(simde__m512i numbers) {
    simde__m512i_private from = simde__m512i_to_private(numbers);
    simde__m512_private to;
    for (int i = 0; i < 16; i++) to.f32[i] = (float)from.i32[i];
    return simde__m512_from_private(to);
}

static inline simde__m512 emulated_cvtph_ps(__m256i halves) {
    simde__m512_private to;
    to.m256[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    to.m256[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    return simde__m512_from_private(to);
}

static inline simde__m512i emulated_cvtepi8_epi32(__m128i bytes) {
    simde__m512i_private to;
    to.m256i[0] = _mm256_cvtepi8_epi32(bytes);
    to.m256i[1] = _mm256_cvtepi8_epi32(_mm_bsrli_si128(bytes, 8));
    return simde__m512i_from_private(to);
}

static inline simde__m512i emulated_cvtepu8_epi32(__m128i bytes) {
    simde__m512i_private to;
    to.m256i[0] = _mm256_cvtepu8_epi32(bytes);
    to.m256i[1] = _mm256_cvtepu8_epi32(_mm_bsrli_si128(bytes, 8));
    return simde__m512i_from_private(to);
}

static inline void emulated_mask_storeu_ps(float *to, __mmask16 kept, simde__m512 numbers) {
    simde__m512_private from = simde__m512_to_private(numbers);
    for (int i = 0; i < 16; i++)
        if (kept >> i & 1) to[i] = from.f32[i];
}

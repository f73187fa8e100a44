/* AVX-512 intrinsics computed by SIMDe, for a processor that has AVX2, FMA and F16C only.
 *
 * For `-include`: what the kernels call is then defined, and their target attributes are nothing,
 * so that the same sources run here, levels `avx512`, `vnni`, `avx512bf16` and `amx` included.
 */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#define target(...) unused

/* What SIMDe 0.7.4 lacks; GCC may have them as macros. */
#undef _mm512_extractf32x8_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_permute_ps
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4
#define _mm512_permute_ps emulated_permute_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_maskz_loadu_epi16 emulated_maskz_loadu_epi16
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

static inline simde__m512 emulated_maskz_loadu_ps(__mmask16 kept, const float *from) {
    simde__m512_private to;
    for (int i = 0; i < 16; i++) to.f32[i] = kept >> i & 1 ? from[i] : 0;
    return simde__m512_from_private(to);
}

static inline simde__m512i emulated_maskz_loadu_epi16(__mmask32 kept, const void *from) {
    simde__m512i_private to;
    for (int i = 0; i < 32; i++) to.u16[i] = kept >> i & 1 ? ((const unsigned short *)from)[i] : 0;
    return simde__m512i_from_private(to);
}

static inline simde__m512i emulated_cvtepu16_epi32(__m256i numbers) {
    simde__m512i_private to;
    to.m256i[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(numbers));
    to.m256i[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(numbers, 1));
    return simde__m512i_from_private(to);
}

static inline simde__m512 emulated_shuffle_f32x4(simde__m512 a, simde__m512 b, int which) {
    simde__m512_private from[2] = {simde__m512_to_private(a), simde__m512_to_private(b)}, to;
    for (int i = 0; i < 4; i++) to.m128[i] = from[i / 2].m128[which >> 2 * i & 3];
    return simde__m512_from_private(to);
}

static inline simde__m512 emulated_permute_ps(simde__m512 numbers, int which) {
    simde__m512_private from = simde__m512_to_private(numbers), to;
    for (int i = 0; i < 16; i++) to.f32[i] = from.f32[i / 4 * 4 + (which >> 2 * (i % 4) & 3)];
    return simde__m512_from_private(to);
}

/* Tiles of AMX as arrays, each row of 64 bytes. */
#include <stdint.h>
#include <string.h>

static __thread uint8_t emulated_tiles[8][16][64], emulated_config[64];

static inline int emulated_rows(int t) { return emulated_config[48 + t]; }

static inline int emulated_bytes(int t) { return emulated_config[16 + 2 * t]; }

static inline void emulated_load(int t, const void *at, int64_t stride) {
    for (int i = 0; i < emulated_rows(t); i++)
        memcpy(emulated_tiles[t][i], (const char *)at + i * stride, emulated_bytes(t));
}

static inline void emulated_store(int t, void *at, int64_t stride) {
    for (int i = 0; i < emulated_rows(t); i++)
        memcpy((char *)at + i * stride, emulated_tiles[t][i], emulated_bytes(t));
}

static inline float emulated_widened(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline void emulated_dot(int sum, int a, int b, int bfloat16) {
    for (int m = 0; m < emulated_rows(a); m++)
        for (int k = 0; k < emulated_rows(b); k++)
            for (int n = 0; n < 16; n++) {
                const uint8_t *x = emulated_tiles[a][m] + 4 * k, *w = emulated_tiles[b][k] + 4 * n;
                uint8_t *at = emulated_tiles[sum][m] + 4 * n;
                int32_t number;
                float real;
                memcpy(&number, at, 4), memcpy(&real, at, 4);
                for (int i = 0; i < 4; i++) number += (int8_t)x[i] * (int8_t)w[i];
                for (int i = 0; i < 4; i += 2)
                    real += emulated_widened(x + i) * emulated_widened(w + i);
                if (bfloat16) memcpy(at, &real, 4);
                else memcpy(at, &number, 4);
            }
}

#define TILE_CONFIGURATION(config) memcpy(config, emulated_config, 64)
#define TILE_CONFIGURE(config) memcpy(emulated_config, config, 64)
#define TILE_ZERO(tmm) memset(emulated_tiles[tmm], 0, sizeof *emulated_tiles)
#define TILE_LOAD(tmm, at, stride) emulated_load(tmm, at, stride)
#define TILE_STORE(tmm, at, stride) emulated_store(tmm, at, stride)
#define TILE_DOT(sum, a, b) emulated_dot(sum, a, b, 0)
#define TILE_DOT_BFLOAT16(sum, a, b) emulated_dot(sum, a, b, 1)

/* Shared by all kernels: processor levels, teams of threads, conversions.
 *
 * No Python.h: ctypes calls these functions, and a compiler alone is enough to build them.
 */
#ifndef LLMCLI_COMMON_H
#define LLMCLI_COMMON_H

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

/* If the compiler supports ARMv8.2's dot products of bytes. */
#if defined(__aarch64__) && !defined(__AARCH64EB__)
#if defined(__ARM_FEATURE_DOTPROD)
#define WITH_DOTPROD
#elif !defined(__clang__)
#define WITH_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#endif
#ifdef WITH_DOTPROD
#include <arm_neon.h>
#endif

/* Loops over values that only stay in registers if unrolled early. */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch((address), 0, 2)

/* Processor levels; each x86 level includes the previous ones. */
enum level { PORTABLE, AVX2, AVX512, VNNI, AVX512BF16, AMX, DOTPROD };
#define WITH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define WITH_VNNI \
    __attribute__((target("avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

/* Starts a team of threads, each calling the function: GOMP_parallel of an OpenMP library. */
typedef void (*parallel_fn)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* The level, the team's starter (NULL: only the calling thread), its number of threads. */
struct team {
    int64_t level;
    parallel_fn parallel;
    int64_t threads;
};

/* Run the work on each thread of the team, or for small work `alone` on the calling thread. */
INLINE void run_team(const struct team *team, void (*work)(void *), void *data, int alone) {
    if (team->parallel && team->threads > 1 && !alone)
        team->parallel(work, data, (unsigned)team->threads, 0);
    else
        work(data);
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* A bfloat16 number. */
INLINE float widened(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* Round to bfloat16. */
INLINE uint16_t narrowed(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? bits >> 16 | 0x40 : rounded);
}

/* Round to float16, ties to even; infinity beyond 65,504. */
INLINE uint16_t halved(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
    const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    /* the spacing of float32 at 0.5 equals the smallest float16 number */
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t rounded = size < 113u << 23 ? subnormal : normal;
    rounded = rounded > 0x7c00 ? 0x7c00 : rounded;
    return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : rounded));
}

/* Convert float16 exactly, even if subnormal numbers are flushed to zero. */
INLINE float half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    float subnormal = float_of(rest | 113u << 23) - float_of(113u << 23);
    uint32_t normal = rest + (rest >= 0x7c00u << 13 ? 224u << 23 : 112u << 23);
    return float_of(sign | (rest < 0x400u << 13 ? bits_of(subnormal) : normal));
}

#endif

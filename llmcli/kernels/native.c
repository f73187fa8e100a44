/* The product of a few bfloat16 rows with a bfloat16 matrix, with float32 results.
 *
 *     out[m][n] = sum over k of x[m][k] * w[n][k]
 *
 * Axes: M rows of x, K columns of x and of w, N rows of w.
 *
 * Every weight is read once for all rows of x. Each output is summed in one order, whatever the
 * number of rows, threads, the chunk or the processor level are, so that results are equal bit for
 * bit: there are 16 lanes, and of every block of 32 columns lane j takes column 2j, then 2j + 1,
 * each with a fused multiply-add in float32; columns beyond K count as zeros. At the end lane j is
 * added to lane j + 8, then 4, then 2, then 1. Pairs of neighbours share a lane because they share
 * a 32-bit word: a shift makes one of them a float32, a mask the other.
 *
 * No Python.h: ctypes calls these functions, and a compiler alone is enough to build them.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define X86 1
#endif

/* Loops over the sums, which stay in registers only if they are unrolled early. */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 32             /* columns that are multiplied at a time */
#define MOST_ROWS 8          /* rows of x that share a pass: their sums stay in registers */
#define CHUNK_BYTES (64 << 10) /* of weights: what a thread takes at a time */

/* Weights are fetched into L2 so many rows ahead: without it, cold rows of 576 or 1,536 columns are
 * read at 8 GB/s by one thread with one row of x and at 5 with four, with it at 11 and 10. */
#define AHEAD 8
#define FETCH(address) __builtin_prefetch((address), 0, 2)

enum level { PORTABLE, AVX2, AVX512 };

/* A team of threads, each of which calls the function: GOMP_parallel of an OpenMP library. */
typedef void (*parallel_fn)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* The number that a change of what is exported here, or of its arguments, counts up. */
int llmcli_native_version(void) { return 1; }

struct product {
    /* In float32, pass by pass: a block of each of its rows, then the next block of each. Of a
     * block the 16 even columns come first, then the odd ones. Pass m begins at m * padded. */
    const float *x;
    const uint16_t *w;
    float *out;
    int64_t w_stride, out_stride; /* elements from row to row */
    int64_t rows, outputs, columns, padded, chunk;
    /* Rows first to last of w with the rows of x of one pass, which begins with row m. */
    void (*tiles)(const struct product *, int64_t first, int64_t last, int64_t m, int64_t rows);
    _Atomic int64_t next; /* row of w that nobody has taken yet */
};

INLINE float widened(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

/* The last, incomplete block of a row of w, zeros behind it. */
INLINE void last_block(const struct product *p, int64_t n, uint16_t block[BLOCK]) {
    int64_t whole = p->columns / BLOCK * BLOCK;
    memset(block, 0, BLOCK * sizeof *block);
    memcpy(block, p->w + n * p->w_stride + whole, (p->columns - whole) * sizeof *block);
}

/* ---- portable ------------------------------------------------------------------------------ */

/* a * b + c rounded once. Where the processor has no such instruction, in double: there a product
 * of bfloat16 numbers is exact, and rounding the sum twice cannot be told from rounding it once,
 * for 53 >= 2 * 24 + 2 (Figueroa 1995; a subnormal sum is exact in double or far from a tie). */
INLINE float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return (float)((double)a * (double)b + (double)c);
#endif
}

INLINE void add_block(const uint16_t *w, const float *x, float lanes[16]) {
    uint16_t block[BLOCK];
    memcpy(block, w, sizeof block); /* a mapped file's numbers may begin at an odd address */
    for (int j = 0; j < 16; j++) lanes[j] = fused(widened(block[2 * j]), x[j], lanes[j]);
    for (int j = 0; j < 16; j++) lanes[j] = fused(widened(block[2 * j + 1]), x[16 + j], lanes[j]);
}

static void tiles_portable(const struct product *p, int64_t first, int64_t last, int64_t m,
                           int64_t rows) {
    int64_t whole = p->columns / BLOCK * BLOCK;
    for (int64_t n = first; n < last; n++) {
        const uint16_t *w = p->w + n * p->w_stride;
        uint16_t tail[BLOCK];
        last_block(p, n, tail);
        for (int64_t i = m; i < m + rows; i++) {
            const float *x = p->x + m * p->padded + (i - m) * BLOCK;
            float lanes[16] = {0};
            for (int64_t k = 0; k < whole; k += BLOCK) {
                FETCH(w + k + AHEAD * p->w_stride);
                add_block(w + k, x + k * rows, lanes);
            }
            if (whole < p->columns) add_block(tail, x + whole * rows, lanes);
            for (int half = 8; half; half /= 2)
                for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
            p->out[i * p->out_stride + n] = lanes[0];
        }
    }
}

#ifdef X86

/* ---- AVX2 and FMA: two registers of 8 lanes an output --------------------------------------- */

#define WITH_AVX2 __attribute__((target("avx2,fma")))

WITH_AVX2 INLINE float folded_8(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* R rows of w from n on with M rows of x from m on. */
WITH_AVX2 INLINE void tile_avx2(const int R, const int M, const struct product *p, int64_t n,
                                int64_t m) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    const float *x = p->x + m * p->padded;
    const uint16_t *w = p->w + n * p->w_stride;
    int64_t stride = p->w_stride;
    uint16_t tails[8][BLOCK];
    __m256 sums[8][2];
    UNROLL for (int i = 0; i < R * M; i++) sums[i][0] = sums[i][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < p->padded; k += BLOCK, x += M * BLOCK, w += BLOCK) {
        if (p->columns - k < BLOCK) {
            UNROLL for (int r = 0; r < R; r++) last_block(p, n + r, tails[r]);
            w = tails[0], stride = BLOCK;
        }
        UNROLL for (int r = 0; r < R; r++) {
            FETCH(w + (r + AHEAD) * stride);
            UNROLL for (int h = 0; h < 2; h++) {
                __m256i words = _mm256_loadu_si256((const void *)(w + r * stride + 16 * h));
                __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
                __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(words, upper));
                UNROLL for (int i = 0; i < M; i++) {
                    const float *xi = x + i * BLOCK + 8 * h;
                    __m256 sum = sums[r * M + i][h];
                    sum = _mm256_fmadd_ps(even, _mm256_loadu_ps(xi), sum);
                    sums[r * M + i][h] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(xi + 16), sum);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < M; i++)
            p->out[(m + i) * p->out_stride + n + r] =
                folded_8(_mm256_add_ps(sums[r * M + i][0], sums[r * M + i][1]));
}

/* ---- AVX-512 (F, BW, VL, DQ): one register of 16 lanes an output ---------------------------- */

#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))

WITH_AVX512 INLINE float folded_16(__m512 lanes) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

WITH_AVX512 INLINE void tile_avx512(const int R, const int M, const struct product *p, int64_t n,
                                    int64_t m) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    const float *x = p->x + m * p->padded;
    const uint16_t *w = p->w + n * p->w_stride;
    int64_t stride = p->w_stride;
    uint16_t tails[8][BLOCK];
    __m512 sums[16];
    UNROLL for (int i = 0; i < R * M; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->padded; k += BLOCK, x += M * BLOCK, w += BLOCK) {
        if (p->columns - k < BLOCK) {
            UNROLL for (int r = 0; r < R; r++) last_block(p, n + r, tails[r]);
            w = tails[0], stride = BLOCK;
        }
        UNROLL for (int r = 0; r < R; r++) {
            FETCH(w + (r + AHEAD) * stride);
            __m512i words = _mm512_loadu_si512(w + r * stride);
            __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
            UNROLL for (int i = 0; i < M; i++) {
                const float *xi = x + i * BLOCK;
                __m512 sum = _mm512_fmadd_ps(even, _mm512_loadu_ps(xi), sums[r * M + i]);
                sums[r * M + i] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(xi + 16), sum);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < M; i++)
            p->out[(m + i) * p->out_stride + n + r] = folded_16(sums[r * M + i]);
}

/* For each number of rows of x, as many rows of w at a time as there are registers for. */
#define TILES(M, R, tile)                                                                          \
    case M:                                                                                        \
        for (; n + R <= last; n += R) tile(R, M, p, n, m);                                         \
        for (; n < last; n++) tile(1, M, p, n, m);                                                 \
        break;

WITH_AVX2 static void tiles_avx2(const struct product *p, int64_t n, int64_t last, int64_t m,
                                 int64_t rows) {
    switch (rows) {
        TILES(1, 4, tile_avx2)
        TILES(2, 2, tile_avx2)
        TILES(3, 2, tile_avx2)
        TILES(4, 1, tile_avx2)
        TILES(5, 1, tile_avx2)
        TILES(6, 1, tile_avx2)
        TILES(7, 1, tile_avx2)
        TILES(8, 1, tile_avx2)
    }
}

WITH_AVX512 static void tiles_avx512(const struct product *p, int64_t n, int64_t last, int64_t m,
                                     int64_t rows) {
    switch (rows) {
        TILES(1, 8, tile_avx512)
        TILES(2, 8, tile_avx512)
        TILES(3, 4, tile_avx512)
        TILES(4, 4, tile_avx512)
        TILES(5, 2, tile_avx512)
        TILES(6, 2, tile_avx512)
        TILES(7, 2, tile_avx512)
        TILES(8, 2, tile_avx512)
    }
}

#endif

/* ---- what is exported ----------------------------------------------------------------------- */

/* The levels that this processor and its operating system have: bit i for `enum level` i. */
unsigned llmcli_native_levels(void) {
    unsigned levels = 1u << PORTABLE;
#ifdef X86
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return levels;
    /* The registers that the system saves: bits 1 and 2 for AVX, 5 to 7 for AVX-512. */
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return levels;
    if ((b & bit_AVX2) && (saved & 0x6) == 0x6) {
        levels |= 1u << AVX2;
        if ((b & avx512) == avx512 && (saved & 0xe6) == 0xe6) levels |= 1u << AVX512;
    }
#endif
    return levels;
}

/* Rows of x in the pass that begins with row m: all passes have about as many. */
static int64_t rows_of_pass(const struct product *p, int64_t m) {
    int64_t left = p->rows - m, passes = (left + MOST_ROWS - 1) / MOST_ROWS;
    return (left + passes - 1) / passes;
}

/* What each thread does: it takes rows of w until there are none left, so that one that is kept
 * from running leaves its share to the others. */
static void take_chunks(void *data) {
    struct product *p = data;
    for (;;) {
        int64_t first = atomic_fetch_add(&p->next, p->chunk);
        if (first >= p->outputs) return;
        int64_t last = p->outputs - first < p->chunk ? p->outputs : first + p->chunk;
        for (int64_t m = 0, rows; m < p->rows; m += rows) {
            rows = rows_of_pass(p, m);
            p->tiles(p, first, last, m, rows);
        }
    }
}

/* x [M, K] and w [N, K] bfloat16, out [M, N] float32, their rows contiguous and `*_stride`
 * elements apart. `parallel` starts a team of `threads`; NULL: this thread does it alone, as it
 * does what is too small for a team. `level` must be one of `llmcli_native_levels`.
 * Returns 0, or -1 where there is no memory for x in float32. */
int llmcli_product_bf16(const uint16_t *x, int64_t x_stride, const uint16_t *w, int64_t w_stride,
                        float *out, int64_t out_stride, int64_t rows, int64_t outputs,
                        int64_t columns, int level, parallel_fn parallel, unsigned threads) {
    struct product p = {
        .w = w, .w_stride = w_stride, .out = out, .out_stride = out_stride,
        .rows = rows, .outputs = outputs, .columns = columns,
        .padded = (columns + BLOCK - 1) / BLOCK * BLOCK,
        .tiles = tiles_portable,
    };
#ifdef X86
    if (level == AVX2) p.tiles = tiles_avx2;
    if (level == AVX512) p.tiles = tiles_avx512;
#else
    (void)level;
#endif
    if (rows <= 0 || outputs <= 0) return 0;
    float *wide = malloc((size_t)(rows * p.padded + 1) * sizeof *wide), *next = wide;
    if (!wide) return -1;
    for (int64_t m = 0, pass; m < rows; m += pass) {
        pass = rows_of_pass(&p, m);
        for (int64_t k = 0; k < p.padded; k += BLOCK)
            for (int64_t i = m; i < m + pass; i++, next += BLOCK) {
                int64_t left = columns - k;
                uint16_t block[BLOCK] = {0};
                memcpy(block, x + i * x_stride + k, 2 * (size_t)(left < BLOCK ? left : BLOCK));
                for (int j = 0; j < 16; j++) {
                    next[j] = widened(block[2 * j]);
                    next[16 + j] = widened(block[2 * j + 1]);
                }
            }
    }
    p.x = wide;
    p.chunk = CHUNK_BYTES / (2 * (columns + 1)) / 8 * 8;
    if (p.chunk < 8) p.chunk = 8;
    atomic_init(&p.next, 0);
    if (parallel && threads > 1 && outputs > p.chunk)
        parallel(take_chunks, &p, threads, 0);
    else
        take_chunks(&p);
    free(wide);
    return 0;
}

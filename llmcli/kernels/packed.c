/* Products of float32 rows with packed weights, whose activations are rounded to integers.
 *
 *     out[m][n] = sum over runs of 32 columns of  (sum of q x) * (scale * d)  [+ min * (d * sum x)]
 *
 * Axes: M rows of x, K columns, N rows of the weights, 16 of which are a group (formats.h); D digits.
 * Of each run of x, the integers are x * 127 / max|x|, rounded to even, and d = max|x| / 127; with
 * a second digit they are 256 times that plus the remainder in 256ths, at most 127 (digits must not
 * be -128: AVX2 changes signs in 8 bits), and d is divided by 256. q are the weight's integers.
 *
 * The sum of q x is an integer, at most 2^29, and exact in any order; it is rounded to float32 once.
 * The float32 sum of a row adds its runs (or halves of runs with separate scales) from left to
 * right, without fused multiply-adds, so that all levels, compilers and tiles give the same bits
 * for any number of rows, threads and chunks.
 */
#include "program.h"

#if defined(X86)
#include "packed_amx.h"
#include "packed_avx2.h"
#elif defined(WITH_DOTPROD)
#include "packed_dotprod.h"
#else
#include "packed.h"
#endif

#define CHUNK_BYTES (48 << 10) /* of weights per work item */
#define MANY 64                /* rows of x */

/* Several matrices with the same columns and concatenated outputs; packed, or as stored. */
struct segment {
    const uint8_t *packed;
    int64_t format, rows, column; /* of the first output */
    const struct stored *stored;
};

typedef void (*tile_fn)(const uint8_t *group, int64_t columns, const struct activation *x,
                        float *out, int64_t out_stride, int rows);

/* ---- activations ---------------------------------------------------------------------------- */

#define LEAST 0x09000000u /* 2^-109: d and d / 256 are normal numbers */

/* Infinities and NaN give d = NaN, and NaN outputs; numbers too small to divide by count as 0. */
INLINE void quantize_run(const int D, const float *x, struct activation *a) {
    uint32_t most = 0;
    for (int i = 0; i < RUN; i++) {
        uint32_t size = bits_of(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int finite = most < 0x7f800000, used = most >= LEAST;
    float inverse = finite && used ? 127.0f / float_of(most) : 0.0f;
    a->d = !finite ? float_of(0x7fc00000) : used ? float_of(most) / 127.0f : 0.0f;
    if (D == 2) a->d *= 0x1p-8f;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            /* rounded to even: at 1.5 * 2^23 the spacing of numbers is 1 */
            float scaled = (finite ? x[i] : 0.0f) * inverse, shifted = scaled + 12582912.0f;
            int32_t q = (int32_t)(bits_of(shifted) - 0x4b400000u);
            a->q[0][i] = (int8_t)q;
            if (D == 2) {
                float rest = (scaled - (shifted - 12582912.0f)) * 256.0f + 12582912.0f;
                int32_t low = (int32_t)(bits_of(rest) - 0x4b400000u);
                low = low < -127 ? -127 : low > 127 ? 127 : low;
                a->q[1][i] = (int8_t)low;
                q = 256 * q + low;
            }
            sum += q;
        }
        a->sums[half] = sum;
    }
    a->added = a->d * (float)(a->sums[0] + a->sums[1]);
}

#ifdef X86
/* Integers of 32 bits as bytes. */
WITH_AVX2 INLINE __m256i bytes_avx2(const __m256i q[4]) {
    /* packing leaves groups of 4 in the order 0 2 4 6 1 3 5 7 */
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]),
                                       _mm256_packs_epi32(q[2], q[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Sums of the first and the last 16 bytes. */
WITH_AVX2 INLINE void sums_avx2(__m256i bytes, int32_t sums[2]) {
    const __m256i up = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); /* plus 128 */
    const __m256i eights = _mm256_sad_epu8(up, _mm256_setzero_si256());
    const __m128i low = _mm256_castsi256_si128(eights), high = _mm256_extracti128_si256(eights, 1);
    sums[0] = (int32_t)(_mm_cvtsi128_si32(low) + _mm_extract_epi32(low, 2)) - 16 * 128;
    sums[1] = (int32_t)(_mm_cvtsi128_si32(high) + _mm_extract_epi32(high, 2)) - 16 * 128;
}

/* Like `quantize_run`; depending on the largest number it falls back to scalar code. */
WITH_AVX2 INLINE void quantize_run_avx2(const int D, const float *x, struct activation *a) {
    const __m256 plain = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 magic = _mm256_set1_ps(12582912.0f);
    const __m256i integer = _mm256_set1_epi32(0x4b400000), least = _mm256_set1_epi8(-127);
    __m256 four[4];
    __m256i sizes = _mm256_setzero_si256(), q[4], low[4];
    UNROLL for (int i = 0; i < 4; i++) {
        four[i] = _mm256_loadu_ps(x + 8 * i);
        sizes = _mm256_max_epu32(sizes, _mm256_castps_si256(_mm256_and_ps(four[i], plain)));
    }
    __m128i most4 = _mm_max_epu32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    most4 = _mm_max_epu32(most4, _mm_shuffle_epi32(most4, 0x4e));
    most4 = _mm_max_epu32(most4, _mm_shuffle_epi32(most4, 0xb1));
    const uint32_t most = (uint32_t)_mm_cvtsi128_si32(most4);
    if (most < LEAST || most >= 0x7f800000) {
        quantize_run(D, x, a);
        return;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / float_of(most));
    UNROLL for (int i = 0; i < 4; i++) {
        const __m256 scaled = _mm256_mul_ps(four[i], inverse), shifted = _mm256_add_ps(scaled, magic);
        q[i] = _mm256_sub_epi32(_mm256_castps_si256(shifted), integer);
        if (D == 2) {
            __m256 rest = _mm256_sub_ps(scaled, _mm256_sub_ps(shifted, magic));
            rest = _mm256_add_ps(_mm256_mul_ps(rest, _mm256_set1_ps(256.0f)), magic);
            low[i] = _mm256_sub_epi32(_mm256_castps_si256(rest), integer);
        }
    }
    __m256i bytes = bytes_avx2(q);
    _mm256_storeu_si256((void *)a->q[0], bytes);
    sums_avx2(bytes, a->sums);
    a->d = float_of(most) / 127.0f;
    if (D == 2) {
        int32_t sums[2];
        bytes = _mm256_max_epi8(bytes_avx2(low), least); /* 128 became 127 before */
        _mm256_storeu_si256((void *)a->q[1], bytes);
        sums_avx2(bytes, sums);
        for (int i = 0; i < 2; i++) a->sums[i] = 256 * a->sums[i] + sums[i];
        a->d *= 0x1p-8f;
    }
    a->added = a->d * (float)(a->sums[0] + a->sums[1]);
}

WITH_AVX2 static void quantize_avx2(const int D, const float *x, char *to, int64_t runs,
                                    int64_t stride) {
    for (int64_t i = 0; i < runs; i++)
        if (D == 2)
            quantize_run_avx2(2, x + RUN * i, (void *)(to + stride * i));
        else
            quantize_run_avx2(1, x + RUN * i, (void *)(to + stride * i));
}
#endif

/* Quantize the runs of a row of x; `stride`: bytes between output runs. */
static void quantize(const int D, const float *x, char *to, int64_t runs, int64_t stride,
                     int64_t level) {
#ifdef X86
    if (level >= AVX2) {
        quantize_avx2(D, x, to, runs, stride);
        return;
    }
#endif
    (void)level;
    for (int64_t i = 0; i < runs; i++)
        if (D == 2)
            quantize_run(2, x + RUN * i, (void *)(to + stride * i));
        else
            quantize_run(1, x + RUN * i, (void *)(to + stride * i));
}

/* ---- portable ------------------------------------------------------------------------------- */

INLINE void tile_portable(const int f, const int D, const int M, const uint8_t *group,
                          int64_t columns, const struct activation *x, float *out,
                          int64_t out_stride, int rows) {
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
                const struct activation *a = activation_at(D, x, m * runs + at);
                int32_t *dot = dots[m][parts == 2 ? g / 4 : 0], xg[4];
                for (int i = 0; i < 4; i++)
                    xg[i] = D == 2 ? 256 * a->q[0][4 * g + i] + a->q[1][4 * g + i] : a->q[0][4 * g + i];
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
                    const struct activation *a = activation_at(D, x, m * runs + at);
                    sums[m][r] += (float)dots[m][part][r] * (scale * a->d);
                    if (formats[f].min) {
                        float added = min * added_by(f, a, part);
                        sums[m][r] = formats[f].top ? sums[m][r] - added : sums[m][r] + added;
                    }
                }
            }
        next_run(f, &p, at);
    }
    for (int m = 0; m < M; m++) memcpy(out + m * out_stride, sums[m], rows * sizeof(float));
}
/* ---- tiles by level, format and number of rows ----------------------------------------------- */

#define TILE_FN(level, with, f, D, M, body)                                                        \
    with static void level##_##f##_##D##_##M(const uint8_t *group, int64_t columns,                \
                                             const struct activation *x, float *out,               \
                                             int64_t out_stride, int rows) {                       \
        body                                                                                       \
    }
#define PORTABLE_TILE(f, D, M)                                                                     \
    TILE_FN(portable, , f, D, M, tile_portable(f, D, M, group, columns, x, out, out_stride, rows);)
#define AVX2_TILE(f, D, M)                                                                         \
    TILE_FN(avx2, WITH_AVX2, f, D, M, const int H = D * M == 1 ? 2 : 1;                            \
            for (int h = 0; h < 2; h += H)                                                         \
                tile_avx2(f, D, M, H, h, group, columns, x, out, out_stride, rows);)
#define VNNI_TILE(f, D, M)                                                                         \
    TILE_FN(vnni, WITH_VNNI, f, D, M,                                                              \
            tile_vnni(f, D, M, group, columns, x, out, out_stride, rows);)
#define DOTPROD_TILE(f, D, M)                                                                      \
    TILE_FN(dotprod, WITH_DOTPROD, f, D, M, const int H = D * M >= 4 ? 2 : 4;                      \
            for (int h = 0; h < 4; h += H)                                                         \
                tile_dotprod(f, D, M, H, h, group, columns, x, out, out_stride, rows);)
#define AMX_GROUPS(f, D)                                                                           \
    WITH_VNNI static void amx_##f##_##D(const uint8_t *groups, int64_t count, int64_t columns,     \
                                        const struct activation *x, int64_t tiles, float *out,     \
                                        int64_t out_stride, int64_t rows) {                        \
        groups_amx(f, D, groups, count, columns, x, tiles, out, out_stride, rows);                 \
    }

/* Rows of x per pass over the weights: 1, 2, 4 or 8, as registers allow. A level's tiles by digits,
 * and by the logarithm of the rows. */
#define PASSES 4
#define FEW_TILES(level, f, D) level##_TILE(f, D, 1) level##_TILE(f, D, 2)
#define FEW_NAMES(level, f, D) level##_##f##_##D##_1, level##_##f##_##D##_2
#define MORE_TILES(level, f, D) FEW_TILES(level, f, D) level##_TILE(f, D, 4)
#define MORE_NAMES(level, f, D) FEW_NAMES(level, f, D), level##_##f##_##D##_4
#define MOST_TILES(level, f, D) MORE_TILES(level, f, D) level##_TILE(f, D, 8)
#define MOST_NAMES(level, f, D) MORE_NAMES(level, f, D), level##_##f##_##D##_8

#define PORTABLE_TILES(f) MORE_TILES(PORTABLE, f, 1) MORE_TILES(PORTABLE, f, 2)
#define PORTABLE_NAMES(f) {{MORE_NAMES(portable, f, 1)}, {MORE_NAMES(portable, f, 2)}}
#ifdef X86
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILES(f) MORE_TILES(AVX2, f, 1) FEW_TILES(AVX2, f, 2)                                 \
    MOST_TILES(VNNI, f, 1) MOST_TILES(VNNI, f, 2) AMX_GROUPS(f, 1) AMX_GROUPS(f, 2)                \
    static const tile_fn tiles_##f[3][2][PASSES] = {                                               \
        PORTABLE_NAMES(f),                                                                         \
        {{MORE_NAMES(avx2, f, 1)}, {FEW_NAMES(avx2, f, 2)}},                                       \
        {{MOST_NAMES(vnni, f, 1)}, {MOST_NAMES(vnni, f, 2)}},                                      \
    };
#elif defined(WITH_DOTPROD)
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILES(f) MORE_TILES(DOTPROD, f, 1) MORE_TILES(DOTPROD, f, 2)                          \
    static const tile_fn tiles_##f[2][2][PASSES] = {                                               \
        PORTABLE_NAMES(f),                                                                         \
        {{MORE_NAMES(dotprod, f, 1)}, {MORE_NAMES(dotprod, f, 2)}},                                \
    };
#else
#define EACH_TILE(f)                                                                               \
    PORTABLE_TILES(f)                                                                              \
    static const tile_fn tiles_##f[1][2][PASSES] = {PORTABLE_NAMES(f)};
#endif

EACH_TILE(Q4_0) EACH_TILE(Q4_1) EACH_TILE(Q5_0) EACH_TILE(Q5_1) EACH_TILE(Q8_0) EACH_TILE(Q2_K)
EACH_TILE(Q3_K) EACH_TILE(Q4_K) EACH_TILE(Q5_K) EACH_TILE(Q6_K) EACH_TILE(IQ4_NL)
EACH_TILE(IQ4_XS) EACH_TILE(MXFP4)

#define ROW(f) [f] = tiles_##f
static const tile_fn (*const tiles[FORMATS])[2][PASSES] = {
    ROW(Q4_0), ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0), ROW(Q2_K), ROW(Q3_K),
    ROW(Q4_K), ROW(Q5_K), ROW(Q6_K), ROW(IQ4_NL), ROW(IQ4_XS), ROW(MXFP4),
};

INLINE int tiles_of(int64_t level) {
    if (level == DOTPROD) return 1;
    return level >= VNNI ? 2 : level == PORTABLE ? 0 : 1;
}

#ifdef X86
typedef void (*groups_fn)(const uint8_t *groups, int64_t count, int64_t columns,
                          const struct activation *x, int64_t tiles, float *out,
                          int64_t out_stride, int64_t rows);

#undef ROW
#define ROW(f) [f] = {amx_##f##_1, amx_##f##_2}
static const groups_fn amx_groups[FORMATS][2] = {
    ROW(Q4_0), ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0), ROW(Q2_K), ROW(Q3_K),
    ROW(Q4_K), ROW(Q5_K), ROW(Q6_K), ROW(IQ4_NL), ROW(IQ4_XS), ROW(MXFP4),
};
#endif

/* ---- operations ------------------------------------------------------------------------------ */

/* Rows of x for AMX: runs of 16 rows are interleaved, [M / 16, K / 32, 16]. */
INLINE int64_t tiled_rows(int64_t rows, int64_t level) {
#ifdef X86
    if (level == AMX) return rows / TILE * TILE;
#endif
    (void)rows, (void)level;
    return 0;
}

/* QUANTIZE: rows of x [M, K], `x_stride` apart, into `out` [M, K / 32]. An item is a row.
 * 0 x, 1 x_stride, 2 out, 3 rows M, 4 columns K, 5 digits D, 6 whether rows are separate */
static int64_t items_quantize(const struct op *op) { return op->arg[3]; }

static void work_quantize(const struct op *op, int64_t m, int64_t level) {
    const int64_t runs = op->arg[4] / RUN;
    const int D = (int)op->arg[5];
    const float *x = (const float *)address(op->arg[0]) + m * op->arg[1];
    int64_t first = m * runs, stride = 1;
#ifdef X86
    if (!op->arg[6] && m < tiled_rows(op->arg[3], level))
        first += m % TILE - m % TILE * runs, stride = TILE;
#endif
    char *to = (char *)address(op->arg[2]) + first * activation_size(D);
    quantize(D, x, to, runs, stride * activation_size(D), level);
}

/* MULTIPLY: the output of QUANTIZE times the rows of all segments. An item is some groups of one.
 * 0 activations, 1 segments, 2 their number, 3 out, 4 out_stride, 5 rows M, 6 columns K,
 * 7 bias of all outputs or 0, 8 digits D */
INLINE int64_t groups_of(const struct segment *s) { return (s->rows + ROWS - 1) / ROWS; }

INLINE int64_t chunk_of(const struct segment *s, int64_t columns) {
    int64_t chunk = CHUNK_BYTES / group_size(s->format, columns);
    return chunk < 1 ? 1 : chunk;
}

/* Groups per item; more for many rows of x, which are read again for each item. */
INLINE int64_t item_of(const struct segment *s, const struct op *op) {
    const int64_t chunk = chunk_of(s, op->arg[6]), share = groups_of(s) / 16;
    const int64_t many = op->arg[5] < MANY ? 0 : share < 8 ? share : 8;
    return chunk > many ? chunk : many;
}

static int64_t items_multiply(const struct op *op) {
    const struct segment *segments = address(op->arg[1]);
    int64_t items = 0;
    for (int64_t i = 0; i < op->arg[2]; i++) {
        int64_t groups = item_of(segments + i, op);
        items += (groups_of(segments + i) + groups - 1) / groups;
    }
    return items;
}

/* Groups `first` to `last` - 1 of a segment, at `groups`, times some rows of x, with outputs at
 * `out`. */
INLINE void multiply(const struct segment *s, const uint8_t *groups, int64_t columns, int64_t first,
                     int64_t last, int D, const struct activation *x, int64_t rows, float *out,
                     int64_t out_stride, int64_t level) {
    const int64_t size = group_size(s->format, columns), runs = columns / RUN;
    const tile_fn *by_rows = tiles[s->format][tiles_of(level)][D - 1];
#ifdef X86
    const int64_t tiled = tiled_rows(rows, level);
    if (tiled)
        amx_groups[s->format][D - 1](groups, last - first, columns, x, tiled / TILE,
                                     out + first * ROWS, out_stride, s->rows - first * ROWS);
    x = activation_at(D, x, tiled * runs), out += tiled * out_stride, rows -= tiled;
#endif
    while (rows) {
        int pass = PASSES - 1;
        while (!by_rows[pass] || rows < 1 << pass) pass--;
        for (int64_t n = first; n < last; n++) {
            int64_t left = s->rows - n * ROWS;
            by_rows[pass](groups + (n - first) * size, columns, x, out + n * ROWS, out_stride,
                          left < ROWS ? left : ROWS);
        }
        x = activation_at(D, x, runs << pass), out += out_stride << pass, rows -= 1 << pass;
    }
}

static void work_multiply(const struct op *op, int64_t item, int64_t level) {
    const struct segment *s = address(op->arg[1]);
    const float *bias = address(op->arg[7]);
    const int64_t out_stride = op->arg[4], rows = op->arg[5], columns = op->arg[6];
    int64_t groups;
    for (;; s++) {
        groups = item_of(s, op);
        int64_t items = (groups_of(s) + groups - 1) / groups;
        if (item < items) break;
        item -= items;
    }
    const int64_t begin = item * groups;
    int64_t chunk = chunk_of(s, columns);
#ifdef X86
    if (tiled_rows(rows, level)) chunk = PANELS;
#endif
    const int64_t end = begin + groups < groups_of(s) ? begin + groups : groups_of(s);
    const int64_t last = end * ROWS < s->rows ? end * ROWS : s->rows;
    const int64_t size = group_size(s->format, columns);
    float *out = (float *)address(op->arg[3]) + s->column;
    uint8_t *room = s->stored ? malloc((size_t)(chunk * size)) : NULL;
    for (int64_t n = begin; n < end; n += chunk) {
        const int64_t stop = n + chunk < end ? n + chunk : end;
        const uint8_t *groups = s->stored ? room : s->packed + n * size;
        if (room) llmcli_pack_groups(s->stored, s->format, columns, s->rows, n, stop, room);
        if (groups)
            multiply(s, groups, columns, n, stop, (int)op->arg[8], address(op->arg[0]), rows, out,
                     out_stride, level);
        for (int64_t m = 0; !groups && m < rows; m++) /* no memory */
            for (int64_t i = n * ROWS; i < last; i++) out[m * out_stride + i] = NAN;
    }
    free(room);
    for (int64_t m = 0; bias && m < rows; m++, out += out_stride)
        for (int64_t n = begin * ROWS; n < last; n++) out[n] += bias[s->column + n];
}

const struct kernel kernel_quantize = {items_quantize, work_quantize, NULL};

static int fetch_multiply(const struct op *op, int64_t piece) {
    const struct segment *first = address(op->arg[1]);
    if (first->stored) return 0;
    return fetch_piece((const char *)first->packed,
                       groups_of(first) * group_size(first->format, op->arg[6]), piece);
}

const struct kernel kernel_multiply = {items_multiply, work_multiply, fetch_multiply};

/* MULTIPLY_EXPERTS: single rows of QUANTIZE's output times one expert each in all segments, which
 * have E stacked matrices with `rows` rows. An item is some groups of an expert, handled by its
 * first product for all.
 * 0 activations, 1 segments, 2 their number, 3 out, 4 out_stride, 5 products, 6 columns K,
 * 7 int64: the expert of each product, 8 int64: its row of x, or 0: 9 products each have a row,
 * 10 biases of the experts or 0, 11 the stride of these, 12 digits D */
static int64_t items_of_expert(const struct op *op) {
    const struct segment *segments = address(op->arg[1]);
    int64_t items = 0;
    for (int64_t i = 0; i < op->arg[2]; i++) {
        const int64_t chunk = chunk_of(segments + i, op->arg[6]);
        items += (groups_of(segments + i) + chunk - 1) / chunk;
    }
    return items;
}

static int64_t items_multiply_experts(const struct op *op) {
    return op->arg[5] * items_of_expert(op);
}

static void work_multiply_experts(const struct op *op, int64_t item, int64_t level) {
    const struct segment *s = address(op->arg[1]);
    const int64_t columns = op->arg[6], each = items_of_expert(op), product = item / each;
    const int64_t *experts = address(op->arg[7]), *rows = address(op->arg[8]);
    const int64_t expert = experts[product];
    const float *bias = address(op->arg[10]);
    if (next_with(experts, expert, 0, product) < product) return;
    int64_t chunk;
    for (item %= each;; s++) {
        chunk = chunk_of(s, columns);
        const int64_t items = (groups_of(s) + chunk - 1) / chunk;
        if (item < items) break;
        item -= items;
    }
    const int64_t size = group_size(s->format, columns), first = item * chunk;
    const int64_t last = first + chunk < groups_of(s) ? first + chunk : groups_of(s);
    const int64_t end = last * ROWS < s->rows ? last * ROWS : s->rows;
    const uint8_t *groups = s->packed + (expert * groups_of(s) + first) * size;
    const int D = (int)op->arg[12];
    for (int64_t i = product; i < op->arg[5]; i = next_with(experts, expert, i + 1, op->arg[5])) {
        const int64_t row = rows ? rows[i] : i / op->arg[9];
        const struct activation *x = activation_at(D, address(op->arg[0]), row * (columns / RUN));
        float *out = (float *)address(op->arg[3]) + i * op->arg[4] + s->column;
        multiply(s, groups, columns, first, last, D, x, 1, out, 0, level);
        for (int64_t n = first * ROWS; bias && n < end; n++)
            out[n] += bias[expert * op->arg[11] + s->column + n];
    }
}

const struct kernel kernel_multiply_experts = {
    items_multiply_experts, work_multiply_experts, NULL,
};

/* ---- exports --------------------------------------------------------------------------------- */

/* Activations as rounded by the products: `count` numbers rounded to D digits, in float32. */
void llmcli_seen(const float *x, float *out, int64_t count, int64_t D) {
    for (int64_t i = 0; i < count / RUN; i++, x += RUN, out += RUN) {
        struct activation a;
        quantize(D, x, (char *)&a, 1, 0, PORTABLE);
        for (int j = 0; j < RUN; j++)
            out[j] = (float)(D == 2 ? 256 * a.q[0][j] + a.q[1][j] : a.q[0][j]) * a.d;
    }
}

/* The product of a few rows, bfloat16 or float32, with a bfloat16 or float16 matrix, with float32
 * results.
 *
 *     out[m][n] = sum over k of x[m][k] * w[n][k]
 *
 * Axes: M rows of x, K columns of x and of w, N rows of w.
 *
 * Every weight is read once for all rows of x. Each output is summed in a fixed order, so that
 * results are bit-identical for any number of rows and threads, chunk and processor level: there
 * are 16 lanes, and in every block of 32 columns lane j takes columns 2j and 2j + 1, with fused
 * multiply-adds in float32; columns beyond K count as zeros. Finally lane j is added to lane j + 8,
 * then 4, 2 and 1. Adjacent columns share a lane because they share a 32-bit word: a shift converts
 * one to float32, a mask the other. For a float16 matrix lane j takes columns j and 16 + j.
 */
#include "program.h"

#define FEW_ROWS_OF_PAIRS 32 /* with more rows of x, transposing a panel of w pays off */

#ifdef X86
#include "bfloat16_amx.h"
#include "bfloat16_pairs.h"
#endif

#define BLOCK 32             /* columns at a time */
#define MOST_ROWS 8          /* rows of x per pass, with sums in registers */
#define CHUNK_BYTES (64 << 10) /* of weights per work item */

/* Weights are prefetched into L2 this many rows ahead: without it, one thread reads cold rows of
 * 576 or 1,536 columns at 8 GB/s with one row of x and 5 GB/s with four, with it at 11 and 10. */
#define AHEAD 8

struct product {
    /* In float32, pass by pass: a block of each of its rows, then the next block of each. Of a
     * block the 16 even columns come first, then the odd ones (w bfloat16). Pass m begins at
     * m * padded. */
    const float *x;
    const uint16_t *w;
    float *out;
    int64_t w_stride, out_stride; /* elements from row to row */
    int64_t columns, padded;
};

/* The last, incomplete block of a row of w, padded with zeros. */
INLINE void last_block(const struct product *p, int64_t n, uint16_t block[BLOCK]) {
    int64_t whole = p->columns / BLOCK * BLOCK;
    memset(block, 0, BLOCK * sizeof *block);
    if (whole < p->columns) /* without columns w may be NULL */
        memcpy(block, p->w + n * p->w_stride + whole, (p->columns - whole) * sizeof *block);
}

/* ---- portable ------------------------------------------------------------------------------ */

/* Fused a * b + c, by the C library if the processor lacks the instruction. */
INLINE void add_block(const int halves, const uint16_t *w, const float *x, float lanes[16]) {
    uint16_t block[BLOCK];
    memcpy(block, w, sizeof block); /* numbers in a mapped file may be unaligned */
    for (int part = 0; part < 2; part++)
        for (int j = 0; j < 16; j++) {
            float number = halves ? half(block[16 * part + j]) : widened(block[2 * j + part]);
            lanes[j] = fmaf(number, x[16 * part + j], lanes[j]);
        }
}

INLINE void tiles_portable(const int halves, const struct product *p, int64_t first, int64_t last,
                           int64_t m, int64_t rows) {
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
                add_block(halves, w + k, x + k * rows, lanes);
            }
            if (whole < p->columns) add_block(halves, tail, x + whole * rows, lanes);
            for (int half = 8; half; half /= 2)
                for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
            p->out[i * p->out_stride + n] = lanes[0];
        }
    }
}

#ifdef X86

/* ---- AVX2 and FMA: two registers of 8 lanes per output -------------------------------------- */

WITH_AVX2 INLINE float folded_8(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* R rows of w from n on with M rows of x from m on. */
WITH_AVX2 INLINE void tile_avx2(const int halves, const int R, const int M,
                                const struct product *p, int64_t n, int64_t m) {
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
                const uint16_t *at = w + r * stride + (halves ? 8 : 16) * h;
                __m256 even, odd;
                if (halves) {
                    even = _mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
                    odd = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(at + 16)));
                } else {
                    __m256i words = _mm256_loadu_si256((const void *)at);
                    even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
                    odd = _mm256_castsi256_ps(_mm256_and_si256(words, upper));
                }
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

/* ---- AVX-512 (F, BW, VL, DQ): one register of 16 lanes per output --------------------------- */

WITH_AVX512 INLINE float folded_16(__m512 lanes) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

WITH_AVX512 INLINE void tile_avx512(const int halves, const int R, const int M,
                                    const struct product *p, int64_t n, int64_t m) {
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
            __m512 even, odd;
            if (halves) {
                even = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
                odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
            } else {
                even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
                odd = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
            }
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

/* For each number of rows of x, as many rows of w at a time as registers allow. */
#define TILES(M, R, tile)                                                                          \
    case M:                                                                                        \
        for (; n + R <= last; n += R) tile(halves, R, M, p, n, m);                                 \
        for (; n < last; n++) tile(halves, 1, M, p, n, m);                                         \
        break;

WITH_AVX2 INLINE void tiles_avx2(const int halves, const struct product *p, int64_t n,
                                 int64_t last, int64_t m, int64_t rows) {
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

WITH_AVX512 INLINE void tiles_avx512(const int halves, const struct product *p, int64_t n,
                                     int64_t last, int64_t m, int64_t rows) {
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

/* Separate functions, to separate the levels' instructions. */
#define OF_FORMAT(level, target, name, halves)                                                     \
    target static void name##_##level(const struct product *p, int64_t n, int64_t last, int64_t m, \
                                      int64_t rows) {                                              \
        tiles_##level(halves, p, n, last, m, rows);                                                \
    }
OF_FORMAT(avx2, WITH_AVX2, bfloats, 0)
OF_FORMAT(avx2, WITH_AVX2, halves, 1)
OF_FORMAT(avx512, WITH_AVX512, bfloats, 0)
OF_FORMAT(avx512, WITH_AVX512, halves, 1)

#endif

/* ---- operations ------------------------------------------------------------------------------ */

/* Rows of x in the pass that begins with row m; passes have similar sizes. */
INLINE int64_t rows_of_pass(int64_t rows, int64_t m) {
    int64_t left = rows - m, passes = (left + MOST_ROWS - 1) / MOST_ROWS;
    return (left + passes - 1) / passes;
}

INLINE int64_t padded(int64_t columns) { return (columns + BLOCK - 1) / BLOCK * BLOCK; }

/* WIDEN: rows of x [M, K] into `out`, float32 [M, K rounded up to 32], pass by pass as
 * `struct product` says. An item is a pass.
 * 0 x, 1 x_stride, 2 out, 3 rows M, 4 columns K, 5 x is 0 bfloat16, 1 float32, 2 float16,
 * 6 whether to keep the order of columns (float16 matrix), 7 whether each row is a pass */
static int64_t items_widen(const struct op *op) {
    return op->arg[7] ? op->arg[3] : (op->arg[3] + MOST_ROWS - 1) / MOST_ROWS;
}

static void work_widen(const struct op *op, int64_t item, int64_t level) {
    const int64_t stride = op->arg[1], rows = op->arg[3], columns = op->arg[4];
    const char *x = address(op->arg[0]);
    const size_t size = op->arg[5] == 1 ? 4 : 2;
    int64_t m = op->arg[7] ? item : 0;
    (void)level;
    for (; item && !op->arg[7]; item--) m += rows_of_pass(rows, m);
    const int64_t last = m + (op->arg[7] ? 1 : rows_of_pass(rows, m));
    float *next = (float *)address(op->arg[2]) + m * padded(columns);
    for (int64_t k = 0; k < columns; k += BLOCK)
        for (int64_t i = m; i < last; i++, next += BLOCK) {
            float block[BLOCK] = {0};
            uint16_t narrow[BLOCK] = {0};
            size_t count = columns - k < BLOCK ? columns - k : BLOCK;
            const char *from = x + (i * stride + k) * (int64_t)size;
            memcpy(size == 4 ? (void *)block : (void *)narrow, from, count * size);
            for (int j = 0; size == 2 && j < BLOCK; j++)
                block[j] = op->arg[5] ? half(narrow[j]) : widened(narrow[j]);
            for (int j = 0; j < BLOCK; j++) next[op->arg[6] ? j : j / 2 + j % 2 * 16] = block[j];
        }
}

/* Rows `first` to `last` - 1 of w with one pass of x, its rows from m on. */
INLINE void tiles(const int64_t halves, const struct product *p, int64_t first, int64_t last,
                  int64_t m, int64_t rows, int64_t level) {
#ifdef X86
    if (level >= AVX512)
        (halves ? halves_avx512 : bfloats_avx512)(p, first, last, m, rows);
    else if (level >= AVX2)
        (halves ? halves_avx2 : bfloats_avx2)(p, first, last, m, rows);
    else
#endif
    if (halves)
        tiles_portable(1, p, first, last, m, rows);
    else
        tiles_portable(0, p, first, last, m, rows);
    (void)level;
}

/* MULTIPLY_BFLOAT16: the output of WIDEN times the rows of w [N, K]. An item is some rows of w.
 * 0 widened x, 1 w, 2 w_stride, 3 out, 4 out_stride, 5 rows M, 6 outputs N, 7 columns K,
 * 8 bias or 0, 9 whether w is float16 */
INLINE int64_t rows_of_item(int64_t columns) {
    int64_t chunk = CHUNK_BYTES / (2 * (columns + 1)) / 8 * 8;
    return chunk < 8 ? 8 : chunk;
}

static int64_t items_multiply_bfloat16(const struct op *op) {
    const int64_t chunk = rows_of_item(op->arg[7]);
    return op->arg[5] > 0 ? (op->arg[6] + chunk - 1) / chunk : 0;
}

static void work_multiply_bfloat16(const struct op *op, int64_t item, int64_t level) {
    struct product p = {
        .x = address(op->arg[0]), .w = address(op->arg[1]), .w_stride = op->arg[2],
        .out = address(op->arg[3]), .out_stride = op->arg[4], .columns = op->arg[7],
        .padded = padded(op->arg[7]),
    };
    const int64_t rows = op->arg[5], outputs = op->arg[6], chunk = rows_of_item(p.columns);
    const int64_t first = item * chunk, last = first + chunk < outputs ? first + chunk : outputs;
    const float *bias = address(op->arg[8]);
    for (int64_t m = 0, pass; m < rows; m += pass) {
        pass = rows_of_pass(rows, m);
        tiles(op->arg[9], &p, first, last, m, pass, level);
    }
    for (int64_t m = 0; bias && m < rows; m++)
        for (int64_t n = first; n < last; n++) p.out[m * p.out_stride + n] += bias[n];
}

/* MULTIPLY_EXPERTS_BFLOAT16: rows of WIDEN's output (one per pass) times the matrix of one expert
 * each, of E matrices w [N, K]. An item is some rows of an expert, handled by its first product for
 * all.
 * 0 widened x, 1 w, 2 w_stride, 3 out [P, N], 4 products P, 5 outputs N, 6 columns K, 7 whether w is
 * float16, or 2: x is PAIR's output, 8 elements from expert to expert, 9 int64: the expert of each
 * product, 10 int64: its row of x, or 0: 11 products each have a row, 12 biases of the experts
 * or 0, 13 the stride of these, 14 the rows of x */
INLINE int64_t items_of_expert(const struct op *op) {
    const int64_t chunk = rows_of_item(op->arg[6]);
    return (op->arg[5] + chunk - 1) / chunk;
}

static int64_t items_multiply_experts_bfloat16(const struct op *op) {
    return op->arg[4] * items_of_expert(op);
}

static void work_multiply_experts_bfloat16(const struct op *op, int64_t item, int64_t level) {
    const int64_t outputs = op->arg[5], columns = op->arg[6], chunk = rows_of_item(columns);
    const int64_t each = items_of_expert(op), product = item / each, first = item % each * chunk;
    const int64_t last = first + chunk < outputs ? first + chunk : outputs;
    const int64_t *experts = address(op->arg[9]), *rows = address(op->arg[10]);
    const int64_t expert = experts[product];
    const float *bias = address(op->arg[12]);
    struct product p = {
        .w = (const uint16_t *)address(op->arg[1]) + expert * op->arg[8], .w_stride = op->arg[2],
        .columns = columns, .padded = padded(columns),
    };
    if (next_with(experts, expert, 0, product) < product) return;
    for (int64_t i = product; i < op->arg[4]; i = next_with(experts, expert, i + 1, op->arg[4])) {
        p.x = (const float *)address(op->arg[0]) + (rows ? rows[i] : i / op->arg[11]) * p.padded;
        p.out = (float *)address(op->arg[3]) + i * outputs;
#ifdef X86
        if (op->arg[7] == 2)
            multiply_pairs((const uint16_t *)address(op->arg[0]) +
                               (rows ? rows[i] : i / op->arg[11]) * DEEP,
                           op->arg[14], 1, p.w + first * p.w_stride, p.w_stride, last - first,
                           columns, p.out + first, outputs);
        else
#endif
            tiles(op->arg[7], &p, first, last, 0, 1, level);
        for (int64_t n = first; bias && n < last; n++) p.out[n] += bias[expert * op->arg[13] + n];
    }
}

/* Many float32 rows with AMX.
 *
 * SPLIT: rows of x [M, K] into `out`, `struct pieces` [M rounded up to 32, / 16, K / 32]. An item is
 * 16 rows.
 * 0 x, 1 x_stride, 2 out, 3 rows M, 4 columns K */
static int64_t items_split(const struct op *op) { return (op->arg[3] + 31) / 32 * 2; }

static void work_split(const struct op *op, int64_t item, int64_t level) {
    (void)op, (void)item, (void)level;
#ifdef X86
    const int64_t columns = op->arg[4], left = op->arg[3] - item * TILE;
    split((const float *)address(op->arg[0]) + item * TILE * op->arg[1], op->arg[1],
          left < 0 ? 0 : left < TILE ? left : TILE, columns,
          (struct pieces *)address(op->arg[2]) + item * ((columns + COLUMNS - 1) / COLUMNS));
#endif
}

/* MULTIPLY_SPLIT: the output of SPLIT times the rows of w [N, K]. An item is some rows of w. The
 * arguments of MULTIPLY_BFLOAT16. */
#define FEW_OUTPUTS 2048
INLINE int64_t rows_of_split(const struct op *op) { return op->arg[6] < FEW_OUTPUTS ? 64 : 128; }

static int64_t items_multiply_split(const struct op *op) {
    const int64_t chunk = rows_of_split(op);
    return op->arg[5] > 0 ? (op->arg[6] + chunk - 1) / chunk : 0;
}

static void work_multiply_split(const struct op *op, int64_t item, int64_t level) {
    (void)op, (void)item, (void)level;
#ifdef X86
    const int64_t rows = op->arg[5], chunk = rows_of_split(op), first = item * chunk;
    const int64_t outputs = op->arg[6] - first < chunk ? op->arg[6] - first : chunk;
    const float *bias = address(op->arg[8]);
    float *out = (float *)address(op->arg[3]) + first;
    multiply_amx(address(op->arg[0]), rows, (const uint16_t *)address(op->arg[1]) +
                 first * op->arg[2], op->arg[2], outputs, op->arg[7], out, op->arg[4]);
    for (int64_t m = 0; bias && m < rows; m++)
        for (int64_t n = 0; n < outputs; n++) out[m * op->arg[4] + n] += bias[first + n];
#endif
}

static int fetch_multiply_bfloat16(const struct op *op, int64_t piece) {
    return fetch_piece(address(op->arg[1]), 2 * op->arg[2] * op->arg[6], piece);
}

/* MULTIPLY_ROWS: many float32 rows times the rows of w [N, K], without AMX. An item is `OUTPUTS`
 * rows of w. The arguments of MULTIPLY_BFLOAT16 with unconverted x, and
 * 9 x_stride, 10 whether w is float16. */
#define OUTPUTS 64
#define PAIRS 256       /* of columns at a time: a panel fits in L1 */
#define MOST_AT_ONCE 48 /* rows of x, with fewer outputs than lanes */

static int64_t items_multiply_rows(const struct op *op) {
    return op->arg[5] > 0 ? (op->arg[6] + OUTPUTS - 1) / OUTPUTS : 0;
}

#define TEMPLATE "bfloat16_rows.h"
#include "each_width.h"
BY_LEVEL(multiply_rows)
const struct kernel kernel_multiply_rows = {items_multiply_rows, work_multiply_rows, NULL};

/* PAIR: float32 rows of x [M, K], rounded to bfloat16, into `out`, [K / DEEP, M, DEEP], padded with
 * zeros. An item is up to 8 rows.
 * 0 x, 1 x_stride, 2 out, 3 rows M, 4 columns K */
static int64_t items_pair(const struct op *op) { return (op->arg[3] + 7) / 8; }

static void work_pair(const struct op *op, int64_t item, int64_t level) {
    (void)op, (void)item, (void)level;
#ifdef X86
    const int64_t rows = op->arg[3], columns = op->arg[4];
    for (int64_t m = 8 * item; m < 8 * item + 8 && m < rows; m++)
        pair_row((const float *)address(op->arg[0]) + m * op->arg[1], columns,
                 (uint16_t *)address(op->arg[2]) + m * DEEP, rows * DEEP);
#endif
}

/* MULTIPLY_PAIRS: the output of PAIR times the rows of w [N, K], by dot products of pairs. An item
 * is some rows of w, and with many rows of x some of these. The arguments of MULTIPLY_BFLOAT16. */
#define TALL_OUTPUTS 64
INLINE int64_t outputs_of_pairs(const struct op *op) {
    const int64_t few = (rows_of_item(op->arg[7]) + 31) / 32 * 32;
    return op->arg[5] > FEW_ROWS_OF_PAIRS ? TALL_OUTPUTS : few;
}
INLINE int64_t rows_of_pairs(const struct op *op) { return op->arg[6] < 2048 ? 264 : 516; }

static int64_t items_multiply_pairs(const struct op *op) {
    const int64_t some = outputs_of_pairs(op), rows = rows_of_pairs(op);
    return (op->arg[6] + some - 1) / some * ((op->arg[5] + rows - 1) / rows);
}

static void work_multiply_pairs(const struct op *op, int64_t item, int64_t level) {
    (void)op, (void)item, (void)level;
#ifdef X86
    const int64_t rows = op->arg[5], outputs = op->arg[6], columns = op->arg[7];
    const int64_t some = outputs_of_pairs(op), parts = (outputs + some - 1) / some;
    const int64_t n = item % parts * some, m = item / parts * rows_of_pairs(op);
    const int64_t lanes = outputs - n < some ? outputs - n : some;
    const int64_t count = rows - m < rows_of_pairs(op) ? rows - m : rows_of_pairs(op);
    const float *bias = address(op->arg[8]);
    float *out = (float *)address(op->arg[3]) + m * op->arg[4] + n;
    multiply_pairs((const uint16_t *)address(op->arg[0]) + m * DEEP, rows, count,
                   (const uint16_t *)address(op->arg[1]) + n * op->arg[2], op->arg[2], lanes,
                   columns, out, op->arg[4]);
    for (int64_t i = 0; bias && i < count; i++)
        for (int64_t j = 0; j < lanes; j++) out[i * op->arg[4] + j] += bias[n + j];
#endif
}

const struct kernel kernel_pair = {items_pair, work_pair, NULL};
const struct kernel kernel_multiply_pairs = {
    items_multiply_pairs, work_multiply_pairs, fetch_multiply_bfloat16,
};
const struct kernel kernel_split = {items_split, work_split, NULL};
const struct kernel kernel_multiply_split = {items_multiply_split, work_multiply_split, NULL};
const struct kernel kernel_widen = {items_widen, work_widen, NULL};
const struct kernel kernel_multiply_bfloat16 = {
    items_multiply_bfloat16, work_multiply_bfloat16, fetch_multiply_bfloat16,
};
const struct kernel kernel_multiply_experts_bfloat16 = {
    items_multiply_experts_bfloat16, work_multiply_experts_bfloat16, NULL,
};

/* The product of bfloat16 rows with a bfloat16 matrix by AVX512-BF16: see MULTIPLY_PAIRS in
 * bfloat16.c.
 *
 * Lanes are 16 rows of w. An output is summed over pairs of columns from left to right, in the
 * instruction's order: the same bits for every number of rows and chunk. Numbers below 1.2e-38 are
 * flushed to zero.
 */
#define WITH_BF16                                                                                  \
    __attribute__((target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,"     \
                          "f16c")))
#define FEW 8      /* rows of x at a time without a panel of w */
#define TALL 12    /* rows of x at a time with one: their sums stay in registers */
#define DEEP 256   /* contiguous columns of x, [K / DEEP, M, DEEP]; a panel fits in L1 */

/* Round a float32 row; `DEEP` columns at a time, with this stride between them. */
WITH_AVX512 static void pair_row(const float *x, int64_t columns, uint16_t *out, int64_t apart) {
    for (int64_t k = 0; k < columns; k += DEEP, out += apart) {
        const int64_t some = columns - k < DEEP ? columns - k : DEEP;
        for (int64_t i = 0; i < some; i++) out[i] = narrowed(x[k + i]);
        memset(out + some, 0, 2 * (size_t)(DEEP - some));
    }
}

/* The next 32 (masked) columns of up to 16 rows of w: pair i of each row in turned[i]. */
WITH_BF16 INLINE void turn_pairs(const uint16_t *w, int64_t stride, int64_t rows, __mmask32 mask,
                                 __m512i turned[16]) {
    __m512i a[16], b[16];
    UNROLL for (int r = 0; r < 16; r++)
        a[r] = _mm512_maskz_loadu_epi16(r < rows ? mask : 0, w + (r < rows ? r * stride : 0));
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) { /* a[i + c]: of rows i to i + 3 pairs c, c + 4, … */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        turned[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        turned[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        turned[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
        turned[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}

WITH_BF16 INLINE __m512 add_pairs(__m512 sum, const uint16_t *x, __m512i w) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}

/* A sum flushed to zero is positive, with or without added zeros. */
WITH_BF16 INLINE __m512 positive(__m512 sum) { return _mm512_add_ps(sum, _mm512_setzero_ps()); }

INLINE uint32_t first_bits(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

/* Up to 16 rows of w times M rows of x. */
WITH_BF16 INLINE void few_rows(const int M, const uint16_t *x, int64_t rows, const uint16_t *w,
                               int64_t stride, int64_t lanes, int64_t columns, float *out,
                               int64_t out_stride) {
    __m512 sums[FEW];
    UNROLL for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < columns; k += 32) {
        const uint16_t *here = x + k / DEEP * rows * DEEP + k % DEEP;
        __m512i turned[16];
        UNROLL for (int r = 0; r < 16; r++) FETCH(w + k + (r + 16) * stride);
        turn_pairs(w + k, stride, lanes, first_bits(columns - k), turned);
        UNROLL for (int i = 0; i < 16; i++)
            UNROLL for (int m = 0; m < M; m++)
                sums[m] = add_pairs(sums[m], here + m * DEEP + 2 * i, turned[i]);
    }
    UNROLL for (int m = 0; m < M; m++)
        _mm512_mask_storeu_ps(out + m * out_stride, (__mmask16)first_bits(lanes), positive(sums[m]));
}

/* M rows of x times a panel of 2 x 16 rows of w, [pairs, 2, 16], added to the sums. */
WITH_BF16 INLINE void tall_tile(const int M, const uint16_t *x, const __m512i *panel,
                                int64_t pairs, const __mmask16 keep[2], float *out,
                                int64_t out_stride, int more) {
    __m512 sums[TALL][2];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int g = 0; g < 2; g++)
            sums[m][g] = _mm512_maskz_loadu_ps(more ? keep[g] : 0, out + m * out_stride + 16 * g);
    for (int64_t i = 0; i < pairs; i++) {
        const __m512i first = panel[2 * i], second = panel[2 * i + 1];
        UNROLL for (int m = 0; m < M; m++) {
            sums[m][0] = add_pairs(sums[m][0], x + m * DEEP + 2 * i, first);
            sums[m][1] = add_pairs(sums[m][1], x + m * DEEP + 2 * i, second);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int g = 0; g < 2; g++)
            _mm512_mask_storeu_ps(out + m * out_stride + 16 * g, keep[g], positive(sums[m][g]));
}

/* `count` of the rows of x with `lanes` rows of w, panel by panel: x of DEEP columns stays in L2. */
WITH_BF16 static void tall_rows(const uint16_t *x, int64_t rows, int64_t count, const uint16_t *w,
                                int64_t stride, int64_t lanes, int64_t columns, float *out,
                                int64_t out_stride) {
    __m512i panel[DEEP];
    for (int64_t k = 0; k == 0 || k < columns; k += DEEP, x += rows * DEEP)
        for (int64_t n = 0; n < lanes; n += 32) {
            const int64_t some = columns - k < DEEP ? columns - k : DEEP;
            __mmask16 keep[2];
            for (int g = 0; g < 2; g++) {
                const int64_t left = lanes - n - 16 * g < 0 ? 0 : lanes - n - 16 * g;
                const uint16_t *at = w + (left ? n + 16 * g : 0) * stride + k;
                keep[g] = (__mmask16)first_bits(left);
                for (int64_t j = 0; j < some; j += 32) {
                    __m512i turned[16];
                    UNROLL for (int r = 0; r < 16; r++) FETCH(at + j + (r + 32) * stride);
                    turn_pairs(at + j, stride, left, first_bits(some - j), turned);
                    UNROLL for (int i = 0; i < 16; i++) panel[j + 2 * i + g] = turned[i];
                }
            }
            int64_t m = 0;
#define TILE_OF(M)                                                                                 \
    for (; m + M <= count; m += M)                                                                 \
        tall_tile(M, x + m * DEEP, panel, (some + 1) / 2, keep, out + m * out_stride + n,          \
                  out_stride, k > 0);
            TILE_OF(TALL) TILE_OF(4) TILE_OF(1)
#undef TILE_OF
        }
}

#define ROWS(M)                                                                                    \
    case M:                                                                                        \
        for (int64_t n = 0; n < lanes; n += 16)                                                    \
            few_rows(M, x, rows, w + n * stride, stride, lanes - n, columns, out + n, out_stride); \
        break;

/* `count` rows of x (of `rows` with contiguous columns) times `lanes` rows of w. */
WITH_BF16 static void multiply_pairs(const uint16_t *x, int64_t rows, int64_t count,
                                     const uint16_t *w, int64_t stride, int64_t lanes,
                                     int64_t columns, float *out, int64_t out_stride) {
    if (count > FEW_ROWS_OF_PAIRS) {
        tall_rows(x, rows, count, w, stride, lanes, columns, out, out_stride);
        return;
    }
    for (int64_t left = count, some; left > 0; left -= some) { /* passes of similar sizes */
        const int64_t passes = (left + FEW - 1) / FEW;
        some = (left + passes - 1) / passes;
        switch (some) {
            ROWS(1)
            ROWS(2)
            ROWS(3)
            ROWS(4)
            ROWS(5)
            ROWS(6)
            ROWS(7)
            ROWS(FEW)
        }
        x += some * DEEP, out += some * out_stride;
    }
}
#undef ROWS

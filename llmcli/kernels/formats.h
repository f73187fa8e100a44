/* Memory layouts of packed weights.
 *
 * A GGUF file stores a matrix by rows of blocks. Packed weights interleave 16 rows (a group). They
 * have the same bits as the file's blocks in another order; 6-bit scales become bytes. A group is a
 * sequence of planes, each with all columns of the 16 rows, in steps of 32 columns (`RUN`):
 *
 *   codes   the lowest 2, 4 or 8 bits of each number. The 32 columns are 8 words of 4 columns. A
 *           row's word is 4 bytes, and the words of the 16 rows lie side by side, 64 bytes. 4-bit
 *           codes: words g and g + 4 share such 64 bytes, as the low and the high nibbles; 2-bit
 *           codes: 4 words share them, the first in the lowest bits.
 *   high    the 1 or 2 bits above: byte c of row r has bit g (2 bits: bits 2(g % 4)) of the column
 *           4g + c; 2 bits of words 0 to 3 in the first 64 bytes, of words 4 to 7 in the next.
 *   scale   of the 16 rows: float16, or a byte that multiplies a float16 of plane `top`.
 *   min     likewise the minimum that is added (float16) or subtracted (a byte times `top`'s second
 *           number).
 *   top     float16 numbers of the 16 rows for 256 columns, d and (formats with `min`) dmin.
 *
 * Numbers: codes are unsigned; `offset` is subtracted, or a table gives the number.
 */
#ifndef LLMCLI_FORMATS_H
#define LLMCLI_FORMATS_H

#include "common.h"

#define ROWS 16 /* of a group */
#define RUN 32  /* columns */

/* The numbers of `PACKED` in packed.py. */
enum format {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, FORMATS
};

enum scale { HALVES, BYTES, SIGNED_BYTES, POWERS };

struct traits {
    int block, bytes; /* columns and bytes of a block in the file */
    int codes, high;  /* bits */
    int parts;        /* 2: a scale for each 16 columns, 1: for 32 */
    int scale;        /* enum scale */
    int min, top;     /* whether these planes exist; `top` has 1 or 2 numbers */
    int offset;
    int table;        /* codes are indices into `tables[table - 1]` */
};

static const struct traits formats[FORMATS] = {
    [Q4_0] = {32, 18, 4, 0, 1, HALVES, 0, 0, 8, 0},
    [Q4_1] = {32, 20, 4, 0, 1, HALVES, 1, 0, 0, 0},
    [Q5_0] = {32, 22, 4, 1, 1, HALVES, 0, 0, 16, 0},
    [Q5_1] = {32, 24, 4, 1, 1, HALVES, 1, 0, 0, 0},
    [Q8_0] = {32, 34, 8, 0, 1, HALVES, 0, 0, 0, 0},
    [Q2_K] = {256, 84, 2, 0, 2, BYTES, 1, 2, 0, 0},
    [Q3_K] = {256, 110, 2, 1, 2, SIGNED_BYTES, 0, 1, 4, 0},
    [Q4_K] = {256, 144, 4, 0, 1, BYTES, 1, 2, 0, 0},
    [Q5_K] = {256, 176, 4, 1, 1, BYTES, 1, 2, 0, 0},
    [Q6_K] = {256, 210, 4, 2, 2, SIGNED_BYTES, 0, 1, 32, 0},
    [IQ4_NL] = {32, 18, 4, 0, 1, HALVES, 0, 0, 0, 1},
    [IQ4_XS] = {256, 136, 4, 0, 1, SIGNED_BYTES, 0, 1, 0, 1},
    [MXFP4] = {32, 17, 4, 0, 1, POWERS, 0, 0, 0, 2},
};

/* ggml's non-linear steps; twice the values of a 4-bit float (code 8 is 0, not -0). */
static const int8_t tables[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

/* Bytes of each plane for 32 columns of 16 rows, `top` for 256. */
INLINE int codes_size(int f) { return RUN * ROWS * formats[f].codes / 8; }
INLINE int high_size(int f) { return RUN * ROWS * formats[f].high / 8; }
INLINE int scale_size(int f) {
    return ROWS * formats[f].parts * (formats[f].scale == HALVES ? 2 : 1);
}
INLINE int min_size(int f) { return formats[f].min ? scale_size(f) : 0; }
INLINE int top_size(int f) { return 2 * ROWS * formats[f].top; }

/* Offsets of the planes in a group. */
struct planes {
    uint8_t *codes, *high, *scale, *min, *top;
};

INLINE struct planes planes_of(int f, const uint8_t *group, int64_t columns) {
    int64_t runs = columns / RUN;
    struct planes p;
    p.codes = (uint8_t *)group;
    p.high = p.codes + runs * codes_size(f);
    p.scale = p.high + runs * high_size(f);
    p.min = p.scale + runs * scale_size(f);
    p.top = p.min + runs * min_size(f);
    return p;
}

/* Bytes of a group, a multiple of 64. */
INLINE int64_t group_size(int f, int64_t columns) {
    int64_t run = codes_size(f) + high_size(f) + scale_size(f) + min_size(f);
    int64_t all = columns / RUN * run + columns / 256 * top_size(f);
    return (all + 63) / 64 * 64;
}

/* A mapped matrix in the file's layout, with rows of `stride` bytes: row r is stored row order[r],
 * or r without an order. */
struct stored {
    const uint8_t *rows;
    int64_t stride;
    const int64_t *order;
};

/* Groups `first` to `last` - 1 of `rows` rows, packed into `groups` (packing.c). */
void llmcli_pack_groups(const struct stored *stored, int64_t format, int64_t columns, int64_t rows,
                        int64_t first, int64_t last, uint8_t *groups);

/* A scale of MXFP4 as a power of two: 2^(e - 128). */
INLINE float power(uint8_t e) { return float_of(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

/* Byte i of word g of a run, column 4g + i % 4 of row i / 4: the number. */
INLINE int number_at(const int f, const struct planes *p, int g, int i) {
    const int high_at = 64 * (g / 4), codes = formats[f].codes;
    int code = 0;
    if (codes == 8) code = (int8_t)p->codes[64 * g + i];
    if (codes == 4) code = p->codes[64 * (g % 4) + i] >> 4 * (g / 4) & 15;
    if (codes == 2) code = p->codes[high_at + i] >> 2 * (g % 4) & 3;
    if (formats[f].high == 1) code |= (p->high[i] >> g & 1) << codes;
    if (formats[f].high == 2) code |= (p->high[high_at + i] >> 2 * (g % 4) & 3) << codes;
    return formats[f].table ? tables[formats[f].table - 1][code] : code - formats[f].offset;
}

/* Scale i of a run, or its minimum: of a row, and of its halves first those of all rows. */
INLINE float scale_at(const int f, const uint8_t *plane, const uint8_t *top, int i) {
    uint16_t bits;
    if (formats[f].scale == HALVES) return memcpy(&bits, plane + 2 * i, 2), half(bits);
    if (formats[f].scale == POWERS) return power(plane[i]);
    memcpy(&bits, top + 2 * (i % ROWS), 2);
    return half(bits) * (float)(formats[f].scale == BYTES ? plane[i] : (int8_t)plane[i]);
}

/* Offsets from run `at` of a group to the next. */
INLINE void next_run(const int f, struct planes *p, int64_t at) {
    p->codes += codes_size(f), p->high += high_size(f);
    p->scale += scale_size(f), p->min += min_size(f);
    if (at % 8 == 7) p->top += top_size(f);
}

#endif

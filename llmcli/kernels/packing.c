/* Blocks of a GGUF file into packed groups of 16 rows, and packed rows into float32.
 *
 * Sources of the blocks: ggml-common.h and dequantize_row_* in ggml-quants.c. See formats.h.
 */
#define _POSIX_C_SOURCE 200809L /* pread */
#define _FILE_OFFSET_BITS 64
#include "formats.h"
#include "program.h"

#if defined(__unix__) || defined(__APPLE__)
#include <errno.h>
#include <unistd.h>
#define READS
#endif

/* Load a word from an unaligned address. */
INLINE uint32_t word(const uint8_t *at) {
    uint32_t w;
    memcpy(&w, at, 4);
    return w;
}

INLINE void put(uint8_t *at, uint32_t w) { memcpy(at, &w, 4); }

/* One row's 32 columns as 8 words: the lower bits of each number, and those above them. */
struct run {
    uint32_t low[8], high[8];
};

/* A bit of each of 4 columns at the lowest bit of 4 bytes. */
INLINE uint32_t spread(uint32_t bits) {
    return (bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21;
}

/* Nibbles of 16 bytes: columns 0 to 15 are the low ones, 16 to 31 the high ones. */
INLINE void nibbles(const uint8_t *at, struct run *run) {
    for (int g = 0; g < 4; g++) {
        run->low[g] = word(at + 4 * g) & 0x0f0f0f0f;
        run->low[g + 4] = word(at + 4 * g) >> 4 & 0x0f0f0f0f;
    }
}

/* Run `k` of a block of 256 (8 runs): each byte's bits from `shift` on. */
INLINE void bits_of_bytes(const uint8_t *at, int shift, uint32_t mask, uint32_t out[8]) {
    for (int g = 0; g < 8; g++) out[g] = word(at + 4 * g) >> shift & mask;
}

INLINE void read_run(const int f, const uint8_t *block, int k, struct run *run) {
    switch (f) {
        case Q4_0: case IQ4_NL: nibbles(block + 2, run); break;
        case Q4_1: nibbles(block + 4, run); break;
        case MXFP4: nibbles(block + 1, run); break;
        case IQ4_XS: nibbles(block + 8 + 16 * k, run); break;
        case Q5_0: case Q5_1: {
            const uint8_t *at = block + (f == Q5_0 ? 2 : 4);
            uint32_t bits = word(at);
            nibbles(at + 4, run);
            for (int g = 0; g < 8; g++) run->high[g] = spread(bits >> (4 * g));
            break;
        }
        case Q8_0: memcpy(run->low, block + 2, 32); break;
        case Q2_K: bits_of_bytes(block + 16 + 32 * (k / 4), 2 * (k % 4), 0x03030303, run->low); break;
        case Q3_K:
            bits_of_bytes(block + 32 + 32 * (k / 4), 2 * (k % 4), 0x03030303, run->low);
            bits_of_bytes(block, k, 0x01010101, run->high);
            break;
        case Q4_K: bits_of_bytes(block + 16 + 32 * (k / 2), 4 * (k % 2), 0x0f0f0f0f, run->low); break;
        case Q5_K:
            bits_of_bytes(block + 48 + 32 * (k / 2), 4 * (k % 2), 0x0f0f0f0f, run->low);
            bits_of_bytes(block + 16, k, 0x01010101, run->high);
            break;
        case Q6_K:
            bits_of_bytes(block + 64 * (k / 4) + 32 * (k % 2), 4 * (k % 4 / 2), 0x0f0f0f0f, run->low);
            bits_of_bytes(block + 128 + 32 * (k / 4), 2 * (k % 4), 0x03030303, run->high);
            break;
    }
}

/* Scale `i` of a block of 256 and its minimum: 6 bits each in 12 bytes (Q4_K, Q5_K). */
INLINE void six_bits(const uint8_t *at, int i, uint8_t *scale, uint8_t *min) {
    if (i < 4) {
        *scale = at[i] & 63, *min = at[i + 4] & 63;
    } else {
        *scale = (at[i + 4] & 15) | (at[i - 4] >> 6) << 4;
        *min = at[i + 4] >> 4 | (at[i] >> 6) << 4;
    }
}

/* Scales of row r: run k of a block, run `at` of the row. */
INLINE void put_scales(const int f, const uint8_t *block, int k, struct planes p, int64_t at, int r) {
    uint8_t *scale = p.scale + at * scale_size(f), *min = p.min + at * min_size(f);
    switch (f) {
        case Q4_0: case Q5_0: case Q8_0: case IQ4_NL: memcpy(scale + 2 * r, block, 2); break;
        case Q4_1: case Q5_1:
            memcpy(scale + 2 * r, block, 2);
            memcpy(min + 2 * r, block + 2, 2);
            break;
        case MXFP4: scale[r] = block[0]; break;
        case Q4_K: case Q5_K: six_bits(block + 4, k, scale + r, min + r); break;
        case IQ4_XS:
            scale[r] = (uint8_t)(((block[4 + k / 2] >> 4 * (k % 2) & 15) |
                                  ((block[2] | block[3] << 8) >> 2 * k & 3) << 4) - 32);
            break;
        case Q6_K:
            for (int part = 0; part < 2; part++) scale[ROWS * part + r] = block[192 + 2 * k + part];
            break;
        case Q2_K:
            for (int part = 0; part < 2; part++) {
                scale[ROWS * part + r] = block[2 * k + part] & 15;
                min[ROWS * part + r] = block[2 * k + part] >> 4;
            }
            break;
        case Q3_K:
            for (int part = 0; part < 2; part++) {
                int i = 2 * k + part; /* nibbles of 8 bytes, then 2 bits of each in 4 bytes */
                uint8_t low = i < 8 ? block[96 + i] & 15 : block[96 + i - 8] >> 4;
                uint8_t above = block[104 + i % 4] >> 2 * (i / 4) & 3;
                scale[ROWS * part + r] = (uint8_t)((low | above << 4) - 32);
            }
            break;
    }
    if (!formats[f].top || k) return;
    static const int tops[FORMATS] = {[Q2_K] = 80, [Q3_K] = 108, [Q6_K] = 208};
    uint8_t *top = p.top + at / 8 * top_size(f);
    for (int i = 0; i < formats[f].top; i++)
        memcpy(top + 2 * (ROWS * i + r), block + tops[f] + 2 * i, 2);
}

INLINE void put_run(const int f, const struct run *run, struct planes p, int64_t at, int r) {
    uint8_t *codes = p.codes + at * codes_size(f) + 4 * r, *high = p.high + at * high_size(f) + 4 * r;
    const uint32_t *low = run->low, *above = run->high;
    if (formats[f].codes == 8)
        for (int g = 0; g < 8; g++) put(codes + 64 * g, low[g]);
    if (formats[f].codes == 4)
        for (int g = 0; g < 4; g++) put(codes + 64 * g, low[g] | low[g + 4] << 4);
    if (formats[f].codes == 2)
        for (int j = 0; j < 2; j++, low += 4)
            put(codes + 64 * j, low[0] | low[1] << 2 | low[2] << 4 | low[3] << 6);
    if (formats[f].high == 1) {
        uint32_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= above[g] << g;
        put(high, bits);
    }
    if (formats[f].high == 2)
        for (int j = 0; j < 2; j++, above += 4)
            put(high + 64 * j, above[0] | above[1] << 2 | above[2] << 4 | above[3] << 6);
}

INLINE void pack_row(const int f, const uint8_t *row, int64_t columns, struct planes p, int r) {
    int per_block = formats[f].block / RUN;
    for (int64_t at = 0; at < columns / RUN; at++) {
        const uint8_t *block = row + at / per_block * formats[f].bytes;
        struct run run;
        read_run(f, block, at % per_block, &run);
        put_run(f, &run, p, at, r);
        put_scales(f, block, at % per_block, p, at, r);
    }
}

INLINE void unpack_row(const int f, struct planes p, int64_t columns, int r, float *out) {
    for (int64_t at = 0; at < columns / RUN; at++) {
        for (int part = 0; part < formats[f].parts; part++) {
            int i = ROWS * part + r, words = 8 / formats[f].parts;
            float scale = scale_at(f, p.scale, p.top, i), min = 0;
            if (formats[f].min) min = scale_at(f, p.min, p.top + 2 * ROWS, i);
            for (int g = part * words; g < (part + 1) * words; g++)
                for (int c = 0; c < 4; c++, out++) {
                    *out = (float)number_at(f, &p, g, 4 * r + c) * scale;
                    if (formats[f].min) *out = formats[f].top ? *out - min : *out + min;
                }
        }
        next_run(f, &p, at);
    }
}

#define EACH_FORMAT(call)                                                                           \
    switch (format) {                                                                              \
        case Q4_0: call(Q4_0); break;                                                              \
        case Q4_1: call(Q4_1); break;                                                              \
        case Q5_0: call(Q5_0); break;                                                              \
        case Q5_1: call(Q5_1); break;                                                              \
        case Q8_0: call(Q8_0); break;                                                              \
        case Q2_K: call(Q2_K); break;                                                              \
        case Q3_K: call(Q3_K); break;                                                              \
        case Q4_K: call(Q4_K); break;                                                              \
        case Q5_K: call(Q5_K); break;                                                              \
        case Q6_K: call(Q6_K); break;                                                              \
        case IQ4_NL: call(IQ4_NL); break;                                                          \
        case IQ4_XS: call(IQ4_XS); break;                                                          \
        case MXFP4: call(MXFP4); break;                                                            \
    }

/* Bytes of a packed matrix. */
int64_t llmcli_packed_size(int64_t format, int64_t rows, int64_t columns) {
    return (rows + ROWS - 1) / ROWS * group_size(format, columns);
}

struct copying {
    int64_t format;
    const uint8_t *file;
    uint8_t *packed;
    const int64_t *ids;
    int64_t stride, columns, size, count;
    _Atomic int64_t next;
};

#define TAKEN 32 /* rows per work item */

/* Row `id` of a packed matrix, whose groups have `size` bytes. */
static void pack_one(int64_t format, const uint8_t *file, uint8_t *packed, int64_t size,
                     int64_t columns, int64_t id) {
    const uint8_t *group = packed + id / ROWS * size;
    int row = id % ROWS;
#define PACK(f) pack_row(f, file, columns, planes_of(f, group, columns), row)
    EACH_FORMAT(PACK)
}

void llmcli_pack_groups(const struct stored *stored, int64_t format, int64_t columns, int64_t rows,
                        int64_t first, int64_t last, uint8_t *groups) {
    const int64_t size = group_size(format, columns);
    const int64_t end = last * ROWS < rows ? last * ROWS : rows;
    if (last * ROWS > rows) memset(groups + (last - 1 - first) * size, 0, (size_t)size);
    for (int64_t row = first * ROWS; row < end; row++) {
        const int64_t from = stored->order ? stored->order[row] : row;
        pack_one(format, stored->rows + from * stored->stride, groups, size, columns,
                 row - first * ROWS);
    }
}

static void pack_rows(void *data) {
    struct copying *p = data;
    for (int64_t i; (i = atomic_fetch_add(&p->next, TAKEN)) < p->count;)
        for (int64_t end = i + TAKEN < p->count ? i + TAKEN : p->count; i < end; i++)
            pack_one(p->format, p->file + i * p->stride, p->packed, p->size, p->columns, p->ids[i]);
}

/* Pack rows of a file, `stride` bytes apart, into rows `ids[0]` … `ids[count-1]` of a packed
 * matrix, whose padding rows must be zero. */
void llmcli_pack(int64_t format, const uint8_t *file, int64_t stride, uint8_t *packed,
                 int64_t columns, const int64_t *ids, int64_t count, const struct team *team) {
    struct copying p = {
        .format = format, .file = file, .packed = packed, .ids = ids, .stride = stride,
        .columns = columns, .size = group_size(format, columns), .count = count,
    };
    run_team(team, pack_rows, &p, count <= TAKEN);
}

/* Rows of a file, `stride` bytes each, from `offset` on: into rows ids[0], … of a packed matrix, or
 * without ids into rows from `first` on. */
struct reading {
    int64_t file, offset, stride, count, format, columns, packed, ids, first;
};

struct queue {
    const struct reading *readings;
    int64_t count;
    _Atomic int64_t next, failed; /* `failed`: 1 + the index of a failed reading */
};

/* Whether the bytes of a file could be read; without mapping, since truncation would be fatal. */
static int read_bytes(int64_t file, uint8_t *to, int64_t bytes, int64_t offset) {
#ifdef READS
    while (bytes > 0) {
        ssize_t got = pread((int)file, to, (size_t)bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        to += got, bytes -= got, offset += got;
    }
    return 1;
#else
    (void)file, (void)to, (void)bytes, (void)offset;
    return 0;
#endif
}

/* Process readings until none is left; called by any number of threads. */
void llmcli_read_and_pack(struct queue *queue) {
    for (int64_t i; (i = atomic_fetch_add(&queue->next, 1)) < queue->count;) {
        const struct reading *r = queue->readings + i;
        const int64_t *ids = address(r->ids), size = group_size(r->format, r->columns);
        uint8_t *room = malloc((size_t)(r->stride * r->count));
        int done = room && read_bytes(r->file, room, r->stride * r->count, r->offset);
        for (int64_t row = 0; done && row < r->count; row++)
            pack_one(r->format, room + row * r->stride, address(r->packed), size, r->columns,
                     ids ? ids[row] : r->first + row);
        if (!done) atomic_store(&queue->failed, i + 1);
        free(room);
    }
}

/* LOOK_UP: rows ids[0] … ids[count-1] of a matrix as float32; format `FORMATS` is row-major
 * bfloat16, and the next one float16. An item is 32 of them.
 * 0 format, 1 matrix, 2 columns, 3 ids, 4 count, 5 out, 6 rows of the matrix (NaN for other ids), 7
 * `struct stored` of the matrix, or 0 */
static int64_t items_look_up(const struct op *op) { return (op->arg[4] + TAKEN - 1) / TAKEN; }

static void work_look_up(const struct op *op, int64_t item, int64_t level) {
    const int64_t format = op->arg[0], columns = op->arg[2];
    const uint8_t *matrix = address(op->arg[1]);
    const int64_t *ids = address(op->arg[3]), first = item * TAKEN;
    const int64_t last = first + TAKEN < op->arg[4] ? first + TAKEN : op->arg[4];
    const struct stored *stored = address(op->arg[7]);
    const int64_t size = format < FORMATS ? group_size(format, columns) : 0;
    uint8_t *room = stored ? malloc((size_t)size) : NULL;
    (void)level;
    for (int64_t i = first; i < last; i++) {
        float *out = (float *)address(op->arg[5]) + i * columns;
        if (ids[i] < 0 || ids[i] >= op->arg[6] || (stored && !room)) {
            for (int64_t k = 0; k < columns; k++) out[k] = NAN;
            continue;
        }
        if (format >= FORMATS) {
            uint16_t bits;
            for (int64_t k = 0; k < columns; k++) {
                memcpy(&bits, matrix + 2 * (ids[i] * columns + k), 2);
                out[k] = format == FORMATS ? widened(bits) : half(bits);
            }
            continue;
        }
        const int64_t at = ids[i] / ROWS;
        const uint8_t *group = stored ? room : matrix + at * size;
        int row = ids[i] % ROWS;
        if (stored)
            llmcli_pack_groups(stored, format, columns, op->arg[6], at, at + 1, room);
#define UNPACK(f) unpack_row(f, planes_of(f, group, columns), columns, row, out)
        EACH_FORMAT(UNPACK)
    }
    free(room);
}

const struct kernel kernel_look_up = {items_look_up, work_look_up, NULL};

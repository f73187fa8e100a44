/* Random blocks of every format through packing, unpacking and products, at every level; and
 * products of bfloat16 numbers, as many as there are blocks, as format 13.
 *
 *     fuzz_packed LEVELS SEED BLOCKS [FORMAT]
 *
 * LEVELS is a mask of `enum level` (0: those of this processor), BLOCKS the number for each format.
 * Every buffer has exactly the size it needs, so that a sanitizer sees a byte too many. Results must
 * be the same bits at all levels, with one thread and with several. Prints a hash of each format's
 * results, which is the same on every machine; exits with 1 where levels differ.
 */
#include <pthread.h>
#include <stdio.h>

#include "packed.h"
#include "program.h"

struct segment {
    const uint8_t *packed;
    int64_t format, rows, column;
    const struct stored *stored;
};

int64_t llmcli_packed_size(int64_t, int64_t, int64_t);
unsigned llmcli_native_levels(void);
void llmcli_pack(int64_t, const uint8_t *, int64_t, uint8_t *, int64_t, const int64_t *, int64_t,
                 const struct team *);
void llmcli_run(const struct op *, int64_t, struct counter *, const struct team *, int64_t *);
void llmcli_seen(const float *, float *, int64_t, int64_t);

static uint64_t state;

static uint64_t next(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull;
}

static int64_t below(int64_t count) { return (int64_t)(next() >> 33) % count; }

static void *room(int64_t bytes) {
    void *at = malloc(bytes ? (size_t)bytes : 1);
    if (!at) exit(2);
    return at;
}

struct job {
    void (*work)(void *);
    void *data;
};

static void *run(void *job) {
    ((struct job *)job)->work(((struct job *)job)->data);
    return NULL;
}

static void threads(void (*work)(void *), void *data, unsigned count, unsigned flags) {
    pthread_t others[8];
    struct job job = {work, data};
    (void)flags;
    for (unsigned i = 1; i < count; i++)
        if (pthread_create(others + i, NULL, run, &job)) exit(2);
    work(data);
    for (unsigned i = 1; i < count; i++) pthread_join(others[i], NULL);
}

/* FNV-1a of the numbers' bits; one NaN is as good as another. */
static uint64_t hashed(uint64_t hash, const float *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(numbers[i]);
        if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fc00000;
        hash = (hash ^ bits) * 0x100000001b3ull;
    }
    return hash;
}

/* Random bytes, sometimes all equal; mostly with finite float16 numbers where they lie. */
static void fill(int f, uint8_t *block) {
    static const int at[FORMATS][2] = {
        [Q2_K] = {80, 82}, [Q3_K] = {108, 108}, [Q4_K] = {0, 2}, [Q5_K] = {0, 2},
        [Q6_K] = {208, 208}, [Q4_1] = {0, 2}, [Q5_1] = {0, 2},
    };
    uint64_t kind = next();
    for (int i = 0; i < formats[f].bytes; i += 8) {
        uint64_t bytes = (kind & 15) ? next() : (kind >> 8 & 255) * 0x0101010101010101ull;
        int left = formats[f].bytes - i;
        memcpy(block + i, &bytes, left < 8 ? left : 8);
    }
    if (!(kind >> 4 & 15)) return;
    for (int i = 0; i < 2; i++) {
        if (f == MXFP4) block[0] = (uint8_t)(100 + below(56));
        else block[at[f][i] + 1] &= 0xbf; /* below 2 */
    }
}

/* Numbers around 1, of any magnitude, or any bits. */
static void fill_run(float *x) {
    uint64_t kind = next();
    uint32_t exponent = (uint32_t)(kind >> 8 & 3 ? 127 : kind >> 16 & 255) << 23;
    for (int i = 0; i < RUN; i++) {
        uint32_t bits = (uint32_t)(next() >> 32);
        if (kind & 63) bits = (bits & 0x807fffff) | exponent;
        x[i] = float_of(bits);
    }
}

static uint64_t levels;

INLINE int64_t to(const void *memory) { return (int64_t)(intptr_t)memory; }

/* The same bits at every level. */
static void compare(uint64_t *first, uint64_t results, int f, int level, int64_t rows,
                    int64_t columns, int64_t x_rows) {
    if (*first && results != *first) {
        fprintf(stderr, "format %d: level %d differs (%d rows, %d columns, %d rows of x)\n", f, level,
                (int)rows, (int)columns, (int)x_rows);
        exit(1);
    }
    *first = results;
}

/* One matrix; returns its number of blocks. */
static int64_t one(int f, uint64_t *hash) {
    const int per_row = formats[f].block == 256 ? 6 : 36;
    const int64_t rows = 1 + below(37), blocks = 1 + below(per_row), columns = blocks * formats[f].block;
    const int64_t x_rows = below(4) ? 1 + below(3) : 1 + below(19), row_bytes = blocks * formats[f].bytes;
    const int64_t stride = row_bytes + below(3), x_stride = columns + below(5);
    const int64_t out_stride = rows + below(3), runs = columns / RUN;
    const int64_t size = llmcli_packed_size(f, rows, columns), shift = below(4), alone = below(64);
    uint8_t *file = room(stride * (rows - 1) + row_bytes);
    uint8_t *packed = (uint8_t *)room(size + shift) + shift;
    float *x = room(4 * (x_stride * (x_rows - 1) + columns));
    float *dense = room(4 * rows * columns), *out = room(4 * (out_stride * (x_rows - 1) + rows));
    int64_t *ids = room(8 * rows), *order = room(8 * rows);
    const int64_t D = 1 + below(2);
    void *activations = room(activation_size(D) * x_rows * runs);
    struct counter counters[3];
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < blocks; j++) fill(f, file + i * stride + j * formats[f].bytes);
        int64_t other = below(i + 1);
        ids[i] = ids[other], ids[other] = i;
    }
    for (int64_t i = 0; i < rows; i++) order[ids[i]] = i;
    const struct stored stored = {file, stride, order};
    for (int64_t i = 0; i < x_rows; i++)
        for (int64_t j = 0; j < columns; j += RUN) fill_run(x + i * x_stride + j);
    uint64_t first = 0;
    for (int level = PORTABLE; level < 63; level++) {
        if (!(levels >> level & 1)) continue;
        uint64_t results = 0xcbf29ce484222325ull;
        const struct team team = {level, level == PORTABLE || alone ? NULL : threads, 3};
        struct segment segment = {packed, f, rows, 0, NULL};
        memset(packed, 0, size);
        llmcli_pack(f, file, stride, packed, columns, ids, rows, &team);
        struct op ops[3] = {
            {LOOK_UP, {f, to(packed), columns, to(ids), rows, to(dense), rows, 0}},
            {QUANTIZE, {to(x), x_stride, to(activations), x_rows, columns, D}},
            {MULTIPLY,
             {to(activations), to(&segment), 1, to(out), out_stride, x_rows, columns, 0, D}},
        };
        llmcli_run(ops, 3, counters, &team, NULL);
        results = hashed(results, dense, rows * columns);
        for (int64_t i = 0; i < x_rows; i++) results = hashed(results, out + i * out_stride, rows);
        segment.packed = NULL, segment.stored = &stored; /* the same as the file has it */
        ops[0].arg[1] = 0, ops[0].arg[7] = to(&stored);
        llmcli_run(ops, 3, counters, &team, NULL);
        uint64_t again = hashed(0xcbf29ce484222325ull, dense, rows * columns);
        for (int64_t i = 0; i < x_rows; i++) again = hashed(again, out + i * out_stride, rows);
        if (again != results) {
            fprintf(stderr, "format %d: level %d differs as stored\n", f, level);
            exit(1);
        }
        llmcli_seen(x, dense, columns, D);
        results = hashed(results, dense, columns);
        compare(&first, results, f, level, rows, columns, x_rows);
    }
    *hash = *hash * 31 + first;
    free(file), free(packed - shift), free(x), free(dense), free(out), free(ids), free(activations);
    free(order);
    return rows * blocks;
}

/* The product of pairs of some float32 rows: each row alone has the same bits as all. */
static void pairs(const uint16_t *w, int64_t w_stride, int64_t rows, int64_t columns) {
    const int64_t x_rows = below(4) ? 1 + below(9) : 1 + below(300), stride = columns + below(3);
    const int64_t deep = (columns + 255) / 256 * 256, m = below(x_rows);
    float *x = room(4 * (stride * (x_rows - 1) + columns));
    float *out = room(4 * rows * x_rows), *alone = room(4 * rows);
    uint16_t *rounded = room(2 * deep * x_rows);
    struct counter counters[2];
    for (int64_t i = 0; i < stride * (x_rows - 1) + columns; i++)
        x[i] = float_of((uint32_t)(next() >> 32) & (below(64) ? 0xbfffffff : ~0u));
    if (levels >> AVX512BF16 & 1) {
        const struct team team = {AVX512BF16, threads, 3};
        struct op ops[2] = {
            {PAIR, {to(x), stride, to(rounded), x_rows, columns}},
            {MULTIPLY_PAIRS, {to(rounded), to(w), w_stride, to(out), rows, x_rows, rows, columns}},
        };
        llmcli_run(ops, 2, counters, &team, NULL);
        ops[0].arg[0] += 4 * m * stride, ops[0].arg[3] = 1;
        ops[1].arg[3] = to(alone), ops[1].arg[5] = 1;
        llmcli_run(ops, 2, counters, &team, NULL);
        if (hashed(1, out + m * rows, rows) != hashed(1, alone, rows)) {
            fprintf(stderr, "pairs: row %d of %d differs (%d rows, %d columns)\n", (int)m, (int)x_rows,
                    (int)rows, (int)columns);
            exit(1);
        }
    }
    free(x), free(out), free(alone), free(rounded);
}

/* One product of bfloat16 numbers: any bits or around 1. */
static int64_t bfloat16(uint64_t *hash) {
    const int64_t rows = 1 + below(below(9) ? 40 : 150), columns = below(below(9) ? 200 : 700);
    const int64_t x_rows = 1 + below(20);
    const int64_t w_stride = columns + below(3), x_stride = columns + below(3);
    uint16_t *w = room(2 * (w_stride * (rows - 1) + columns));
    uint16_t *x = room(2 * (x_stride * (x_rows - 1) + columns));
    float *out = room(4 * rows * x_rows), *bias = room(4 * rows);
    float *wide = room(4 * x_rows * ((columns + 31) / 32 * 32));
    struct counter counters[2];
    uint16_t kept = below(16) ? 0x80ff : 0xffff, set = kept == 0xffff ? 0 : 0x3f00;
    for (int64_t i = 0; i < w_stride * (rows - 1) + columns; i++) w[i] = (next() >> 40 & kept) | set;
    for (int64_t i = 0; i < x_stride * (x_rows - 1) + columns; i++) x[i] = (next() >> 40 & kept) | set;
    for (int64_t n = 0; n < rows; n++) bias[n] = (float)below(9);
    uint64_t first = 0;
    for (int level = PORTABLE; level < 63; level++) {
        if (!(levels >> level & 1)) continue;
        const struct team team = {level, level == PORTABLE ? NULL : threads, 3};
        const struct op ops[2] = {
            {WIDEN, {to(x), x_stride, to(wide), x_rows, columns, 0}},
            {MULTIPLY_BFLOAT16, {to(wide), to(w), w_stride, to(out), rows, x_rows, rows, columns,
                                 columns % 2 ? to(bias) : 0}},
        };
        llmcli_run(ops, 2, counters, &team, NULL);
        compare(&first, hashed(1, out, rows * x_rows), FORMATS, level, rows, columns, x_rows);
    }
    *hash = *hash * 31 + first;
    pairs(w, w_stride, rows, columns);
    free(w), free(x), free(out), free(bias), free(wide);
    return rows;
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    levels = strtoull(arguments[1], NULL, 0);
    if (!levels) levels = llmcli_native_levels();
    for (int f = 0; f <= FORMATS; f++) {
        uint64_t hash = 0;
        if (count > 4 && atoi(arguments[4]) != f) continue;
        state = strtoull(arguments[2], NULL, 0) * (FORMATS + 1) + f + 1;
        for (int64_t left = atoll(arguments[3]); left > 0;) left -= f < FORMATS ? one(f, &hash) : bfloat16(&hash);
        printf("%d %016llx\n", f, (unsigned long long)hash);
        fflush(stdout);
    }
    return 0;
}

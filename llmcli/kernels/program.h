/* Operations run in order by a team of threads.
 *
 * An operation has items that any thread can take. A thread proceeds to the next operation when all
 * items of the current one are done. Threads only wait for threads that hold an item, so a
 * preempted thread delays the others by at most one item.
 */
#ifndef LLMCLI_PROGRAM_H
#define LLMCLI_PROGRAM_H

#include "common.h"

/* The numbers of `program.py`. */
enum kind {
    QUANTIZE, MULTIPLY, LOOK_UP, NORMALIZE, ROTATE, NARROW, STORE, ATTEND, COMBINE, ADD, SCALE,
    GATE, ACTIVATE, WIDEN, MULTIPLY_BFLOAT16, ATTEND_ROWS,
    SPLIT, MULTIPLY_SPLIT, MULTIPLY_ROWS, SOFT_CAP, MULTIPLY_EXPERTS,
    MULTIPLY_FLOAT, SHARE, CHOOSE, WEIGH, SUM_EXPERTS, SCALE_ROWS,
    MULTIPLY_EXPERTS_BFLOAT16, JOIN, MULTIPLY_HEADS,
    CONVOLVE, UNIT, DECAY, RECUR, ADD_SCALED, PAIR, MULTIPLY_PAIRS, GROW, KINDS
};

/* Addresses, sizes and strides, in the order of each kind; float32 numbers as bits. Strides are in
 * elements. */
struct op {
    int64_t kind;
    int64_t arg[25];
};

/* Per operation: items taken, items done, input pieces prefetched. One cache line each. */
struct counter {
    _Atomic int64_t taken, done, fetched;
    int64_t unused[5];
};

/* `fetch` of operations with large inputs: prefetch a piece; returns 0 if it does not exist. */
struct kernel {
    int64_t (*items)(const struct op *);
    void (*work)(const struct op *, int64_t item, int64_t level);
    int (*fetch)(const struct op *, int64_t piece);
};

/* Prefetch piece `piece` of `bytes` bytes. */
#define PIECE 2048
INLINE int fetch_piece(const char *from, int64_t bytes, int64_t piece) {
    if (piece * PIECE >= bytes) return 0;
    const int64_t left = bytes - piece * PIECE;
    for (int64_t at = 0; at < PIECE && at < left; at += 64) FETCH(from + piece * PIECE + at);
    return 1;
}

extern const struct kernel kernel_quantize, kernel_multiply, kernel_look_up, kernel_normalize,
    kernel_rotate, kernel_narrow, kernel_store, kernel_attend, kernel_combine, kernel_add,
    kernel_scale, kernel_gate, kernel_activate, kernel_widen, kernel_multiply_bfloat16,
    kernel_attend_rows, kernel_split, kernel_multiply_split, kernel_multiply_rows,
    kernel_soft_cap, kernel_multiply_experts, kernel_multiply_float, kernel_share, kernel_choose,
    kernel_weigh, kernel_sum_experts, kernel_scale_rows, kernel_multiply_experts_bfloat16,
    kernel_join, kernel_multiply_heads, kernel_convolve, kernel_unit, kernel_decay, kernel_recur,
    kernel_add_scaled, kernel_pair, kernel_multiply_pairs, kernel_grow;

INLINE void *address(int64_t number) { return (void *)(intptr_t)number; }
INLINE float number(int64_t bits) { return float_of((uint32_t)bits); }

/* The next of `count` products from `i` on with this expert; `count` if there is none. */
INLINE int64_t next_with(const int64_t *experts, int64_t expert, int64_t i, int64_t count) {
    while (i < count && experts[i] != expert) i++;
    return i;
}

/* `work_name`, which calls the function of the level: name_avx512 and so on. */
#ifdef X86
#define BY_LEVEL(name)                                                                             \
    static void work_##name(const struct op *op, int64_t item, int64_t level) {                    \
        if (level >= AVX512)                                                                       \
            name##_avx512(op, item);                                                               \
        else if (level >= AVX2)                                                                    \
            name##_avx2(op, item);                                                                 \
        else                                                                                       \
            name##_portable(op, item);                                                             \
    }
#else
#define BY_LEVEL(name)                                                                             \
    static void work_##name(const struct op *op, int64_t item, int64_t level) {                    \
        (void)level;                                                                               \
        name##_portable(op, item);                                                                 \
    }
#endif

/* Number formats in memory, and their bytes. */
enum numbers { FLOATS, BFLOATS, HALF_FLOATS };
INLINE int64_t bytes_of(int64_t numbers) { return numbers == FLOATS ? 4 : 2; }

/* The same for functions with a common body, `name(op, item)`, vectorized by the compiler. */
#ifdef X86
#define EACH_LEVEL(name)                                                                           \
    static void name##_portable(const struct op *op, int64_t item) { name(op, item); }             \
    WITH_AVX2 static void name##_avx2(const struct op *op, int64_t item) { name(op, item); }       \
    WITH_AVX512 static void name##_avx512(const struct op *op, int64_t item) { name(op, item); }   \
    BY_LEVEL(name)
#else
#define EACH_LEVEL(name)                                                                           \
    static void name##_portable(const struct op *op, int64_t item) { name(op, item); }             \
    BY_LEVEL(name)
#endif

#endif

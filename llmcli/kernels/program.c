/* Runs operations in order; see program.h. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include <time.h>

#include "program.h"

static const struct kernel *const kernels[KINDS] = {
    [QUANTIZE] = &kernel_quantize, [MULTIPLY] = &kernel_multiply, [LOOK_UP] = &kernel_look_up,
    [NORMALIZE] = &kernel_normalize, [ROTATE] = &kernel_rotate, [NARROW] = &kernel_narrow,
    [STORE] = &kernel_store, [ATTEND] = &kernel_attend, [COMBINE] = &kernel_combine,
    [ADD] = &kernel_add, [SCALE] = &kernel_scale, [GATE] = &kernel_gate,
    [ACTIVATE] = &kernel_activate, [WIDEN] = &kernel_widen,
    [MULTIPLY_BFLOAT16] = &kernel_multiply_bfloat16, [ATTEND_ROWS] = &kernel_attend_rows,
    [SPLIT] = &kernel_split, [MULTIPLY_SPLIT] = &kernel_multiply_split,
    [MULTIPLY_ROWS] = &kernel_multiply_rows, [SOFT_CAP] = &kernel_soft_cap,
    [MULTIPLY_EXPERTS] = &kernel_multiply_experts, [MULTIPLY_FLOAT] = &kernel_multiply_float,
    [SHARE] = &kernel_share, [CHOOSE] = &kernel_choose, [WEIGH] = &kernel_weigh,
    [SUM_EXPERTS] = &kernel_sum_experts, [SCALE_ROWS] = &kernel_scale_rows,
    [MULTIPLY_EXPERTS_BFLOAT16] = &kernel_multiply_experts_bfloat16,
    [JOIN] = &kernel_join, [MULTIPLY_HEADS] = &kernel_multiply_heads,
    [CONVOLVE] = &kernel_convolve, [UNIT] = &kernel_unit, [DECAY] = &kernel_decay,
    [RECUR] = &kernel_recur, [ADD_SCALED] = &kernel_add_scaled,
    [PAIR] = &kernel_pair, [MULTIPLY_PAIRS] = &kernel_multiply_pairs,
    [GROW] = &kernel_grow,
};

struct program {
    const struct op *ops;
    struct counter *counters;
    int64_t count, level, threads;
    int64_t *times; /* or NULL: nanoseconds from `begin` to each operation's end */
    int64_t begin;
    _Atomic int timed; /* a thread of the team records them */
};

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define SPINS 4000 /* polls of a counter before yielding the processor */
#define AHEAD 16   /* operations considered for prefetching */
#define PIECES 128 /* per operation: prefetched data fits in L2 */

/* Prefetch the next piece of operation `i`'s input; returns whether there was one. */
static int fetch_next(const struct program *p, int64_t i) {
    int64_t piece = atomic_fetch_add_explicit(&p->counters[i].fetched, 1, memory_order_relaxed);
    return piece < PIECES && kernels[p->ops[i].kind]->fetch(p->ops + i, piece);
}

/* Wait until all items of counter `i` are done, meanwhile prefetching inputs of operations from
 * `next` on. */
static void wait_for(const struct program *p, int64_t i, int64_t next, int64_t items) {
    const struct counter *c = p->counters + i;
    const int64_t end = next + AHEAD < p->count ? next + AHEAD : p->count;
    int more = 1;
    for (int64_t spins = 0; atomic_load_explicit(&c->done, memory_order_acquire) < items; spins++) {
        while (next < end && !kernels[p->ops[next].kind]->fetch) next++;
        if (more && next < end && (more = fetch_next(p, next))) continue;
#ifdef X86
        _mm_pause();
#endif
        if (spins >= SPINS) sched_yield();
    }
}

/* Take some consecutive items, fewer towards the end: returns their number, and the first. */
static int64_t take(struct counter *c, int64_t items, int64_t threads, int64_t *first) {
    int64_t count;
    *first = atomic_load_explicit(&c->taken, memory_order_relaxed);
    do {
        const int64_t left = items - *first;
        if (left <= 0) return 0;
        count = 2 * left / (3 * threads);
        count = count ? count : 1;
    } while (!atomic_compare_exchange_weak(&c->taken, first, *first + count));
    return count;
}

INLINE int64_t items_of(const struct program *p, int64_t i) {
    return kernels[p->ops[i].kind]->items(p->ops + i);
}

INLINE void work(const struct program *p, int64_t i, int64_t item) {
    kernels[p->ops[i].kind]->work(p->ops + i, item, p->level);
}

/* A step: operations `i` to `end` - 1 with one item each, run by the first available thread. */
static void run_step(const struct program *p, int64_t i, int64_t end) {
    struct counter *c = p->counters + i;
    if (!atomic_fetch_add(&c->taken, 1)) {
        for (; i < end; i++) {
            if (items_of(p, i)) work(p, i, 0);
            if (p->times) p->times[i] = nanoseconds() - p->begin;
        }
        atomic_store_explicit(&c->done, 1, memory_order_release);
    }
}

static void take_items(void *data) {
    struct program *p = data;
    const int keeps = p->times && !atomic_exchange(&p->timed, 1);
    for (int64_t i = 0, end; i < p->count; i = end) {
        struct counter *c = p->counters + i;
        int64_t items = items_of(p, i);
        for (end = i + 1; items < 2 && end < p->count && items_of(p, end) < 2;) end++;
        if (items < 2) {
            run_step(p, i, end);
            wait_for(p, i, end, 1);
            continue;
        }
        for (int64_t item, count; (count = take(c, items, p->threads, &item));) {
            for (int64_t last = item + count; item < last; item++) work(p, i, item);
            atomic_fetch_add_explicit(&c->done, count, memory_order_release);
        }
        wait_for(p, i, end, items);
        if (keeps) p->times[i] = nanoseconds() - p->begin;
    }
}

/* `counters` has `count` entries, as does `times` unless NULL. */
void llmcli_run(const struct op *ops, int64_t count, struct counter *counters,
                const struct team *team, int64_t *times) {
    struct program p = {
        .ops = ops, .counters = counters, .count = count, .level = team->level,
        .threads = team->threads, .times = times, .begin = times ? nanoseconds() : 0,
    };
    int alone = 1;
    for (int64_t i = 0; alone && i < count; i++) alone = items_of(&p, i) < 2;
    memset(counters, 0, (size_t)count * sizeof *counters);
    run_team(team, take_items, &p, alone);
    /* a thread may read the clock after others have finished later operations */
    for (int64_t i = count - 2; times && i >= 0; i--)
        if (times[i] > times[i + 1]) times[i] = times[i + 1];
}

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
};

struct program {
    const struct op *ops;
    struct counter *counters;
    int64_t count, level;
    int64_t *times; /* or NULL: nanoseconds from `begin` to when each operation was done */
    int64_t begin;
    _Atomic int timed; /* a thread of the team keeps them */
};

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define SPINS 4000 /* looks at a counter before the processor is given to others */

static void wait_for(const struct counter *c, int64_t items) {
    for (int spins = 0; atomic_load_explicit(&c->done, memory_order_acquire) < items; spins++) {
#ifdef X86
        _mm_pause();
#endif
        if (spins >= SPINS) sched_yield();
    }
}

static void take_items(void *data) {
    struct program *p = data;
    const int keeps = p->times && !atomic_exchange(&p->timed, 1);
    for (int64_t i = 0; i < p->count; i++) {
        const struct op *op = p->ops + i;
        const struct kernel *kernel = kernels[op->kind];
        struct counter *c = p->counters + i;
        int64_t items = kernel->items(op);
        for (int64_t item; (item = atomic_fetch_add(&c->taken, 1)) < items;) {
            kernel->work(op, item, p->level);
            atomic_fetch_add_explicit(&c->done, 1, memory_order_release);
        }
        wait_for(c, items);
        if (keeps) p->times[i] = nanoseconds() - p->begin;
    }
}

/* `counters` is room for `count` of them, `times` too, or NULL. */
void llmcli_run(const struct op *ops, int64_t count, struct counter *counters,
                const struct team *team, int64_t *times) {
    struct program p = {.ops = ops, .counters = counters, .count = count, .level = team->level,
                        .times = times, .begin = times ? nanoseconds() : 0};
    int alone = 1;
    for (int64_t i = 0; alone && i < count; i++) alone = kernels[ops[i].kind]->items(ops + i) < 2;
    memset(counters, 0, (size_t)count * sizeof *counters);
    run_team(team, take_items, &p, alone);
}
